"""What others balance with, written anew from the literature: the baselines of bench_balance.py.

Differencing in k ways (Karmarkar and Karp 1982) and for equal sizes (Michiels et al. 2003), in the form that Python
code for reinforcement learning has it: a heap of states, each with k sets that are objects, put together item by item.
(A leaner form in Python, `differencing_sparse`, is many times faster; it serves where only the result is wanted.) Plans
made of it: more and more parts until none is over the cap; and first fit, rank by rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

Sets = list[tuple[int, tuple[int, ...]]]  # sum and items of each set, the largest sum first


class Part:
    """A set of items."""

    def __init__(self) -> None:
        self.sum = 0
        self.items: list[tuple[int, int]] = []

    def add(self, item: int, cost: int) -> None:
        self.items.append((item, cost))
        self.sum += cost

    def join(self, other: Part) -> None:
        for item, cost in other.items:
            self.add(item, cost)

    def __lt__(self, other: Part) -> bool:
        if self.sum != other.sum:
            return self.sum < other.sum
        if len(self.items) != len(other.items):
            return len(self.items) < len(other.items)
        return self.items < other.items


class State:
    """k sets, the largest first."""

    def __init__(self, items: Sequence[tuple[int, int]], k: int) -> None:
        self.k = k
        self.parts = [Part() for _ in range(k)]
        for part, (item, cost) in zip(self.parts, items, strict=False):
            part.add(item, cost)
        self.parts.sort(reverse=True)

    @property
    def spread(self) -> int:
        return self.parts[0].sum - self.parts[-1].sum

    def merge(self, other: State) -> None:
        """The largest set with the other's smallest, and so on."""
        for part, opposite in zip(self.parts, reversed(other.parts), strict=True):
            part.join(opposite)
        self.parts.sort(reverse=True)

    def __lt__(self, other: State) -> bool:
        """The state of most spread comes first out of a heap."""
        if self.spread != other.spread:
            return self.spread > other.spread
        return self.parts[0] > other.parts[0]


def differencing(costs: Sequence[int], k: int) -> list[list[int]]:
    """Largest differencing: the two states of most spread become one, until one is left."""
    order = sorted((cost, item) for item, cost in enumerate(costs))
    return _difference([State([(item, cost)], k) for cost, item in order])


def differencing_equal(costs: Sequence[int], k: int) -> list[list[int]]:
    """The same for parts of equal size: it begins with tuples of the next k items. k divides their number."""
    assert len(costs) % k == 0
    order = [(item, cost) for cost, item in sorted((cost, item) for item, cost in enumerate(costs))]
    return _difference([State(order[at : at + k], k) for at in range(0, len(order), k)])


def _difference(heap: list[State]) -> list[list[int]]:
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        first.merge(second)
        heapq.heappush(heap, first)
    return [[item for item, _ in part.items] for part in heap[0].parts]


def differencing_sparse(costs: Sequence[int], k: int) -> list[tuple[int, ...]]:
    """`differencing` without the empty sets: the same sums, and fast enough for thousands of items and hundreds of
    parts."""

    def spread(sets: Sets) -> int:
        return (sets[-1][0] if len(sets) == k else 0) - sets[0][0]

    heap: list[tuple[int, int, Sets]] = [(-cost, item, [(cost, (item,))]) for item, cost in enumerate(costs)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        shared = max(len(first) + len(second) - k, 0)  # so many sets of one meet one of the other
        ends = zip(first[len(first) - shared :], reversed(second[len(second) - shared :]), strict=True)
        merged: Sets = [(a[0] + b[0], a[1] + b[1]) for a, b in ends]
        merged += first[: len(first) - shared] + second[: len(second) - shared]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (spread(merged), number, merged))
        number += 1
    found: list[tuple[int, ...]] = [items for _, items in heap[0][2]]
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
