"""One mini-batch: samples -> data-parallel ranks -> micro-batches ("bins") under a cap, as many on each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mdapo.ops.balance_reference.level import LEAST, Groups, Levelling, level
from mdapo.ops.balance_reference.packing import Bins, Company, Items, SlotFit, best_fit, fill_range, slot_fit
from mdapo.ops.balance_reference.partition import PartRules, partition_sorted

PLAN_PRECISION = 10  # loads that differ by 2^-10 of the mean bin are alike
ALIKE_PRECISION = 12  # ranks within 2^-12 of the mean are level enough
SLACK_PRECISION = 7  # a slot may grow by 2^-7 where that levels ranks
RANK_PRECISION = 28  # ranks are levelled to 2^-28 of the mean
PASSES = 8


@dataclass(frozen=True)
class Shape:
    """Arguments of `mdapo.ops.balance.plan_step`; ``rows``: items of a micro-batch."""

    dp: int
    cap: int
    rows: int
    multiple: int
    at_least: int
    lockstep: bool
    equal_size: bool


class Placed:
    """Bins, the rank of each, and its place in the rank's order."""

    def __init__(self, bins: Bins, dp: int) -> None:
        self.bins, self.dp, self.micro = bins, dp, len(bins) // dp
        self.rank, self.slot = [0] * len(bins), [0] * len(bins)


