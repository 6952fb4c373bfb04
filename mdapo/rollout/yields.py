"""What share of groups teaches: a Beta posterior that forgets, for the policy and so the share change as training goes.

Each judged group is one Bernoulli trial of the yield y, the probability that the filter keeps a group. Starting from
Beta(1, 1), k kept of m judged give y ~ Beta(1 + k, 1 + m - k). When a step opens, k and m are scaled down to half of
the m of the step before, or ``MEMORY`` where that is more: of small steps the last few count. Of m more groups a
beta-binomial number will be kept, with mean m y and variance m y (1 - y) (1 + (m - 1) / (a + b + 1)); its quantiles are
taken from the normal distribution with these two moments and a correction for continuity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

MEMORY = 200.0  # groups that a step knows at least from those before it, where there were so many
LEAST_JUDGED = 8.0  # groups, before which there is no estimate
MOST_ASKED = 8  # groups for each one missing, however low the yield is: the rest is asked when these are judged


class Yield:
    """``kept`` and ``judged`` are the evidence so far, discounted."""

    def __init__(self) -> None:
        self.kept = self.judged = 0.0
        self._opened = 0.0  # ``judged`` as this step opened

    def open_step(self) -> None:
        most = max((self.judged - self._opened) / 2.0, MEMORY)
        left = min(most / self.judged, 1.0) if self.judged else 1.0
        self.kept, self.judged = self.kept * left, self.judged * left
        self._opened = self.judged

    def saw(self, *, kept: bool) -> None:
        self.kept, self.judged = self.kept + kept, self.judged + 1.0

    @property
    def known(self) -> bool:
        return self.judged >= LEAST_JUDGED

    @property
    def mean(self) -> float:
        return (1.0 + self.kept) / (2.0 + self.judged)

    def bounds(self, share: float = 0.9) -> tuple[float, float]:
        """The central ``share`` of the posterior, as a normal distribution, within [0, 1]."""
        reach = NormalDist().inv_cdf(0.5 + share / 2.0) * math.sqrt(self.mean * (1.0 - self.mean) / (self.judged + 3.0))
        return max(self.mean - reach, 0.0), min(self.mean + reach, 1.0)

    def enough(self, missing: int, *, sure: float) -> int:
        """The fewest groups of which at least ``missing`` are kept with probability ``sure``."""
        reach = NormalDist().inv_cdf(sure)
        return self._fewest(missing, lambda m: self._kept_of(m, -reach) >= missing - 0.5)

    def at_most(self, missing: int, *, sure: float) -> int:
        """The most groups of which no more than ``missing`` are kept with probability ``sure``; never fewer than
        ``missing``."""
        reach = NormalDist().inv_cdf(sure)
        return max(self._fewest(missing, lambda m: self._kept_of(m, reach) > missing + 0.5) - 1, missing)

    def _kept_of(self, asked: int, deviations: float) -> float:
        """So many of ``asked`` groups are kept, at so many standard deviations from the mean."""
        spread = asked * self.mean * (1.0 - self.mean) * (1.0 + (asked - 1) / (self.judged + 3.0))
        return asked * self.mean + deviations * math.sqrt(spread)

    @staticmethod
    def _fewest(missing: int, holds: Callable[[int], bool]) -> int:
        """By bisection; ``MOST_ASKED`` for each one missing where it does not hold below."""
        low, high = missing, missing * MOST_ASKED
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle + 1, high)
        return low

    def state(self) -> dict[str, float]:
        return {"kept": self.kept, "judged": self.judged, "opened": self._opened}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.kept, self.judged, self._opened = (float(state[name]) for name in ("kept", "judged", "opened"))
