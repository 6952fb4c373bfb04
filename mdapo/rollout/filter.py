"""The stage *filter*: which groups teach. ``algorithm.filter_groups.filter``, or a class of your own.

`Fixed` is `algorithms/filters.py`, the same at every step. `Adaptive` also asks for a mean of the filter's metric that
follows the yield: where too much is accepted it rises, where too little it falls.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from mdapo.algorithms.filters import Verdict, keep, outcomes
from mdapo.config.schema import Config, FilterGroups
from mdapo.types import Group

BELOW_THRESHOLD = "below the adaptive threshold"
WINDOW = 256  # groups that the threshold is read from, newest last
LEAST = 32  # groups before which it stays where it is
MOST_MOVE = 0.1  # of the window's range of values, a step


class Filter(Protocol):
    """A plug-in is made with the whole ``config``. What it judges by may change between steps only: within one, the
    order in which groups are judged decides nothing."""

    def judge(self, group: Group) -> Verdict:
        """Whether a complete group is kept, and the reason that is counted when it is not."""
        ...

    def saw(self, group: Group, verdict: Verdict) -> None:
        """Once for every group judged."""

    def open_step(self) -> None:
        """A step begins."""

    def metrics(self) -> dict[str, float]:
        """For ``metrics.jsonl``, by full name."""
        return {}

    def state(self) -> dict[str, Any]:
        """Plain JSON data, part of every checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        return None


def mean_metric(group: Group, cfg: FilterGroups) -> float:
    """The group's mean of the filter's metric, NaN where no episode has one."""
    values = outcomes(group, cfg.metric)
    scored = values[np.isfinite(values)]
    return float(scored.mean()) if len(scored) else math.nan


class Fixed(Filter):
    """As configured: spread in the raw outcome, and the fixed thresholds."""

    def __init__(self, *, config: Config) -> None:
        self.cfg = config.algorithm.filter_groups

    def judge(self, group: Group) -> Verdict:
        return keep(outcomes(group, self.cfg.metric), self.cfg)


class Adaptive(Fixed):
    """`Fixed`, and the group's mean must be at or above a threshold that keeps the yield at ``target_yield``.

    A running quantile over the last ``WINDOW`` groups: of those that `Fixed` keeps, a share s of all, the threshold is
    the quantile at 1 - target_yield / s, so that target_yield of all groups pass; where s is below the target, nothing
    is rejected. It moves at most ``MOST_MOVE`` of the window's range a step and stays within ``threshold_range``.
    """

    def __init__(self, *, config: Config) -> None:
        super().__init__(config=config)
        self.low, self.high = self.cfg.threshold_range
        self.threshold = self.low
        self._window: deque[float | None] = deque(maxlen=WINDOW)  # means; None: rejected whatever the threshold is

    def judge(self, group: Group) -> Verdict:
        verdict = super().judge(group)
        if verdict.kept and not mean_metric(group, self.cfg) >= self.threshold:
            return Verdict(False, BELOW_THRESHOLD)
        return verdict

    def saw(self, group: Group, verdict: Verdict) -> None:
        teaches = verdict.kept or verdict.reason == BELOW_THRESHOLD
        self._window.append(mean_metric(group, self.cfg) if teaches else None)

    def open_step(self) -> None:
        if len(self._window) < LEAST:
            return
        values = sorted(value for value in self._window if value is not None)
        share = len(values) / len(self._window)
        if share <= self.cfg.target_yield:
            wanted, range_ = self.low, values[-1] - values[0] if values else self.high - self.low
        else:
            wanted = float(np.quantile(values, 1.0 - self.cfg.target_yield / share, method="higher"))
            range_ = values[-1] - values[0]
        move = MOST_MOVE * range_
        self.threshold = min(max(wanted, self.threshold - move, self.low), self.threshold + move, self.high)

    def metrics(self) -> dict[str, float]:
        values = sorted(value for value in self._window if value is not None)
        found = {"rollout/threshold": self.threshold}
        if self._window:
            above = len(values) - bisect.bisect_left(values, self.threshold)
            found["rollout/threshold_yield"] = above / len(self._window)
        return found

    def state(self) -> dict[str, Any]:
        return {"threshold": self.threshold, "window": list(self._window)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.threshold = min(max(float(state["threshold"]), self.low), self.high)
        self._window = deque(state["window"], maxlen=WINDOW)


BUILTIN: Mapping[str, str] = {"fixed": "mdapo.rollout.filter:Fixed", "adaptive": "mdapo.rollout.filter:Adaptive"}
