"""How long dialogues are lately, and what scale of lengths that asks for.

**Running mean** (`Running`). Each step's dialogues count ``decay`` times as much as those of the step after it, each
dialogue of a step as much as the others: ``sum of decay^age x turns / sum of decay^age x dialogues``. A step with few
dialogues moves it little, and there is no start to correct for.

**Rule** (`next_regime`). As published for dialogue: more than 5 turns on average, lengths x 1.5; fewer than 2, x 0.7,
of a base that never moves, so that lengths cannot run away. A mean that lies at a threshold would change them every
step, and what changes budgets changes dialogues: a regime that was entered is left only once the mean is ``hysteresis``
turns back on the other side. With ``hysteresis`` and ``decay`` 0 it is the published rule, step by step.

A short budget may itself end dialogues early, and so keep their number of turns down: ``rollout/truncated`` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mdapo.types import Episode

Regime = Literal["shorter", "base", "longer"]
OVERLONG_SHARE = 1.5  # of the mean length, for ``reward.overlong_buffer_cfg.len: auto``


@dataclass(frozen=True)
class Running:
    """Sums over dialogues, older ones decayed. ``tokens`` are the policy's."""

    dialogues: float = 0.0
    turns: float = 0.0
    tokens: float = 0.0

    def then(self, episodes: Sequence[Episode], *, decay: float) -> Running:
        """After a step with these dialogues; those that an error ended are none. A step without any is no step."""
        talks = [e for e in episodes if e.end != "error"]
        if not talks:
            return self
        return Running(
            self.dialogues * decay + len(talks),
            self.turns * decay + sum(e.num_agent_turns for e in talks),
            self.tokens * decay + sum(e.num_model_tokens for e in talks),
        )

    @property
    def mean_turns(self) -> float | None:
        """None before the first dialogue."""
        return self.turns / self.dialogues if self.dialogues else None

    @property
    def mean_tokens(self) -> float | None:
        return self.tokens / self.dialogues if self.dialogues else None


def next_regime(regime: Regime, mean_turns: float, *, below: float, above: float, hysteresis: float) -> Regime:
    """The regime after a step with this running mean. ``below + hysteresis`` is at most ``above``."""
    assert below + hysteresis <= above, (below, above, hysteresis)
    if mean_turns > above or (regime == "longer" and mean_turns > above - hysteresis):
        return "longer"
    if mean_turns < below or (regime == "shorter" and mean_turns < below + hysteresis):
        return "shorter"
    return "base"


def auto_buffer(mean_tokens: float, *, max_response_len: int) -> int:
    """``reward.overlong_buffer_cfg.len: auto``: 1.5 times the mean length of a dialogue in the policy's tokens, at
    least 1 and at most the budget."""
    return min(max(round(OVERLONG_SHARE * mean_tokens), 1), max_response_len)
