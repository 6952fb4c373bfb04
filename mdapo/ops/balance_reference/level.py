"""Levelling: exchanges of items between the heaviest group and lighter ones, the best of all pairs each time."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

PARTNERS = 64  # the lightest so many groups are tried as partners of a heavy one
PATIENCE = 16  # and not any more after so many refusals in a row
TRIALS = 1 << 16
LEAST = -(2**63)


class Groups:
    """Members and their summed cost, group by group."""

    def __init__(self, count: int) -> None:
        self.members: list[list[int]] = [[] for _ in range(count)]
        self.load = [0] * count

    def __len__(self) -> int:
        return len(self.members)

    def put(self, group: int, item: int, cost: np.ndarray) -> None:
        insort(self.members[group], item)
        self.load[group] += int(cost[item])

    def drop(self, group: int, item: int, cost: np.ndarray) -> None:
        members = self.members[group]
        del members[bisect_left(members, item)]
        self.load[group] -= int(cost[item])


class Rules(Protocol):
    """What may leave group ``a`` for ``b``, and what (-1: nothing) may come back."""

    def may_move(self, a: int, b: int) -> bool: ...

    def fits(self, a: int, b: int, out_I: np.ndarray, back_J: np.ndarray) -> np.ndarray:
        """bool, broadcast to [I, J]."""
        ...

    def moved(self, a: int, b: int, i: int, j: int) -> None:
        """Follow an exchange that was made."""
        ...


@dataclass(frozen=True)
class Levelling:
    """``enough``: a group whose excess (load - target) is at most this needs no levelling; ``least_gap``: nor do groups
    that are no further apart; ``only_heaviest``: end when the heaviest is stuck, else go on with the next heaviest."""

    enough: int
    least_gap: int
    only_heaviest: bool
    trials: int = TRIALS  # pairs that may be looked at


def best_exchange(groups: Groups, a: int, b: int, cost: np.ndarray, gap: int, rules: Rules) -> tuple[int, int] | None:
    """Items (i, j), j = -1 for a move, whose exchange brings two groups ``gap`` apart nearest to each other.

    Of cost difference x, 0 < x < gap, an exchange gains min(x, gap - x). Of equal gains the first i, then the first j,
    a move last.
    """
    move = [-1] if rules.may_move(a, b) else []
    out_I, back_J = np.array(groups.members[a], np.int64), np.array(groups.members[b] + move, np.int64)
    if len(out_I) == 0 or len(back_J) == 0:
        return None
    x = cost[out_I][:, None] - np.where(back_J < 0, 0, cost[back_J])
    gain = np.where((x > 0) & rules.fits(a, b, out_I, back_J), np.minimum(x, gap - x), 0)
    i, j = divmod(int(gain.argmax()), len(back_J))
    return (int(out_I[i]), int(back_J[j])) if gain[i, j] > 0 else None


def level(groups: Groups, target: Sequence[int], cost: np.ndarray, how: Levelling, rules: Rules) -> None:
    """Level all groups by their excess over ``target``; the largest excess never rises."""
    heavy, light = set(range(len(groups))), set(range(len(groups)))
    refusals = [0] * len(groups)
    trials = how.trials

    def excess(group: int) -> tuple[int, int]:
        return groups.load[group] - target[group], group

    while heavy:
        a = max(heavy, key=excess)
        if excess(a)[0] <= how.enough:
            return
        found = None
        for b in sorted(light, key=excess)[:PARTNERS]:
            gap = excess(a)[0] - excess(b)[0]
            if b == a or gap <= how.least_gap:
                break
            if trials == 0:
                return
            trials -= 1
            found = best_exchange(groups, a, b, cost, gap, rules)
            if found is not None:
                exchange(groups, a, b, found, cost)
                rules.moved(a, b, *found)
                refusals[b] = 0
                break
            refusals[b] += 1
            if refusals[b] == PATIENCE:
                light.remove(b)
        if found is None:
            if how.only_heaviest:
                return
            heavy.remove(a)


def exchange(groups: Groups, a: int, b: int, items: tuple[int, int], cost: np.ndarray) -> None:
    i, j = items
    groups.drop(a, i, cost)
    groups.put(b, i, cost)
    if j >= 0:
        groups.drop(b, j, cost)
        groups.put(a, j, cost)
