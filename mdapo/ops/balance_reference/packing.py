"""Bins of at most ``cap`` tokens and ``rows`` items each: three ways to fill a given number of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from mdapo.ops.balance_reference.level import PARTNERS, Groups


@dataclass(frozen=True)
class Items:
    """``cost`` int64 [n], falling; ``tokens`` int64 [n]; ``by_tokens``: the same positions by falling tokens."""

    cost: np.ndarray
    tokens: np.ndarray
    by_tokens: list[int]

    def __len__(self) -> int:
        return len(self.cost)


class Bins(Groups):
    """An item longer than the cap fits into an empty bin only, and leaves no room there."""

    def __init__(self, count: int, cap: int, rows: int) -> None:
        super().__init__(count)
        self.cap, self.rows, self.tokens = cap, rows, [0] * count

    def room(self, bin: int) -> int:
        return self.cap - self.tokens[bin] if len(self.members[bin]) < self.rows else -1

    def fits(self, bin: int, tokens: int) -> bool:
        return tokens <= self.room(bin) or not self.members[bin]

    def add(self, bin: int, item: int, items: Items) -> None:
        self.put(bin, item, items.cost)
        self.tokens[bin] += int(items.tokens[item])

    def remove(self, bin: int, item: int, items: Items) -> None:
        self.drop(bin, item, items.cost)
        self.tokens[bin] -= int(items.tokens[item])

    def append(self) -> None:
        self.members.append([])
        self.load.append(0)
        self.tokens.append(0)

    def roomiest(self, bins: Sequence[int]) -> list[int]:
        """Those that can take an item, most room first."""
        return sorted((b for b in bins if self.room(b) >= 0), key=lambda b: (-self.room(b), b))


def gather_room(bins: Bins, a: int, b: int, need: int, items: Items) -> None:
    """Swap an item of bin ``a`` for one of ``b`` so that ``a`` has more room: at least ``need``, and as little above it
    as can be; else as much as can be, within the room of ``b``."""
    best, chosen = 0, (-1, -1)
    for i in bins.members[a]:
        for j in bins.members[b]:
            more = int(items.tokens[i] - items.tokens[j])
            if not 0 < more <= bins.cap - bins.tokens[b]:
                continue
            if (need <= more < best) if best >= need else more > best:
                best, chosen = more, (i, j)
    if best:
        out, back = chosen
        bins.remove(a, out, items)
        bins.remove(b, back, items)
        bins.add(a, back, items)
        bins.add(b, out, items)


def lightest_fit(bins: Bins, within: Sequence[int], order: Sequence[int], items: Items) -> bool:
    """The longest first, each into the lightest of the bins ``within`` that has room; False when one finds none.

    Where all are too full, the roomiest one gathers room from the next ones.
    """
    for item in order:
        tokens = int(items.tokens[item])
        open_bins = [b for b in within if bins.fits(b, tokens)]
        if open_bins:
            chosen = min(open_bins, key=lambda b: (bins.load[b], b))
        else:
            waiting = bins.roomiest(within)
            if not waiting:
                return False
            chosen = waiting[0]
            for other in waiting[1 : PARTNERS + 1]:
                if bins.room(chosen) >= tokens:
                    break
                gather_room(bins, chosen, other, tokens - bins.room(chosen), items)
            if bins.room(chosen) < tokens:
                return False
        bins.add(chosen, item, items)
    return True


def best_fit(order: Sequence[int], items: Items, cap: int, rows: int) -> Bins:
    """The longest first, each into the fullest bin that has room, or a new one (best fit decreasing: Johnson 1973)."""
    bins = Bins(0, cap, rows)
    by_room: list[tuple[int, int]] = []
    for item in order:
        at = bisect_left(by_room, (int(items.tokens[item]), -1))
        if at < len(by_room):
            bin = by_room.pop(at)[1]
        else:
            bin = len(bins)
            bins.append()
        bins.add(bin, item, items)
        if bins.room(bin) >= 0:
            entry = (bins.room(bin), bin)
            by_room.insert(bisect_left(by_room, entry), entry)
    return bins


def split_bins(bins: Bins, count: int, items: Items) -> None:
    """More bins, until there are ``count``, by halving the ones with most items: no rank shall idle where another has
    two."""
    while len(bins) < count:
        largest = max(range(len(bins)), key=lambda b: (len(bins.members[b]), -b), default=0)
        bins.append()
        for item in bins.members[largest][1::2]:
            bins.remove(largest, item, items)
            bins.add(len(bins) - 1, item, items)


def fill_range(bins: Bins, within: range, order: Sequence[int], items: Items) -> bool:
    """The bins ``within``, level if that can be, else tight; False when the items need more bins."""
    if lightest_fit(bins, within, order, items):
        return True
    tight = best_fit(order, items, bins.cap, bins.rows)
    if len(tight) > len(within):
        return False
    split_bins(tight, len(within), items)
    bins.members[within.start : within.stop] = tight.members
    bins.load[within.start : within.stop] = tight.load
    bins.tokens[within.start : within.stop] = tight.tokens
    return True


class SlotFit(Enum):
    FAILED, LEVEL, PEELED = range(3)


class Company(Enum):
    """What a costly item shares its bin with: up to how many tokens."""

    NONE, MEAN, FULL = range(3)


def slot_fit(bins: Bins, dp: int, company: Company, items: Items) -> SlotFit:
    """Slots of ``dp`` bins that run side by side, each as level as can be.

    An item that costs more than the mean of the bins left cannot be levelled out: its slot lasts as long as it does. So
    the other bins of that slot are filled to the same cost, with the costliest items that fit; and so on, slot by slot,
    until no such item is left ("peeled" slots). The rest goes to the lightest bins. The less company the costly item
    has, the less its slot costs, and the more tokens are left for the others. Fails when the cap leaves no room for
    them.
    """
    left = list(range(len(items)))
    longest_from = np.maximum.accumulate(items.tokens[::-1])[::-1]
    work, tokens, bin = int(items.cost.sum()), int(items.tokens.sum()), 0
    while bin < len(bins) and left:
        costliest, bins_left = left[0], len(bins) - bin
        if items.cost[costliest] <= work // bins_left:
            break
        goal = int(items.cost[costliest])
        if company is Company.MEAN:
            free = max(0, min(tokens // bins_left, bins.cap) - int(items.tokens[costliest]))
            goal += min(free * int(items.cost[-1]) // max(1, int(items.tokens[-1])), work)
        if company is Company.FULL:
            goal += work
        for _ in range(dp):
            for item in _costliest_that_fit(bins, bin, goal, left, longest_from, items):
                bins.add(bin, item, items)
                work -= int(items.cost[item])
                tokens -= int(items.tokens[item])
            bin += 1
    remaining = set(left)
    rest = [item for item in items.by_tokens if item in remaining]
    if not lightest_fit(bins, range(bin, len(bins)), rest, items):
        return SlotFit.FAILED
    return SlotFit.PEELED if bin > 0 else SlotFit.LEVEL


def _costliest_that_fit(
    bins: Bins, bin: int, goal: int, left: list[int], longest_from: np.ndarray, items: Items
) -> Iterator[int]:
    """The costliest of ``left``, then those that fit, taken out of it; one is left for each bin after this."""
    if left:
        yield left.pop(0)
    while len(left) > len(bins) - bin - 1:
        money, room = goal - bins.load[bin], bins.room(bin)
        affordable = int(np.count_nonzero(items.cost > money))
        fitting = int(np.count_nonzero(longest_from > room))
        at = bisect_left(left, max(affordable, fitting))
        if at == len(left):
            return
        yield left.pop(at)
