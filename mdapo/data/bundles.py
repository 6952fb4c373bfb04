"""Samples of a group kept together where that pays: what they share is computed once (`mdapo.data.prefix_tree`).

A bundle is a run of a group's rows in the order of their ids, so that those which agree furthest stay together. Whole
groups save most and are hardest to level; so groups are also tried in halves, quarters, and so on down to single rows,
and each mini-batch takes the plan under which ranks wait least. A finer cut never has less work in all: once a plan is
as good as a level cut of what the next finer one has to do, no finer one is tried.

Shape suffixes: ``N`` rows, ``B`` bundles, ``M`` mini-batches, ``P`` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mdapo.config.flops import WorkModel
from mdapo.data.prefix_tree import LEAST
from mdapo.ops.balance import Objective, Plan, plan_step
from mdapo.ops.prefix import prefix_sizes


@dataclass(frozen=True)
class Bundled:
    """Rows in the order of group, then ids: ``row_N`` says which. ``last_N`` is true where a bundle ends."""

    ids_P: np.ndarray  # int32
    row_N: np.ndarray  # int64, as all but last_N
    starts_N: np.ndarray
    lengths_N: np.ndarray
    group_N: np.ndarray
    last_N: np.ndarray
    tokens_B: np.ndarray
    squares_B: np.ndarray

    @property
    def bundle_N(self) -> np.ndarray:
        return np.cumsum(self.last_N) - self.last_N

    def sums_B(self, values_N: np.ndarray) -> np.ndarray:
        """Of each bundle; ``values_N`` in the order that the rows came in."""
        return np.add.reduceat(values_N[self.row_N], np.flatnonzero(self.last_N) + 1 - self._sizes_B)

    @property
    def _sizes_B(self) -> np.ndarray:
        return np.diff(np.flatnonzero(self.last_N), prepend=-1)


def plan_bundles(
    ids_P: np.ndarray,
    starts_N: np.ndarray,
    lengths_N: np.ndarray,
    scored_N: np.ndarray,
    group_N: np.ndarray,
    mini_N: np.ndarray,
    *,
    cap: int,
    work: WorkModel,
    dp: int,
    at_least: int = 1,
    objective: Objective = "slowest",
    **shape: Any,
) -> Plan:
    """As `plan_step` for N rows, where ``cap`` holds for the tokens that a micro-batch has once it shares beginnings.

    Row i is ``lengths_N[i]`` tokens of ``ids_P`` (int32) from ``starts_N[i]`` on. A group is all in one mini-batch;
    each of 0 to M - 1 has a row. A row over the cap is alone.
    """
    best_M = np.full(int(mini_N.max(initial=-1)) + 1, np.inf)
    best: list[Any] = [None] * len(best_M)  # plan and bundles; of single rows there is always one
    rows_M = np.bincount(mini_N, minlength=len(best_M))
    for bundled in _levels(ids_P, starts_N, lengths_N, group_N, cap):
        costs_B = work.of(bundled.tokens_B, bundled.sums_B(scored_N), bundled.squares_B)
        mini_B = mini_N[bundled.row_N[bundled.last_N]]
        if (best_M <= np.bincount(mini_B, costs_B) / dp).all():
            break
        plan = plan_step(
            bundled.tokens_B,
            costs_N=costs_B,
            mini_N=mini_B,
            dp=dp,
            cap=cap,
            at_least=at_least,
            objective=objective,
            over_cap="alone",
            **shape,
        )
        allowed_M = _keeps(plan, bundled, cap) & (np.array(plan.counts_M) >= np.minimum(at_least, rows_M // dp))
        load_M = np.where(allowed_M, plan.load_M(costs_B, objective), np.inf)
        best = [(plan, bundled) if load_M[m] < best_M[m] else best[m] for m in range(len(best_M))]
        best_M = np.minimum(load_M, best_M)
    return _joined(best, mini_N, dp)


def _levels(
    ids_P: np.ndarray, starts_N: np.ndarray, lengths_N: np.ndarray, group_N: np.ndarray, cap: int
) -> Iterator[Bundled]:
    """Groups whole, in halves, in quarters, ..., as single rows. A bundle over the cap is cut until none is."""
    if len(group_N) == 0:
        return
    order = np.argsort(group_N, kind="stable")
    ends = np.flatnonzero(np.diff(group_N[order], append=-1))
    row_N = order[prefix_sizes(ids_P, starts_N[order], lengths_N[order], ends + 1, least=LEAST)[0]]
    starts_N, lengths_N, group_N = starts_N[row_N], lengths_N[row_N], group_N[row_N]
    group_N = np.unique(group_N, return_inverse=True)[1]
    sizes = np.bincount(group_N)
    size_N, within_N = sizes[group_N], np.arange(len(group_N)) - (sizes.cumsum() - sizes)[group_N]

    def cut(parts_N: np.ndarray) -> Bundled:
        """Each group in so many parts, or as many as it has rows."""
        part_N = within_N * np.minimum(parts_N, size_N) // size_N
        last_N = (np.diff(part_N, append=-1) != 0) | (within_N == size_N - 1)
        _, tokens, squares = prefix_sizes(ids_P, starts_N, lengths_N, np.flatnonzero(last_N) + 1, least=LEAST)
        return Bundled(ids_P, row_N, starts_N, lengths_N, group_N, last_N, tokens, squares)

    parts_N = np.ones(len(group_N), np.int64)
    while True:
        found = cut(parts_N)
        over_N = (found.tokens_B > cap)[found.bundle_N] & (parts_N < size_N)
        if over_N.any():
            parts_N = np.where(np.isin(group_N, group_N[over_N]), 2 * parts_N, parts_N)
            continue
        yield found
        if found.last_N.all():
            return
        parts_N = 2 * parts_N


def _keeps(plan: Plan, bundled: Bundled, cap: int) -> np.ndarray:
    """bool [M]: whether every micro-batch is within the cap as one tree.

    Bundles in one tree can have more tokens than they have apart: where they begin alike, what only one of them goes on
    to share may be too short for a node.
    """
    place_N = plan.place_N[bundled.bundle_N]
    order = np.argsort(place_N, kind="stable")
    last = np.flatnonzero(np.diff(place_N[order], append=-1))
    sizes = np.diff(last, prepend=-1)
    sums = np.add.reduceat(bundled.lengths_N[order], last + 1 - sizes)
    asked = np.repeat((sums > cap) & (sizes > 1), sizes)  # the others hold it without sharing, or are alone
    kept = np.ones(len(plan.counts_M), bool)
    if asked.any():
        rows = order[asked]
        ends = np.flatnonzero(np.diff(place_N[rows], append=-1))
        _, tokens, _ = prefix_sizes(
            bundled.ids_P, bundled.starts_N[rows], bundled.lengths_N[rows], ends + 1, least=LEAST
        )
        kept[plan.mini_N[bundled.bundle_N[rows[ends[tokens > cap]]]]] = False
    return kept


def _joined(best: list[tuple[Plan, Bundled]], mini_N: np.ndarray, dp: int) -> Plan:
    """One plan of rows out of one plan of bundles for each mini-batch."""
    rank_N, micro_N = np.zeros_like(mini_N), np.zeros_like(mini_N)
    for plan, bundled in {id(plan): (plan, bundled) for plan, bundled in best}.values():
        chosen_M = np.array([other is plan for other, _ in best])
        own = chosen_M[mini_N[bundled.row_N]]
        rows, bundle = bundled.row_N[own], bundled.bundle_N[own]
        rank_N[rows], micro_N[rows] = plan.rank_N[bundle], plan.micro_N[bundle]
    return Plan(dp, tuple(plan.counts_M[m] for m, (plan, _) in enumerate(best)), rank_N, mini_N, micro_N)
