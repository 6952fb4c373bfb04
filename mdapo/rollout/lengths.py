"""The lengths of a run as they stand: which budgets conversations begin with, and what the overlong buffer is.

A step's conversations are *measured* when it has been collected (its overlong buffer counts them), and *trained* makes
that the run's: a step that is interrupted begins again as it was. Conversations keep the scale that they began with,
which their group carries (`Group.length_scale`), over steps and restarts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mdapo.algorithms.lengths import Regime, Running, auto_buffer, next_regime
from mdapo.config.lengths import scaled
from mdapo.config.schema import Config
from mdapo.types import Episode


class Lengths:
    """Where nothing adapts, all lengths are those that are configured, and there are no numbers to log."""

    def __init__(self, config: Config) -> None:
        self.config, self.adaptive = config, config.rollout.adaptive_lengths
        buffer = config.reward.overlong_buffer_cfg
        self.follows = self.adaptive.enable or (buffer.enable and buffer.len == "auto")
        self.running = Running()
        self.regime: Regime = "base"
        self._measured = self.running

    @property
    def scale(self) -> float:
        """Of conversations that begin now."""
        if not self.adaptive.enable:
            return 1.0
        return {"shorter": self.adaptive.shorter, "base": 1.0, "longer": self.adaptive.longer}[self.regime]

    @property
    def overlong_len(self) -> int:
        """The overlong buffer, in tokens, of the step that was measured last."""
        buffer, base = self.config.reward.overlong_buffer_cfg.len, self.config.rollout.max_response_len
        if buffer != "auto":
            return buffer
        mean = self._measured.mean_tokens
        return auto_buffer(base if mean is None else mean, max_response_len=scaled(base, self.scale))

    def measure(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """``lengths/...`` of a step for which these conversations ended, and of the run with it."""
        if not self.follows:
            return {}
        self._measured = self.running.then(episodes, decay=self.adaptive.decay)
        found: dict[str, float] = {}
        if self._measured.mean_turns is not None and self._measured.mean_tokens is not None:
            found |= {"lengths/turns": self._measured.mean_turns, "lengths/response": self._measured.mean_tokens}
        if self.adaptive.enable:
            found["lengths/scale"] = self.scale
            found["lengths/max_response_len"] = scaled(self.config.rollout.max_response_len, self.scale)
        if self.config.reward.overlong_buffer_cfg.enable:
            found["lengths/overlong_buffer"] = self.overlong_len
        return found

    def trained(self) -> str | None:
        """The step that was measured is done. A line to say, if conversations begin with other budgets from now on."""
        self.running, before, mean = self._measured, self.scale, self._measured.mean_turns
        if mean is not None:
            rule = self.adaptive
            self.regime = next_regime(
                self.regime, mean, below=rule.turns_below, above=rule.turns_above, hysteresis=rule.hysteresis
            )
        if self.scale == before or mean is None:
            return None
        base = self.config.rollout.max_response_len
        return (
            f"dialogues have {mean:.2f} turns on average: lengths x {self.scale:g}, rollout.max_response_len "
            f"{scaled(base, self.scale):,} (was {scaled(base, before):,})"
        )

    def state(self) -> dict[str, Any]:
        """Plain JSON data, part of a checkpoint."""
        return {"regime": self.regime, "running": asdict(self.running)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.regime = state["regime"]
        self.running = self._measured = Running(**state["running"])
