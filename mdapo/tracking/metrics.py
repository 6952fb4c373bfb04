"""Numbers of a step: named timers and summaries, as plain floats under ``group/name`` keys."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

Metrics = Mapping[str, float]


class Timers:
    """Named wall-clock timers: ``with timers("collect"): ...``, then ``timers.pop()`` once a step.

    A name used twice adds up. ``time/step`` is the sum of the outermost timers, without those in ``apart``, which
    happen between steps.
    """

    def __init__(
        self, *, apart: Sequence[str] = ("eval", "save"), clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._apart, self._clock = frozenset(apart), clock
        self._seconds: dict[str, float] = {}
        self._step = 0.0
        self._depth = 0

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        started = self._clock()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            seconds = self._clock() - started
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            if self._depth == 0 and name not in self._apart:
                self._step += seconds

    def pop(self) -> dict[str, float]:
        """``time/{name}`` and ``time/step`` in seconds since the last call; starts over."""
        times = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        times["time/step"] = self._step
        self._seconds, self._step = {}, 0.0
        return times


def summary(name: str, values: Sequence[float]) -> dict[str, float]:
    """``{name}_mean``, ``_min`` and ``_max``; empty for no values."""
    if not len(values):
        return {}
    return {
        f"{name}_mean": float(sum(values) / len(values)),
        f"{name}_min": float(min(values)),
        f"{name}_max": float(max(values)),
    }


def as_json(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """As strict JSON holds it: numpy and torch scalars become Python's, NaN and infinities None, texts stay."""
    return {name: _plain(value) for name, value in metrics.items()}


def _plain(value: Any) -> float | int | str | None:
    if isinstance(value, int | str):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
