"""How large prefix trees are, without building them: what a batch costs where common beginnings are computed once.

Rows (token ids) that stay together, a *bundle*, are laid out as the trie of their ids, each common beginning once
(`mdapo.data.prefix_tree`). In the order of a dictionary a row shares most with its neighbours, so that the trie has

    sum_i L_i - sum_i s_i      tokens, for rows of L_i tokens that share s_i with the one before.

A token attends to its ancestors and, causally, to its node, as it does in its own row. Attention over a row of L tokens
is L^2 / 2 pairs; of the trie it is half of sum_i L_i^2 - sum_i s_i^2, for the same reason.

A node has at least ``least`` tokens: what rows share beyond the node above, if it is less, each of them has to itself;
s_i is the end of the last node that both rows are below. A row's last token is always its own.

Kernels: csrc/prefix. Shape suffixes: ``N`` rows, ``P`` tokens of all rows, ``B`` bundles.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mdapo.ops import registry
from mdapo.ops.columns import column

MAX_TOKENS = 2**31 - 1  # of a bundle's rows


def prefix_sizes(
    ids_P: np.ndarray, starts_N: np.ndarray, lengths_N: np.ndarray, ends_B: np.ndarray, *, least: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``order_N, tokens_B, squares_B``, int64: of each bundle its rows in the order of their ids, and its trie's size.

    ``ids_P`` int32; row i is ``lengths_N[i]`` tokens (one at least) from ``starts_N[i]`` on; bundle b ends before row
    ``ends_B[b]``, and begins where the one before it ends. ``squares_B``: twice the pairs of tokens that attention
    looks at. ValueError or RuntimeError for rows that are not in ``ids_P`` and ends that do not lead from 0 to N.
    """
    named = {"starts": starts_N, "lengths": lengths_N, "ends": ends_B}
    columns = [torch.from_numpy(column(name, values)) for name, values in named.items()]
    ids = torch.from_numpy(column("ids", ids_P, np.int32))
    order_N, tokens_B, squares_B = torch.ops.mdapo.prefix_sizes(ids, *columns, least)
    return order_N.numpy(), tokens_B.numpy(), squares_B.numpy()


# The op.


def _reference(
    ids_P: Tensor, starts_N: Tensor, lengths_N: Tensor, ends_B: Tensor, least: int
) -> tuple[Tensor, Tensor, Tensor]:
    ids, starts, lengths, ends = ids_P.numpy(), starts_N.tolist(), lengths_N.tolist(), ends_B.tolist()
    _check(len(ids), starts, lengths, ends, least)
    order: list[int] = []
    tokens: list[int] = []
    squares: list[int] = []
    for first, last in pairwise([0, *ends]):
        rows = {i: ids[starts[i] :][: lengths[i]] for i in range(first, last)}
        own = sorted(rows, key=lambda i: (rows[i].tolist(), i))
        order += own
        shared = [_common(rows[a], rows[b]) for a, b in pairwise(own)]
        saved = list(_saved(shared, least))
        tokens.append(sum(lengths[i] for i in own) - sum(saved))
        squares.append(sum(lengths[i] ** 2 for i in own) - sum(s**2 for s in saved))
    order_N, tokens_B, squares_B = (torch.tensor(found, dtype=torch.int64) for found in (order, tokens, squares))
    return order_N, tokens_B, squares_B


def _common(a: np.ndarray, b: np.ndarray) -> int:
    end = min(len(a), len(b)) - 1
    differ = np.flatnonzero(a[:end] != b[:end])
    return int(differ[0]) if len(differ) else end


def _saved(shared: list[int], least: int) -> Iterator[int]:
    """Of each pair of neighbours the tokens laid out once, in no order."""
    waiting = [(shared, 0)]  # neighbours that are all below a node, and where it ends
    while waiting:
        run, begin = waiting.pop()
        if not run:
            continue
        end = min(run)
        begin = end if end - begin >= least else begin
        cuts = [-1, *(at for at, s in enumerate(run) if s == end), len(run)]
        yield from [begin] * (len(cuts) - 2)
        waiting += [(run[first + 1 : last], begin) for first, last in pairwise(cuts)]


def _check(tokens: int, starts: list[int], lengths: list[int], ends: list[int], least: int) -> None:
    if least < 1:
        raise ValueError("least: at least 1")
    if len(starts) != len(lengths):
        raise ValueError("starts and lengths differ in size")
    if any(start < 0 or length < 1 or start + length > tokens for start, length in zip(starts, lengths, strict=True)):
        raise ValueError("starts and lengths: a row is not in ids")
    edges = [0, *ends]
    if sorted(edges) != edges or edges[-1] != len(starts):
        raise ValueError("ends: they rise from 0 to the number of rows")
    if any(sum(lengths[first:last]) > MAX_TOKENS for first, last in pairwise(edges)):
        raise ValueError("a bundle of more than 2^31 - 1 tokens")


registry.define(
    "prefix_sizes(Tensor ids_P, Tensor starts_N, Tensor lengths_N, Tensor ends_B, int least)"
    " -> (Tensor, Tensor, Tensor)",
    reference=_reference,
    fake=lambda ids_P, starts_N, lengths_N, ends_B, least: (
        torch.empty_like(starts_N),
        torch.empty_like(ends_B),
        torch.empty_like(ends_B),
    ),
)
