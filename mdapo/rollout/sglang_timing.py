"""Deadlines and rhythms of the SGLang engine, and how they follow from a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from mdapo.config.schema import Config


@dataclass(frozen=True)
class Timing:
    """Deadlines and rhythms, in seconds."""

    turn_s: float = 600.0  # one turn, with all waiting, retries and restarts
    attempt_s: float = 300.0  # of it, at one server
    attempts: int = 4  # at most, whatever time is left
    backoff_s: float = 0.2  # before the second attempt; doubles, with jitter, up to
    backoff_max_s: float = 5.0
    probe_every_s: float = 5.0
    probe_s: float = 10.0  # /health alone takes one
    down_s: float = 60.0  # no server serves: after so long no turn waits for one
    start_s: float = 600.0
    abort_s: float = 10.0  # until a request that was aborted is cut off
    abort_again_s: float = 0.2  # an abort that overtakes its request is not heard
    flush_again_s: float = 0.1

    @classmethod
    def of(cls, config: Config) -> Self:
        """An episode has ``rollout.episode_timeout_s`` for all its turns; one server, half of that for one. A server of
        ours that starts again has as long as at first, and where there is no other, turns wait for it."""
        rollout = config.rollout
        whole, start = rollout.episode_timeout_s, rollout.start_timeout_s
        down = cls.down_s if rollout.urls else max(cls.down_s, start)
        # the start ends itself in time, unless the event loop stood still meanwhile
        return cls(turn_s=whole, attempt_s=whole / 2.0, start_s=2.0 * start + cls.start_s, down_s=down)
