"""What others balance with, written anew from the literature: the baselines of bench_balance.py.

Differencing in k ways (Karmarkar and Karp 1982) and for equal sizes (Michiels et al. 2003), as Python code for
reinforcement learning has it: a heap of states, each a list of k sets with their sums. Plans made of it: more and more
parts until none is over the cap; and first fit, rank by rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

Sets = list[tuple[int, tuple[int, ...]]]  # sum and items of each of k sets, the largest sum first


def differencing(costs: Sequence[int], k: int) -> list[tuple[int, ...]]:
    """Largest differencing: the two states of most spread become one, the largest set of each with the smallest of the
    other, until one is left."""
    return _difference([[(int(cost), (item,))] + [(0, ())] * (k - 1) for item, cost in enumerate(costs)])


def differencing_equal(costs: Sequence[int], k: int) -> list[tuple[int, ...]]:
    """The same for parts of equal size: it begins with tuples of the next k items. k divides their number."""
    assert len(costs) % k == 0
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    return _difference([[(int(costs[i]), (i,)) for i in order[at : at + k]] for at in range(0, len(order), k)])


def _difference(states: list[Sets]) -> list[tuple[int, ...]]:
    heap = [(sets[-1][0] - sets[0][0], number, sets) for number, sets in enumerate(states)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    return [items for _, items in heap[0][2]]


def differencing_sparse(costs: Sequence[int], k: int) -> list[tuple[int, ...]]:
    """`differencing` without the empty sets: the same sums, and fast enough for thousands of items and hundreds of
    parts."""

    def spread(sets: Sets) -> int:
        return (sets[-1][0] if len(sets) == k else 0) - sets[0][0]

    heap = [(-int(cost), item, [(int(cost), (item,))]) for item, cost in enumerate(costs)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        shared = max(len(first) + len(second) - k, 0)  # so many sets of one meet one of the other
        ends = zip(first[len(first) - shared :], reversed(second[len(second) - shared :]), strict=True)
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in ends]
        merged += first[: len(first) - shared] + second[: len(second) - shared]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (spread(merged), number, merged))
        number += 1
    found = [items for _, items in heap[0][2]]
    return found + [()] * (k - len(found))


def strict_differencing(tokens: np.ndarray, costs: np.ndarray, *, dp: int, cap: int) -> list[list[list[int]]]:
    """Micro-batches of all ranks by differencing, one more a rank until none is over the cap; then they go to ranks by
    differencing of equal size. [rank][micro]"""
    micro = -(-int(tokens.sum()) // (cap * dp))
    while True:
        parts = differencing_sparse(costs.tolist(), micro * dp)
        if max(int(tokens[list(part)].sum()) for part in parts) <= cap:
            break
        micro += 1
    loads = [int(costs[list(part)].sum()) for part in parts]
    return [[list(parts[p]) for p in rank] for rank in differencing_equal(loads, dp)]


def first_fit(tokens: np.ndarray, costs: np.ndarray, *, dp: int, cap: int) -> list[list[list[int]]]:
    """Samples to ranks by differencing of equal size; on each rank, in their order, into the first micro-batch that has
    room. Ranks with fewer micro-batches wait. [rank][micro]"""
    ranks = []
    for members in differencing_equal(costs.tolist(), dp):
        bins: list[list[int]] = []
        for item in sorted(members):
            fits = (b for b in bins if tokens[b].sum() + tokens[item] <= cap)
            chosen = next(fits, None)
            if chosen is None:
                bins.append([item])
            else:
                chosen.append(item)
        ranks.append(bins)
    most = max(map(len, ranks))
    return [bins + [[]] * (most - len(bins)) for bins in ranks]
