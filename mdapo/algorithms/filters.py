"""Which groups teach: dynamic sampling's test on the raw outcome (DAPO, arXiv 2503.14476, eq. 11, widened to any
reward).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mdapo.algorithms.advantages import has_spread
from mdapo.config.schema import FilterGroups
from mdapo.types import Group

ALL_SOLVED, NONE_SOLVED = "no spread: all solved", "no spread: none solved"
NO_SPREAD, INVALID = "no spread", "invalid"


@dataclass(frozen=True)
class Verdict:
    """``reason`` is empty when the group is kept."""

    kept: bool
    reason: str = ""


def outcomes(group: Group, metric: str = "acc") -> np.ndarray:
    """One number an episode, float64 [n], NaN where it could not be scored.

    One an *episode*, however many turns it has. ``acc`` is the raw outcome; ``score``, ``seq_reward`` and
    ``seq_final_reward`` are the total of the reward parts, before length shaping.
    """
    scores = [e.score if e.score is not None and e.score.valid else None for e in group.episodes]
    return np.array([np.nan if s is None else s.outcome if metric == "acc" else s.value for s in scores], np.float64)


def keep(group_outcomes: Sequence[float] | np.ndarray, cfg: FilterGroups) -> Verdict:
    """Whether a group has spread, and why not. NaN marks an episode without a usable score; it has no say.

    A group is rejected when its largest and smallest outcomes are equal up to ``cfg.tolerance`` (relative to the
    largest magnitude), whatever the values are. With fewer than two scored episodes it is ``invalid``. With
    ``cfg.enable`` off every group that has a scored episode is kept.
    """
    values = np.asarray(group_outcomes, np.float64)
    scored = values[np.isfinite(values)]
    if len(scored) == 0:
        return Verdict(False, INVALID)
    if not cfg.enable:
        return Verdict(True)
    if len(scored) < 2 and len(values) >= 2:
        return Verdict(False, INVALID)
    if has_spread(scored, tolerance=cfg.tolerance):
        return Verdict(True)
    if cfg.metric == "acc" and scored.min() >= 1.0 - cfg.tolerance:
        return Verdict(False, ALL_SOLVED)
    if cfg.metric == "acc" and scored.max() <= cfg.tolerance:
        return Verdict(False, NONE_SOLVED)
    return Verdict(False, NO_SPREAD)
