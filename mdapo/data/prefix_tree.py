"""Shared prefixes: the common beginnings of a group's samples, each token once.

The samples of a group begin with one prompt, and the branches of a dialogue with the same turns. Their trie over token
ids is laid out node by node (unfold.py): a node's tokens attend to its ancestors' and, causally, to themselves, which
is what they saw in their own sample. All else (norms, projections, MLP) is token by token, so nothing is approximated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST = 8  # tokens worth a node of their own: each costs an attention call


@dataclass(frozen=True)
class PrefixTree:
    """M nodes for N rows: node m is ``lengths_M`` tokens, from position ``begins_M`` on, of row ``rows_M``.

    All rows that go through it have the same ones there. Parents come before their children; that of a root is -1.
    ``paths``: for each row its nodes from a root to a leaf of its own, which together are the row. Arrays are int64.
    """

    rows_M: np.ndarray
    begins_M: np.ndarray
    lengths_M: np.ndarray
    parents: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths_M.sum())


def prefix_tree(rows: Sequence[np.ndarray], *, least: int = LEAST) -> PrefixTree:
    """The trie of ``rows`` (ids [L_i], L_i >= 1), parents first; inner nodes have at least ``least`` tokens.

    Every row keeps its last token to itself, so that no two rows end in the same node. Time is about the sum of the
    lengths for each level of branching.
    """
    nodes: list[tuple[int, int, int, int]] = []  # row, begin, length, parent
    paths: list[tuple[int, ...]] = [()] * len(rows)

    def lay(row: int, begin: int, end: int, above: tuple[int, ...]) -> tuple[int, ...]:
        """A node below ``above``; the path to it."""
        nodes.append((row, begin, end - begin, above[-1] if above else -1))
        return (*above, len(nodes) - 1)

    waiting: list[tuple[list[int], int, int, tuple[int, ...]]] = [(list(range(len(rows))), 0, 0, ())]
    while waiting:
        members, begin, look, above = waiting.pop()  # these rows agree from begin up to look
        for siblings in _by_token(rows, members, look):
            first = siblings[0]
            if len(siblings) == 1:
                paths[first] = lay(first, begin, len(rows[first]), above)
                continue
            end = look + _common(rows, siblings, look)
            if end - begin >= least:
                waiting.append((siblings, end, end, lay(first, begin, end, above)))
            else:
                waiting.append((siblings, begin, end, above))
    row, begin, length, parent = np.array(nodes, np.int64).T
    return PrefixTree(row, begin, length, tuple(parent.tolist()), tuple(paths))


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
