"""What is known of each prompt: a posterior of its pass rate, to skip those that almost surely teach nothing.

A prompt whose n conversations were solved k times (outcomes added up) has the pass rate p ~ Beta(P + k, P + n - k),
where n and k lose half of their weight every ``half_life`` weight versions: the policy changes. The next group of m
conversations then has spread with probability 1 - P(all right) - P(all wrong), by the beta-binomial distribution. Below
``min_yield`` the prompt is skipped, but for a share ``recheck`` that is asked all the same. GRESO (arXiv 2506.02177)
skips by runs of uniform groups instead. What is skipped is gone for this epoch, so the data's distribution shifts to
prompts of middling difficulty: `metrics` says how far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from mdapo.config.schema import SkipPrompts
from mdapo.rollout.seeds import seed_of, uniform
from mdapo.types import Group, Prompt

PRIOR = 0.4  # of each outcome, in episodes: most prompts are rather easy or rather hard
ALL_RIGHT, ALL_WRONG = "all right", "all wrong"
BANDS = (("hard", 0.2), ("medium", 0.8), ("easy", 1.01))  # name, pass rates below


class PassRates:
    """A memory by uid. ``n``: conversations of a group; ``seed`` of the draws for re-checks."""

    def __init__(self, cfg: SkipPrompts, *, n: int, seed: int) -> None:
        self.cfg, self.n, self.seed = cfg, n, seed
        self.version = 0
        self._known: dict[str, tuple[float, float, int]] = {}  # solved, scored, as of a weight version
        self._drawn = 0  # draws for re-checks since the run began
        self._step: Counter[str] = Counter()  # for the metrics

    def open_step(self, version: int) -> None:
        self.version = version

    @property
    def skipped(self) -> int:
        """Prompts skipped since the last `metrics`."""
        return self._step[ALL_RIGHT] + self._step[ALL_WRONG]

    def skips(self, prompt: Prompt) -> bool:
        """Whether to leave this prompt, which is next in the data, unasked."""
        rate = self.pass_rate(prompt.uid)
        self._count("dealt", rate)
        if rate is not None:
            all_wrong, all_right = self.uniform(prompt.uid)
            if 1.0 - all_wrong - all_right < self.cfg.min_yield:
                self._drawn += 1
                if uniform(seed_of(self.seed, "recheck"), self._drawn) >= self.cfg.recheck:
                    self._step[ALL_RIGHT if all_right > all_wrong else ALL_WRONG] += 1
                    return True
                self._step["rechecked"] += 1
        self._count("asked", rate)
        return False

    def saw(self, group: Group) -> None:
        """A group was judged."""
        scores = [e.score.outcome for e in group.episodes if e.score is not None and e.score.valid]
        if scores:
            solved, scored = self._faded(group.prompt.uid)
            solved += float(np.clip(scores, 0.0, 1.0).sum())
            self._known[group.prompt.uid] = (solved, scored + len(scores), self.version)

    def pass_rate(self, uid: str) -> float | None:
        """The posterior's mean; None for a prompt that was never asked."""
        if uid not in self._known:
            return None
        solved, scored = self._faded(uid)
        return (PRIOR + solved) / (2 * PRIOR + scored)

    def uniform(self, uid: str) -> tuple[float, float]:
        """Probabilities that the next group is all wrong, and all right."""
        solved, scored = self._faded(uid)
        right, wrong, both = PRIOR + solved, PRIOR + scored - solved, 2 * PRIOR + scored
        all_right = all_wrong = 1.0
        for i in range(self.n):
            all_right *= (right + i) / (both + i)
            all_wrong *= (wrong + i) / (both + i)
        return all_wrong, all_right

    def _faded(self, uid: str) -> tuple[float, float]:
        solved, scored, version = self._known.get(uid, (0.0, 0.0, self.version))
        left = 0.5 ** (max(self.version - version, 0) / self.cfg.half_life)
        return solved * left, scored * left

    def _count(self, what: str, rate: float | None) -> None:
        self._step[what] += 1
        band = "unseen" if rate is None else next(name for name, below in BANDS if rate < below)
        self._step[f"{what}/{band}"] += 1

    def metrics(self) -> dict[str, float]:
        """``rollout/skip/...``: share of the dealt prompts skipped, by reason; share of the asked ones that are
        re-checks; what the data offered (``dealt``) against what was asked, by the pass rate known before. Since the
        last call."""
        step, self._step, found = self._step, Counter(), {}
        if not step["dealt"]:
            return {}
        for reason in (ALL_RIGHT, ALL_WRONG):
            found[f"rollout/skip/{reason.replace(' ', '_')}"] = step[reason] / step["dealt"]
        found["rollout/skip/share"] = (step[ALL_RIGHT] + step[ALL_WRONG]) / step["dealt"]
        found["rollout/skip/rechecked"] = step["rechecked"] / max(step["asked"], 1)
        for what in ("dealt", "asked"):
            for band in ("unseen", *(name for name, _ in BANDS)):
                found[f"rollout/skip/{what}_{band}"] = step[f"{what}/{band}"] / max(step[what], 1)
        return found

    def state(self) -> dict[str, Any]:
        known = list(self._known.items())
        return {
            "drawn": self._drawn,
            "uids": [uid for uid, _ in known],
            "solved": [solved for _, (solved, _, _) in known],
            "scored": [scored for _, (_, scored, _) in known],
            "versions": [version for _, (_, _, version) in known],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._drawn = int(state["drawn"])
        rows = zip(state["uids"], state["solved"], state["scored"], state["versions"], strict=True)
        self._known = {uid: (solved, scored, version) for uid, solved, scored, version in rows}
