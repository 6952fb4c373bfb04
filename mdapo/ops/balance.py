"""Cutting a ragged batch: items into balanced parts, samples into micro-batches under a hard token cap.

Deterministic, planned once on one rank for all of them, so that every rank runs the same number of micro-batches.
Longest first into the lightest part, then moves and swaps between the heaviest part and the others.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mdapo.errors import UserError

# Work of a sequence of L tokens, up to a factor: LINEAR_COST * L + L^2, which is about right for a hidden size of 4096.
LINEAR_COST = 24576
REFINE_ROUNDS = 64


@dataclass(frozen=True)
class Plan:
    """``ranks[rank][micro]`` is a tuple of sample indices; every rank has as many micro-batches; ``()`` is a filler."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.ranks[0])


def token_cost(lengths_N: Sequence[int] | np.ndarray) -> np.ndarray:
    """Relative work of each sequence, float64 [N]."""
    lengths = np.asarray(lengths_N, np.float64)
    return lengths * (LINEAR_COST + lengths)


def partition(costs_N: Sequence[float] | np.ndarray, k: int, *, equal_size: bool = False) -> list[list[int]]:
    """Indices of ``N`` items in ``k`` parts of nearly equal cost, ascending within a part.

    ``equal_size``: parts differ by at most one item, the larger ones first (nine items in four parts: 3, 2, 2, 2).
    No part is empty when ``N >= k``.
    """
    costs = np.asarray(costs_N, np.float64)
    room = [len(costs)] * k
    if equal_size:
        room = [len(costs) // k + (part < len(costs) % k) for part in range(k)]
    parts: list[list[int]] = [[] for _ in range(k)]
    # Fewer items first among equals: items without cost must not all end in one part.
    heap = [(0.0, 0, part) for part in range(k) if room[part]]
    for item in _longest_first(costs).tolist():
        load, size, part = heapq.heappop(heap)
        parts[part].append(item)
        if size + 1 < room[part]:
            heapq.heappush(heap, (load + costs[item], size + 1, part))
    _refine(parts, costs, may_move=not equal_size)
    return [sorted(part) for part in parts]


def plan_micro_batches(
    lengths_N: Sequence[int] | np.ndarray,
    *,
    dp: int,
    cap: int,
    multiple: int = 1,
    padded: bool = False,
    over_cap: str = "error",
    names: Sequence[str] | None = None,
) -> Plan:
    """Samples -> data-parallel ranks -> micro-batches of at most ``cap`` tokens each, in as few as are found to do.

    Every rank gets the same number of micro-batches, a multiple of ``multiple`` (virtual pipelines need one); where
    samples run out the rest are fillers. ``padded`` counts a micro-batch as its number of rows times its longest. A
    sample longer than the cap is a ``UserError`` that names it (``names``, default its index), or with
    ``over_cap="alone"`` has a micro-batch to itself.
    """
    lengths = np.asarray(lengths_N, np.int64)
    alone = np.flatnonzero(lengths > cap)
    if len(alone) and over_cap == "error":
        label = [str(i) for i in range(len(lengths))] if names is None else names
        raise UserError(
            [
                f"actor.ppo_max_token_len: sample {label[i]} has {lengths[i]} tokens, a micro-batch may have {cap}; "
                f"raise it, lower rollout.max_response_len, or set actor.over_cap: alone"
                for i in alone.tolist()
            ]
        )
    rest = np.flatnonzero(lengths <= cap)
    bins = [[i] for i in alone.tolist()] + _pack_bins(
        lengths, rest, cap=cap, padded=padded, dp=dp, used=len(alone), multiple=multiple
    )
    per_rank = _round_up(-(-len(bins) // dp), multiple)
    bins += [[] for _ in range(per_rank * dp - len(bins))]
    return _assign(bins, token_cost(lengths), dp)


def plan_fixed(lengths_N: Sequence[int] | np.ndarray, *, dp: int, size: int, multiple: int = 1) -> Plan:
    """As `plan_micro_batches`, but each micro-batch holds ``size`` samples at most and their tokens are not counted."""
    costs = token_cost(lengths_N)
    per_rank = _round_up(-(-len(costs) // (size * dp)), multiple)
    return _assign(partition(costs, per_rank * dp, equal_size=True), costs, dp)


def _assign(bins: list[list[int]], costs: np.ndarray, dp: int) -> Plan:
    """Micro-batches to ranks: equal numbers, equal loads, heavy ones first so that ranks meet likes in each slot."""
    loads = np.array([costs[members].sum() for members in bins])
    ranks = []
    for part in partition(loads, dp, equal_size=True):
        order = sorted(part, key=lambda b: (-loads[b], b))
        ranks.append(tuple(tuple(sorted(bins[b])) for b in order))
    return Plan(tuple(ranks))


def _pack_bins(
    lengths: np.ndarray, items: np.ndarray, *, cap: int, padded: bool, dp: int, used: int, multiple: int
) -> list[list[int]]:
    """Bins of at most ``cap`` tokens: as many as make the fewest micro-batches a rank, and balanced if they can be."""
    if len(items) == 0:
        return []
    if padded:
        fewest = len(_neighbours(lengths, items, cap=cap))
        count = _round_up(-(-(fewest + used) // dp), multiple) * dp - used
        return _split(_levelled_neighbours(lengths, items, cap=cap, count=count), count)
    costs = token_cost(lengths)
    fitted = _best_fit(lengths, items, cap=cap)
    lower = -(-int(lengths[items].sum()) // cap)
    per_rank = _round_up(-(-(lower + used) // dp), multiple)
    while True:
        count = per_rank * dp - used
        balanced = _lightest_fit(lengths, costs, items, cap=cap, count=count)
        if balanced is not None:
            return balanced
        if len(fitted) <= count:
            return _split(fitted, count)
        per_rank += multiple


def _lightest_fit(
    lengths: np.ndarray, costs: np.ndarray, items: np.ndarray, *, cap: int, count: int
) -> list[list[int]] | None:
    """Longest first into the lightest of ``count`` bins that has room; None when one finds no room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    heap = [(0.0, b) for b in range(count)]
    for item in items[_longest_first(lengths[items])]:
        full = []
        while heap and tokens[heap[0][1]] + lengths[item] > cap:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, b = heapq.heappop(heap)
        bins[b].append(int(item))
        tokens[b] += int(lengths[item])
        heapq.heappush(heap, (load + costs[item], b))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _best_fit(lengths: np.ndarray, items: np.ndarray, *, cap: int) -> list[list[int]]:
    """Longest first into the fullest bin that still has room, a new bin when none has: few bins, not balanced."""
    bins: list[list[int]] = []
    by_room: list[tuple[int, int]] = []  # (free tokens, bin), sorted
    for item in items[_longest_first(lengths[items])]:
        length = int(lengths[item])
        at = bisect_left(by_room, (length, -1))
        if at < len(by_room):
            free, b = by_room.pop(at)
            bins[b].append(int(item))
        else:
            free, b = cap, len(bins)
            bins.append([int(item)])
        insort(by_room, (free - length, b))
    return bins


def _neighbours(lengths: np.ndarray, items: np.ndarray, *, cap: int) -> list[list[int]]:
    """Neighbours in length together, while rows times the longest stay within the cap: the fewest padded bins."""
    bins: list[list[int]] = []
    longest = 0
    for item in items[_longest_first(lengths[items])]:
        if bins and (len(bins[-1]) + 1) * longest <= cap:
            bins[-1].append(int(item))
        else:
            bins.append([int(item)])
            longest = int(lengths[item])
    return bins


def _levelled_neighbours(lengths: np.ndarray, items: np.ndarray, *, cap: int, count: int) -> list[list[int]]:
    """As `_neighbours`, at most ``count`` bins, under the lowest cap that gives no more."""
    low, high = int(lengths[items].max()), cap
    while low < high:
        middle = (low + high) // 2
        if len(_neighbours(lengths, items, cap=middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return _neighbours(lengths, items, cap=high)


def _split(bins: list[list[int]], count: int) -> list[list[int]]:
    """Halve the most numerous bins while there are fewer than ``count``: no rank shall wait for another's samples."""
    bins = list(bins)
    while len(bins) < count:
        largest = max(range(len(bins)), key=lambda b: len(bins[b]))
        members = bins[largest]
        if len(members) < 2:
            break
        bins[largest], half = members[: len(members) // 2], members[len(members) // 2 :]
        bins.append(half)
    return bins


def _refine(parts: list[list[int]], costs: np.ndarray, *, may_move: bool) -> None:
    """Level the heaviest part against others by the move or swap that helps most, while one helps."""
    loads = [float(costs[part].sum()) for part in parts]
    for _ in range(REFINE_ROUNDS):
        heavy = max(range(len(parts)), key=lambda p: loads[p])
        for light in sorted(range(len(parts)), key=lambda p: loads[p])[:4]:
            if _level(parts, loads, costs, heavy, light, may_move=may_move):
                break
        else:
            return


def _level(
    parts: list[list[int]], loads: list[float], costs: np.ndarray, heavy: int, light: int, *, may_move: bool
) -> bool:
    """One exchange from ``heavy`` to ``light`` that lowers the larger of the two loads most; False when none does."""
    gap = loads[heavy] - loads[light]
    out, back = costs[parts[heavy]], costs[parts[light]]
    if may_move and len(parts[heavy]) > 1:
        back = np.append(back, 0.0)
    if gap <= 0 or len(out) == 0 or len(back) == 0:
        return False
    shift = out[:, None] - back[None, :]
    gain = np.where((shift > 0) & (shift < gap), np.minimum(shift, gap - shift), 0.0)
    best = int(gain.argmax())
    i, j = divmod(best, gain.shape[1])
    if gain[i, j] <= 1e-9 * loads[heavy]:
        return False
    moved = parts[heavy].pop(i)
    if j < len(parts[light]):
        parts[heavy].append(parts[light].pop(j))
    parts[light].append(moved)
    loads[heavy] -= float(shift[i, j])
    loads[light] += float(shift[i, j])
    return True


def _longest_first(costs: np.ndarray) -> np.ndarray:
    return np.argsort(-costs, kind="stable")


def _round_up(value: int, multiple: int) -> int:
    return max(-(-value // multiple), 1) * multiple
