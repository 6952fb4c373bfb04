"""Shared prefixes: the common beginnings of a group's samples, each token once.

The samples of a group begin with one prompt, and the branches of a dialogue with the same turns. Their trie over token
ids is laid out node by node: a node's tokens attend to its ancestors' and, causally, to themselves, which is what they
saw in their own sample. All else (norms, projections, MLP) is token by token, so nothing is approximated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from mdapo.types import MicroBatch

LEAST = 8  # tokens worth a node of their own: each costs an attention call


@dataclass(frozen=True)
class PrefixTree:
    """M nodes end to end in T tokens, for N rows of U tokens end to end.

    ``cu_seqlens``: M + 1 integers from 0 to T. ``parents``: M indices, a parent before its children, -1 for a root.
    ``source_T``: int64, for each token of the tree one of the U that it stands for; ``place_U``: the way back.
    """

    cu_seqlens: tuple[int, ...]
    parents: tuple[int, ...]
    source_T: np.ndarray
    place_U: np.ndarray


def prefix_tree(rows: Sequence[np.ndarray], *, least: int = LEAST) -> PrefixTree:
    """The trie of ``rows`` (ids [L_i], L_i >= 1), parents first; inner nodes have at least ``least`` tokens.

    Every row keeps its last token to itself, so that no two rows end in the same node. Time is about the sum of the
    lengths for each level of branching.
    """
    starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    place_U = np.empty(starts[-1], np.int64)
    sources: list[np.ndarray] = []
    parents: list[int] = []
    ends = [0]

    def lay(members: list[int], begin: int, end: int, parent: int) -> int:
        """The node of the tokens ``begin`` to ``end`` of these rows."""
        sources.append(np.arange(starts[members[0]] + begin, starts[members[0]] + end))
        for row in members:
            place_U[starts[row] + begin : starts[row] + end] = np.arange(ends[-1], ends[-1] + end - begin)
        ends.append(ends[-1] + end - begin)
        parents.append(parent)
        return len(parents) - 1

    waiting = [(list(range(len(rows))), 0, 0, -1)]
    while waiting:
        members, begin, look, parent = waiting.pop()  # these rows agree from begin up to look
        for siblings in _by_token(rows, members, look):
            if len(siblings) == 1:
                lay(siblings, begin, len(rows[siblings[0]]), parent)
                continue
            end = look + _common(rows, siblings, look)
            if end - begin >= least:
                waiting.append((siblings, end, end, lay(siblings, begin, end, parent)))
            else:
                waiting.append((siblings, begin, end, parent))
    return PrefixTree(tuple(ends), tuple(parents), np.concatenate(sources), place_U)


def share_prefixes(mb: MicroBatch, rows: Sequence[np.ndarray], *, multiple: int = 1) -> MicroBatch:
    """The packed micro-batch of ``rows`` (without padding) with every common beginning once.

    What is scored stays as it is, in number and order. A last segment of zeros rounds T up to ``multiple``.
    """
    tree = prefix_tree(rows)
    source_T, place_U = torch.from_numpy(tree.source_T), torch.from_numpy(tree.place_U)
    ids_T, positions_T = mb.ids_T[source_T], mb.positions_T[source_T]
    cu_seqlens, parents = tree.cu_seqlens, tree.parents
    missing = -len(ids_T) % multiple
    if missing:
        ids_T, positions_T = F.pad(ids_T, (0, missing)), torch.cat([positions_T, torch.arange(missing)])
        cu_seqlens, parents = (*cu_seqlens, cu_seqlens[-1] + missing), (*parents, -1)
    return replace(
        mb,
        ids_T=ids_T,
        positions_T=positions_T,
        cu_seqlens=cu_seqlens,
        parents=parents,
        loss_index_R=place_U[mb.loss_index_R],
    )


def _by_token(rows: Sequence[np.ndarray], members: Sequence[int], at: int) -> list[list[int]]:
    """Rows with the same token at ``at``, together; one that has nothing after it, alone."""
    found: dict[tuple[int, int], list[int]] = {}
    for row in members:
        last = row if at == len(rows[row]) - 1 else -1
        found.setdefault((int(rows[row][at]), last), []).append(row)
    return list(found.values())


def _common(rows: Sequence[np.ndarray], members: Sequence[int], begin: int) -> int:
    """How many tokens from ``begin`` on all these rows share, each row's last left out."""
    first = rows[members[0]]
    shared = min(len(rows[row]) for row in members) - 1
    for row in members[1:]:
        differs = np.flatnonzero(first[begin:shared] != rows[row][begin:shared])
        if len(differs):
            shared = begin + int(differs[0])
    return max(0, shared - begin)
