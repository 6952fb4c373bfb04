"""Items into k parts of nearly equal cost: greedy, then levelled, then searched where parts are small."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from mdapo.ops.balance_reference.level import Groups, Levelling, level

LEVEL_PRECISION = 20  # levelled to 2^-20 of the bound,
SEARCH_PRECISION = 12  # searched to 2^-12
WHOLE = 16  # items of a problem that is searched as a whole
SEARCHED = 24  # items of two or three parts that are searched together
SEARCH_PARTNERS = 32  # the lightest parts that the heaviest one is searched with
NODES = 1 << 13  # placements that all searches of a partition may try
NODES_EACH = 1 << 11  # and one of them, unless it is of the whole


@dataclass
class Sizes:
    """How many items a part may have: any number, or ``base``, or one more in ``extra`` parts."""

    equal: bool
    base: int
    extra: int

    @classmethod
    def of(cls, items: int, parts: int, *, equal: bool) -> Sizes:
        return cls(equal, *divmod(items, parts))

    def full(self, size: int) -> bool:
        return self.equal and (size > self.base or (size == self.base and self.extra == 0))


class PartRules:
    """Everything may go everywhere; parts keep their sizes, or none becomes empty."""

    def __init__(self, parts: Groups, *, equal: bool) -> None:
        self.parts, self.equal = parts, equal

    def may_move(self, a: int, b: int) -> bool:
        size = len(self.parts.members[a])
        return size == len(self.parts.members[b]) + 1 if self.equal else size > 1

    def fits(self, a: int, b: int, out_I: np.ndarray, back_J: np.ndarray) -> np.ndarray:
        return np.array(True)

    def moved(self, a: int, b: int, i: int, j: int) -> None: ...


def partition_sorted(cost: np.ndarray, k: int, *, equal: bool) -> Groups:
    """``cost`` int64 [n], falling. With ``equal`` sizes differ by one at most, the larger parts first."""
    n = len(cost)
    parts = greedy(cost, k, equal=equal)
    bound = lower_bound(cost, k, equal=equal)
    enough = bound + (bound >> SEARCH_PRECISION)
    how = Levelling(bound + (bound >> LEVEL_PRECISION), 1, only_heaviest=True)
    budget = Budget(NODES)
    while True:
        level(parts, [0] * k, cost, how, PartRules(parts, equal=equal))
        if max(parts.load) <= enough:
            break
        if n <= WHOLE:
            resplit(parts, range(k), cost, equal=equal, enough=enough, most=NODES, budget=budget)
            break
        if not resplit_heaviest(parts, cost, equal=equal, enough=enough, budget=budget):
            break
    return largest_first(parts) if equal else parts


def greedy(cost: np.ndarray, k: int, *, equal: bool) -> Groups:
    """Longest processing time first (Graham 1969): each item, costliest first, to the lightest part not full."""
    parts, sizes = Groups(k), Sizes.of(len(cost), k, equal=equal)
    lightest = [(0, 0, part) for part in range(k)]  # by size too: items without cost spread out
    for item in range(len(cost)):
        while sizes.full(lightest[0][1]):
            heapq.heappop(lightest)
        _, size, part = heapq.heappop(lightest)
        parts.put(part, item, cost)
        sizes.extra -= equal and size + 1 > sizes.base
        if not sizes.full(size + 1):
            heapq.heappush(lightest, (parts.load[part], size + 1, part))
    return parts


def lower_bound(cost: np.ndarray, k: int, *, equal: bool) -> int:
    """No partition has a lighter heaviest part. The largest of

    - the mean;
    - of the j k + 1 costliest items, j + 1 share a part: the cheapest j + 1 of them (pigeonholes), for every j;

    and, where parts have at least ``base`` items,

    - the g costliest are in g parts, filled up with the cheapest items, or two of them share one, for every g.
    """
    n = len(cost)
    if n == 0:
        return 0
    total = [0, *np.cumsum(cost).tolist()]
    base = n // k if equal else 0

    def filled(held: int, parts: int) -> int:
        return total[n] - total[n - max(base - held, 0) * parts]

    bounds = [-(-total[n] // k)]
    bounds += [total[j * k + 1] - total[j * k - j] + filled(j + 1, 1) for j in range(-(-n // k))]
    for g in range(2, min(k, n) + 1 if equal else 2):
        apart = -(-(total[g] + filled(1, g)) // g)
        bounds.append(min(apart, total[g] - total[g - 2] + filled(2, 1)))
    return max(bounds)


@dataclass
class Budget:
    """Placements that may still be tried."""

    nodes: int


@dataclass
class Search:
    """The best parts for a few items, by depth-first search in the order of the greedy algorithm, its first leaf
    (complete greedy algorithm: Korf 1998). Exact unless the budget runs out; ``found`` holds what beats ``best``."""

    items: list[int]
    cost: np.ndarray
    sizes: Sizes
    enough: int
    best: int
    budget: Budget
    load: list[int]
    size: list[int]
    part: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)

    def place(self, heaviest: int) -> None:
        if len(self.part) == len(self.items):
            self.best, self.found = heaviest, list(self.part)
            return
        order = [(self.load[p], self.size[p], p) for p in range(len(self.load)) if not self.sizes.full(self.size[p])]
        own, before = int(self.cost[self.items[len(self.part)]]), None
        for load, size, p in sorted(order):
            if (load, size) == before:
                continue
            before = (load, size)
            if load + own >= self.best or self.best <= self.enough or self.budget.nodes == 0:
                return
            self.budget.nodes -= 1
            extra = self.sizes.equal and size == self.sizes.base
            self.load[p], self.size[p], self.sizes.extra = load + own, size + 1, self.sizes.extra - extra
            self.part.append(p)
            self.place(max(heaviest, load + own))
            self.part.pop()
            self.load[p], self.size[p], self.sizes.extra = load, size, self.sizes.extra + extra


def resplit(
    parts: Groups, which: Sequence[int], cost: np.ndarray, *, equal: bool, enough: int, most: int, budget: Budget
) -> bool:
    """Share out anew the items of these parts; False when that makes the heaviest of them no lighter."""
    pool = sorted(item for p in which for item in parts.members[p])
    if len(pool) > SEARCHED:
        return False
    k = len(which)
    own = Budget(min(budget.nodes, most))
    budget.nodes -= own.nodes
    heaviest = max(parts.load[p] for p in which)
    sizes = Sizes.of(len(pool), k, equal=equal)
    search = Search(pool, cost, sizes, enough, heaviest, own, load=[0] * k, size=[0] * k)
    search.place(0)
    budget.nodes += own.nodes
    if not search.found:
        return False
    for p in which:
        parts.members[p], parts.load[p] = [], 0
    for item, part in zip(pool, search.found, strict=True):
        parts.put(which[part], item, cost)
    return True


def resplit_heaviest(parts: Groups, cost: np.ndarray, *, equal: bool, enough: int, budget: Budget) -> bool:
    """The heaviest part with one of the lightest, then with two; False when none of that helps."""
    order = sorted(range(len(parts)), key=lambda p: parts.load[p])
    heaviest, others = order[-1], order[:-1][:SEARCH_PARTNERS]
    pairs = sorted(combinations(range(len(others)), 2), key=lambda pair: pair[::-1])
    for chosen in [*((b,) for b in range(len(others))), *pairs]:
        if budget.nodes == 0:
            return False
        which = [heaviest, *(others[b] for b in chosen)]
        if resplit(parts, which, cost, equal=equal, enough=enough, most=NODES_EACH, budget=budget):
            return True
    return False


def largest_first(parts: Groups) -> Groups:
    ordered = Groups(0)
    for p in sorted(range(len(parts)), key=lambda p: -len(parts.members[p])):
        ordered.members.append(parts.members[p])
        ordered.load.append(parts.load[p])
    return ordered
