"""What the benchmarks of single ops share: alternating timing, goals with what was measured, one table.

A benchmark is a file ``bench_<op>.py`` with a function ``measure() -> list[Goal]``; run.py finds it by its name.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from _harness import MODEL as MODEL
from _harness import forget_peak as forget_peak
from _harness import hardware as hardware
from _harness import most_held as most_held


@dataclass(frozen=True)
class Goal:
    """``measured`` beside ``limit``: met when at least the limit, with ``at_most`` when not above it."""

    what: str
    measured: float
    limit: float
    at_most: bool = False
    unit: str = "x"
    note: str = ""

    @property
    def met(self) -> bool:
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit


def alternate(
    functions: Mapping[str, Callable[[], Any]], *, rounds: int = 25, repeat: int = 5, settle: bool = True
) -> dict[str, list[float]]:
    """Seconds of each, ``rounds`` of them in turn, so that a drifting machine hits all alike.

    A turn is one call that is not timed, for caches and allocator to know this function and no other, then the fastest
    of ``repeat`` calls. Without ``settle`` only the first round has that call: for functions that take seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(rounds):
        for name, function in functions.items():
            if settle or i == 0:
                function()
            seconds[name].append(min(timed(function) for _ in range(repeat)))
    return seconds


def timed(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Median over the rounds of one over the other."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def milliseconds(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f} ms"


def show(goals: Sequence[Goal], *, title: str) -> int:
    """Print the table; 1 when a goal is missed."""
    width = max(len(goal.what) for goal in goals)
    print(f"\n{title}: {hardware()}")
    print(f"  {'what':<{width}}  {'measured':>10}  {'goal':>10}")
    for goal in goals:
        limit = f"{'<=' if goal.at_most else '>='} {goal.limit:g} {goal.unit}"
        verdict = "" if goal.met else "MISSED"
        print(f"  {goal.what:<{width}}  {goal.measured:>8.3g} {goal.unit}  {limit:>10}  {verdict:6}  {goal.note}")
    return 0 if all(goal.met for goal in goals) else 1
