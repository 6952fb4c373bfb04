"""What a person sees of a run: a bar with the time left on a terminal, one ``key=value`` line a step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mdapo.errors import StorageError
from mdapo.tracking.metrics import Metrics

# What a step line shows: label, metric. What a step does not have is left out.
COLUMNS: tuple[tuple[str, str], ...] = (
    ("eval_success", "eval/success"),
    ("outcome", "reward/outcome"),
    ("reward", "reward/mean"),
    ("loss", "actor/loss"),
    ("grad_norm", "actor/grad_norm"),
    ("entropy", "actor/entropy"),
    ("gap", "actor/rollout_logp_gap"),
    ("sync_gap", "sync/logprob_gap"),
    ("len", "length/response_mean"),
    ("len_max", "length/response_max"),
    ("updates", "actor/updates_total"),
    ("groups", "rollout/groups_trained"),
    ("dropped", "rollout/groups_dropped"),
    ("carried", "rollout/groups_carried"),
    ("yield", "rollout/yield"),
    ("t", "time/step"),
    ("t_collect", "time/collect"),
    ("t_train", "time/train"),
    ("t_sync", "time/sync"),
)


class _Rich(RichConsole):
    """Rich ends the process with ``SystemExit`` where nobody reads the other end of a pipe any more."""

    def on_broken_pipe(self) -> None:
        raise


class Console:
    """Step lines and messages on ``file`` (default: stdout). Safe to call from several threads.

    ``StorageError`` where that cannot be written.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 0,
        file: TextIO | None = None,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._first, self._clock, self._started = total_steps, first_step, clock, clock()
        out = file if file is not None else sys.stdout
        self._rich = _Rich(file=out, force_terminal=terminal, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        if self._rich.is_terminal:
            self._progress = _progress(self._rich)
            self._task = self._progress.add_task("starting", total=total_steps, completed=first_step)
            self._progress.start()

    def say(self, text: str) -> None:
        """A message in lines of its own; ``text`` is shown as it is, control characters escaped."""
        with _writing():
            self._rich.print(printable(text), markup=False)

    def show(self, renderable: RenderableType) -> None:
        """A table, say."""
        with _writing():
            self._rich.print(renderable)

    def doing(self, text: str) -> None:
        """What is going on within the step ("collecting 3/8"); shown beside the bar, nowhere else."""
        if self._progress is not None:
            self._progress.update(self._task, description=printable(text))

    def step(self, step: int, metrics: Metrics) -> None:
        """The line of a finished step."""
        pairs = step_pairs(metrics)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description="")
            shown = "  ".join(f"{label} {value}" for label, value in pairs)
            self.say(f"step {step:>{len(str(self._total))}}  {shown}")
        else:
            pairs = [("step", f"{step}/{self._total}"), *pairs, ("eta", duration(self.seconds_left(step)))]
            self.say(" ".join(f"{label}={value}" for label, value in pairs))

    def seconds_left(self, step: int) -> float:
        """By the mean pace of this process, evaluations included."""
        done = max(step - self._first, 1)
        return (self._clock() - self._started) / done * max(self._total - step, 0)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


@contextmanager
def _writing() -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"the output (stdout) cannot be written: {error.strerror}") from error


def step_pairs(metrics: Metrics) -> list[tuple[str, str]]:
    """Label and value as text, in the order of ``COLUMNS``."""
    units = {name: "s" for _, name in COLUMNS if name.startswith("time/")}
    return [(label, number(metrics[name]) + units.get(name, "")) for label, name in COLUMNS if name in metrics]


def number(value: float) -> str:
    """Four significant digits, whole numbers whole: ``0.4312``, ``1.2e-06``, ``8``."""
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e6 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """``42s``, ``5m03s``, ``2h07m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def printable(text: str) -> str:
    """Text that cannot steer a terminal: control characters but newline and tab become ``\\x1b``-like escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def _progress(console: RichConsole) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        speed_estimate_period=3600.0,  # steps take minutes: rich's default of 30 s would never see two of them
    )
