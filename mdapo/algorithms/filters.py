"""Which groups teach: dynamic sampling's test on the raw outcome (DAPO, arXiv 2503.14476, eq. 11, widened to any
reward), and the quality that a group must have on average.

The metrics, one number an *episode*, however many turns it has:

* ``acc``: the raw outcome, in [0, 1].
* ``score``, ``seq_reward``, ``seq_final_reward``: the weighted total of the reward parts. In verl ``score`` is what the
  reward function said, ``seq_reward`` the sum of the token-level scores (so with the overlong penalty) and
  ``seq_final_reward`` that of the token-level rewards (so with a KL penalty too). Here all three are before length
  shaping and KL: episodes that differ in nothing else teach nothing else, and the actor's log-probs, of which a KL is
  made, are not there yet when groups are filtered.
* ``coherence``, ``relevance``: of the dialogue, in [0, 1] (mdapo/rewards/coherence.py).
* ``combined``: ``(acc + wc coherence + wr relevance) / (1 + wc + wr)`` with ``coherence_weight`` and
  ``relevance_weight``, so in [0, 1].

Spread is asked of what the policy is rewarded for, never of its quality: with the last three, of the raw outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mdapo.algorithms.advantages import has_spread
from mdapo.config.quality import METRICS as QUALITY_METRICS
from mdapo.config.schema import FilterGroups
from mdapo.types import Episode, Group

ALL_SOLVED, NONE_SOLVED = "no spread: all solved", "no spread: none solved"
NO_SPREAD, INVALID = "no spread", "invalid"
LOW_METRIC, LOW_COHERENCE = "below reward_threshold", "below min_coherence_score"
ROUNDING = 1e-9  # by which a mean may miss its threshold


@dataclass(frozen=True)
class Verdict:
    """``reason`` is empty when the group is kept."""

    kept: bool
    reason: str = ""


def outcomes(group: Group, metric: str = "acc") -> np.ndarray:
    """What must differ, float64 [n], NaN where an episode could not be scored: the raw outcome, and with ``score``,
    ``seq_reward`` and ``seq_final_reward`` the total of the reward parts."""
    shaped = metric != "acc" and metric not in QUALITY_METRICS
    return _values(group, "value" if shaped else "outcome")


def metric_values(group: Group, cfg: FilterGroups) -> np.ndarray:
    """``cfg.metric`` of each episode, float64 [n], NaN where the reward or the quality could not be had."""
    if cfg.metric not in QUALITY_METRICS:
        return outcomes(group, cfg.metric)
    if cfg.metric != "combined":
        return _values(group, cfg.metric)
    parts = {"outcome": 1.0, "coherence": cfg.coherence_weight, "relevance": cfg.relevance_weight}
    used = {name: weight for name, weight in parts.items() if weight > 0.0}  # what counts for nothing may be missing
    total = sum(weight * _values(group, name) for name, weight in used.items())
    return np.asarray(total / sum(used.values()), np.float64)


def _values(group: Group, name: str) -> np.ndarray:
    """A number of each episode's `Score`."""
    return np.array([_value(episode, name) for episode in group.episodes], np.float64)


def _value(episode: Episode, name: str) -> float:
    score = episode.score
    value = None if score is None or not score.valid else getattr(score, name)
    return np.nan if value is None else float(value)


def judge(group: Group, cfg: FilterGroups, *, threshold: float | None = None) -> Verdict:
    """Whether a group is kept: it has spread (`keep`), its mean of ``cfg.metric`` is at least ``threshold`` (None:
    ``cfg.reward_threshold``), and its mean coherence at least ``cfg.min_coherence_score``. Whole or not at all.

    Means are over the episodes that have a number; where none has, the group is ``invalid``.
    """
    verdict = keep(outcomes(group, cfg.metric), cfg)
    if not verdict.kept or not cfg.enable:
        return verdict
    least = cfg.reward_threshold if threshold is None else threshold
    if cfg.metric in QUALITY_METRICS or least is not None:
        verdict = _at_least(metric_values(group, cfg), least, reason=LOW_METRIC)
    if verdict.kept and cfg.min_coherence_score is not None:
        verdict = _at_least(_values(group, "coherence"), cfg.min_coherence_score, reason=LOW_COHERENCE)
    return verdict


def _at_least(values: np.ndarray, least: float | None, *, reason: str) -> Verdict:
    known = values[np.isfinite(values)]
    if len(known) == 0:
        return Verdict(False, INVALID)
    enough = least is None or float(known.mean()) >= least - ROUNDING
    return Verdict(True) if enough else Verdict(False, reason)


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
    raw = cfg.metric == "acc" or cfg.metric in QUALITY_METRICS
    if raw and scored.min() >= 1.0 - cfg.tolerance:
        return Verdict(False, ALL_SOLVED)
    if raw and scored.max() <= cfg.tolerance:
        return Verdict(False, NONE_SOLVED)
    return Verdict(False, NO_SPREAD)