def plan_sorted(items: Items, shape: Shape) -> Placed:
    equal = shape.equal_size
    plan = Placed(equal_bins(items, shape) if equal else free_bins(items, shape), shape.dp)
    if equal:
        plan.rank = [b // plan.micro for b in range(len(plan.bins))]
    level_slots(plan, items, equal=equal)
    if not equal:
        share_slots(plan)
    # Ranks are first levelled at no cost to the lockstep; if that is not enough, at little, or, where it does not
    # matter, without regard for it.
    if not equal:
        swap_bins(plan, in_slots=True)
    level_ranks(plan, items, equal=equal, ceiling=slot_heights(plan))
    if not ranks_alike(plan):
        ceiling = None
        if shape.lockstep:
            ceiling = [height + (height >> SLACK_PRECISION) for height in slot_heights(plan)]
        elif not equal:
            swap_bins(plan, in_slots=False)
        level_ranks(plan, items, equal=equal, ceiling=ceiling)
    order_ranks(plan)
    return plan


def ranks_alike(plan: Placed) -> bool:
    """Whether the heaviest rank is so near to the mean that to level further is worth nothing of the lockstep."""
    load = [0] * plan.dp
    for b, rank in enumerate(plan.rank):
        load[rank] += plan.bins.load[b]
    mean = ceil_div(sum(load), plan.dp)
    return max(load) <= mean + (mean >> ALIKE_PRECISION)


# How many bins, and a first filling.


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def fewest_micro_batches(items: Items, shape: Shape) -> int:
    """Micro-batches a rank that any plan has: by tokens, by items, by items longer than half the cap."""
    short = items.tokens[items.tokens <= shape.cap]
    alone = len(items) - len(short)
    tokens = int(short.sum())
    shared = max(
        ceil_div(len(short), shape.rows),
        ceil_div(tokens, shape.cap) if tokens else 0,
        int(np.count_nonzero(short > shape.cap // 2)),
    )
    wanted = max(1, min(shape.at_least, len(items) // shape.dp), ceil_div(alone + shared, shape.dp))
    return ceil_div(wanted, shape.multiple) * shape.multiple


def fewest(low: int, step: int, fill: Callable[[int], Bins | None], enough: Callable[[], int]) -> Bins:
    """``fill`` with the smallest of low, low + step, ... for which it has an answer; it has one for ``enough()``."""
    best = fill(low)
    if best is not None:
        return best
    high = enough()
    best = fill(high)
    assert best is not None
    while high - low > step:
        middle = low + (high - low) // step // 2 * step
        found = fill(middle)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return best


def free_bins(items: Items, shape: Shape) -> Bins:
    def fill(micro: int) -> Bins | None:
        best = None
        for company in Company:
            if best is not None and company is Company.FULL:
                break
            bins = Bins(micro * shape.dp, shape.cap, shape.rows)
            fit = slot_fit(bins, shape.dp, company, items)
            if fit is SlotFit.LEVEL:
                return bins
            if fit is SlotFit.FAILED:
                continue
            if best is None or lockstep_load(bins, shape.dp) < lockstep_load(best, shape.dp):
                best = bins
        if best is not None:
            return best
        bins = Bins(micro * shape.dp, shape.cap, shape.rows)
        return bins if fill_range(bins, range(len(bins)), items.by_tokens, items) else None

    def enough() -> int:
        tight = ceil_div(len(best_fit(items.by_tokens, items, shape.cap, shape.rows)), shape.dp)
        return ceil_div(tight, shape.multiple) * shape.multiple

    return fewest(fewest_micro_batches(items, shape), shape.multiple, fill, enough)


def equal_bins(items: Items, shape: Shape) -> Bins:
    """As many items on each rank: first the ranks, by cost or else by tokens, then the bins of each."""
    by_cost = partition_sorted(items.cost, shape.dp, equal=True).members
    by_tokens = partition_sorted(items.tokens[items.by_tokens], shape.dp, equal=True).members
    place = {item: at for at, item in enumerate(items.by_tokens)}
    ways = [
        [sorted(members, key=place.__getitem__) for members in by_cost],
        [[items.by_tokens[at] for at in members] for members in by_tokens],
    ]

    def fill(micro: int) -> Bins | None:
        for ranks in ways:
            bins = Bins(micro * shape.dp, shape.cap, shape.rows)
            within = [range(r * micro, (r + 1) * micro) for r in range(shape.dp)]
            if all(fill_range(bins, own, order, items) for own, order in zip(within, ranks, strict=True)):
                return bins
        return None

    def enough() -> int:
        most = max(len(best_fit(order, items, shape.cap, shape.rows)) for order in ways[1])
        return ceil_div(max(most, 1), shape.multiple) * shape.multiple

    return fewest(fewest_micro_batches(items, shape), shape.multiple, fill, enough)


# Orders: slots, and the bins of a rank.


def heaviest_first(load: Sequence[int]) -> list[int]:
    return sorted(range(len(load)), key=lambda b: -load[b])


def lockstep_load(bins: Bins, dp: int) -> int:
    """The sum over slots of their heaviest bin, where each slot has the next heaviest ``dp``."""
    return sum(sorted(bins.load, reverse=True)[::dp])


def order_slots(plan: Placed) -> None:
    for at, b in enumerate(heaviest_first(plan.bins.load)):
        plan.slot[b] = at // plan.dp


def order_ranks(plan: Placed) -> None:
    used = [0] * plan.dp
    for b in heaviest_first(plan.bins.load):
        plan.slot[b] = used[plan.rank[b]]
        used[plan.rank[b]] += 1


def share_slots(plan: Placed) -> None:
    """The bins of each slot to ranks, the heaviest to the one that has least so far; slots of most spread first."""
    load = plan.bins.load
    slots: list[list[int]] = [[] for _ in range(plan.micro)]
    for b in heaviest_first(load):
        slots[plan.slot[b]].append(b)
    total = [0] * plan.dp
    for s in heaviest_first([load[slot[0]] - load[slot[-1]] for slot in slots]):
        for b, r in zip(slots[s], sorted(range(plan.dp), key=total.__getitem__), strict=True):
            plan.rank[b] = r
            total[r] += load[b]


def slot_heights(plan: Placed) -> list[int]:
    """The heaviest bin of each bin's slot."""
    heaviest = [0] * plan.micro
    for b, load in enumerate(plan.bins.load):
        heaviest[plan.slot[b]] = max(heaviest[plan.slot[b]], load)
    return [heaviest[s] for s in plan.slot]


# Exchanges.


class BinRules:
    """Between bins: the cap holds, no bin is emptied, and with ``equal`` no rank's number of items changes."""

    def __init__(self, plan: Placed, items: Items, *, equal: bool) -> None:
        self.plan, self.items, self.equal = plan, items, equal
        self.rank_size = [0] * plan.dp
        for b, members in enumerate(plan.bins.members):
            self.rank_size[plan.rank[b]] += len(members)

    def may_move(self, a: int, b: int) -> bool:
        bins, rank = self.plan.bins, self.plan.rank
        if len(bins.members[a]) < 2 or bins.room(b) < 0:
            return False
        from_size, to_size = self.rank_size[rank[a]], self.rank_size[rank[b]]
        return not self.equal or rank[a] == rank[b] or from_size == to_size + 1

    def fits(self, a: int, b: int, out_I: np.ndarray, back_J: np.ndarray) -> np.ndarray:
        bins, tokens = self.plan.bins, self.items.tokens
        more = tokens[out_I][:, None] - np.where(back_J < 0, 0, tokens[back_J])
        return (bins.tokens[b] + more <= bins.cap) & (bins.tokens[a] - more <= bins.cap)

    def moved(self, a: int, b: int, i: int, j: int) -> None:
        more = int(self.items.tokens[i] - (0 if j < 0 else self.items.tokens[j]))
        self.plan.bins.tokens[a] -= more
        self.plan.bins.tokens[b] += more
        if self.equal and j < 0:
            self.rank_size[self.plan.rank[a]] -= 1
            self.rank_size[self.plan.rank[b]] += 1


def level_slots(plan: Placed, items: Items, *, equal: bool) -> None:
    """Lower the sum over slots of their heaviest bin: level all bins by what each lacks to its slot's heaviest, again
    and again. With ``equal`` the slots are each rank's bins in their order, else made of whichever bins are alike."""
    alike = sum(plan.bins.load) // len(plan.bins) >> PLAN_PRECISION
    rules = BinRules(plan, items, equal=equal)
    before = 2**63 - 1
    for done in range(PASSES + 1):
        order_ranks(plan) if equal else order_slots(plan)
        height = slot_heights(plan)
        now = sum(h // plan.dp for h in height)
        if done == PASSES or before - now <= alike:
            return
        before = now
        level(plan.bins, height, items.cost, Levelling(LEAST, alike, only_heaviest=False), rules)


def of_ranks(ranks: Groups) -> Levelling:
    mean = ceil_div(sum(ranks.load), len(ranks))
    return Levelling(mean + (mean >> RANK_PRECISION), 1, only_heaviest=True)


class SwapRules:
    """Whole bins change places; with ``in_slots`` within a slot only."""

    def __init__(self, slot: np.ndarray, *, in_slots: bool) -> None:
        self.slot, self.in_slots = slot, in_slots

    def may_move(self, a: int, b: int) -> bool:
        return False

    def fits(self, a: int, b: int, out_I: np.ndarray, back_J: np.ndarray) -> np.ndarray:
        return (self.slot[out_I][:, None] == self.slot[back_J]) | (not self.in_slots)

    def moved(self, a: int, b: int, i: int, j: int) -> None: ...


def swap_bins(plan: Placed, *, in_slots: bool) -> None:
    """Lower the heaviest rank's load by swaps of whole bins, which no cap forbids."""
    order = heaviest_first(plan.bins.load)
    load = np.array(plan.bins.load, np.int64)[order]
    ranks = Groups(plan.dp)
    for at, b in enumerate(order):
        ranks.put(plan.rank[b], at, load)
    rules = SwapRules(np.array(plan.slot)[order], in_slots=in_slots)
    level(ranks, [0] * plan.dp, load, of_ranks(ranks), rules)
    for r, members in enumerate(ranks.members):
        for at in members:
            plan.rank[order[at]] = r


class RankRules:
    """Between ranks: an item that moves goes to the bin with most room; no bin grows beyond its ``ceiling``."""

    def __init__(
        self, plan: Placed, items: Items, ranks: Groups, *, equal: bool, ceiling: Sequence[int] | None
    ) -> None:
        self.plan, self.items, self.parts = plan, items, PartRules(ranks, equal=equal)
        self.ceiling = np.array(ceiling if ceiling is not None else [2**63 - 1] * len(plan.bins), np.int64)
        self.bin_of = np.zeros(len(items), np.int64)
        for b, members in enumerate(plan.bins.members):
            self.bin_of[members] = b
        self.bins_of: list[list[int]] = [[] for _ in range(plan.dp)]
        for b, r in enumerate(plan.rank):
            self.bins_of[r].append(b)

    def roomiest(self, rank: int) -> int:
        return max(self.bins_of[rank], key=lambda b: (self.plan.bins.room(b), -b))

    def may_move(self, a: int, b: int) -> bool:
        return self.parts.may_move(a, b)

    def fits(self, a: int, b: int, out_I: np.ndarray, back_J: np.ndarray) -> np.ndarray:
        bins, items = self.plan.bins, self.items
        move = back_J < 0
        from_I, to_J = self.bin_of[out_I], np.where(move, self.roomiest(b), self.bin_of[back_J])
        more = items.tokens[out_I][:, None] - np.where(move, 0, items.tokens[back_J])
        x = items.cost[out_I][:, None] - np.where(move, 0, items.cost[back_J])
        load, tokens = np.array(bins.load), np.array(bins.tokens)
        size = np.array([len(members) for members in bins.members])
        fits = (tokens[to_J] + more <= bins.cap) & (tokens[from_I][:, None] - more <= bins.cap)
        moves = (size[from_I] > 1)[:, None] & (size[to_J] < bins.rows) & (tokens[to_J] + more <= bins.cap)
        return np.where(move, moves, fits) & (load[to_J] + x <= self.ceiling[to_J])

    def moved(self, a: int, b: int, i: int, j: int) -> None:
        bins = self.plan.bins
        start = int(self.bin_of[i])
        end = self.roomiest(b) if j < 0 else int(self.bin_of[j])
        for item, old, new in [(i, start, end), (j, end, start)][: 1 + (j >= 0)]:
            bins.remove(old, item, self.items)
            bins.add(new, item, self.items)
            self.bin_of[item] = new


def level_ranks(plan: Placed, items: Items, *, equal: bool, ceiling: Sequence[int] | None) -> None:
    """Lower the heaviest rank's load by exchanges of items, with no bin above its ``ceiling``."""
    ranks = Groups(plan.dp)
    for b, members in enumerate(plan.bins.members):
        ranks.members[plan.rank[b]] += members
        ranks.load[plan.rank[b]] += plan.bins.load[b]
    for members in ranks.members:
        members.sort()
    rules = RankRules(plan, items, ranks, equal=equal, ceiling=ceiling)
    level(ranks, [0] * plan.dp, items.cost, of_ranks(ranks), rules)
