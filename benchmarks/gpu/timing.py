"""Seconds of a device's work: several calls between two synchronisations, functions in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from mdapo import device


def seconds(functions: Mapping[str, Callable[[], Any]], *, rounds: int = 7, calls: int = 10) -> dict[str, float]:
    """Of one call of each, the median over ``rounds``; a first round warms up and does not count."""
    here = device.current()
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            here.synchronize()
            started = time.perf_counter()
            for _ in range(calls):
                function()
            here.synchronize()
            taken[name].append((time.perf_counter() - started) / calls)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}
