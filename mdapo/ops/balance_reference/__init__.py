"""The balancing algorithms in plain Python: slow, and exchange by exchange what csrc/balance does, file by file.

`mdapo.ops.balance` describes them. Costs are integers, so that no sum depends on its order. Items are positions
``0 .. n - 1`` in an order of falling cost; a group's members are ascending positions; of equals the first is taken.
"""
