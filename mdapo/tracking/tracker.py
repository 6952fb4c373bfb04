"""``metrics.jsonl``, each step exactly once over any number of restarts; backends that may break but never hinder."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from mdapo.config.schema import Tracking
from mdapo.tracking.metrics import Metrics, as_json

FILE = "metrics.jsonl"
QUEUE_STEPS = 64  # what a slow backend may lag behind before it is given up
CLOSE_S = 5.0


class Backend(Protocol):
    def log(self, step: int, metrics: Metrics) -> None: ...
    def close(self) -> None: ...


class Tracker:
    """Writes a run's metrics. ``OSError`` from ``metrics.jsonl`` is the caller's (storage); backends raise nothing.

    A commit point stores ``offset``; a resume passes it as ``resume_offset``: what was written after the commit belongs
    to steps that will run again, and is cut off.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Tracking,
        resume_offset: int = 0,
        *,
        resume_step: int = 0,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        path = run_dir / FILE
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self.offset = _whole_lines(self._descriptor, resume_offset)
        if self.offset < resume_offset:
            notify(f"{path}: {self.offset} bytes of the {resume_offset} written until step {resume_step} are left")
        if odd := _odd_lines(os.pread(self._descriptor, self.offset, 0)):
            notify(f"{path}: damaged before step {resume_step}, and left so: {odd}")
        os.ftruncate(self._descriptor, self.offset)
        os.fsync(self._descriptor)
        self._last_step = resume_step
        self._backends: list[_InBackground] = []
        if config.tensorboard:
            make = partial(_TensorBoard, run_dir / "tensorboard", resume_step)
            self._backends.append(_InBackground("tensorboard", make, notify))

    def log(self, step: int, metrics: Metrics) -> None:
        """Append the step's line and bring it to the disk; hand it to the backends."""
        assert step > self._last_step, f"step {step} after step {self._last_step}"
        line = json.dumps({"step": step, **as_json(metrics)}, allow_nan=False).encode() + b"\n"
        os.pwrite(self._descriptor, line, self.offset)
        os.fsync(self._descriptor)
        self.offset += len(line)
        self._last_step = step
        for backend in self._backends:
            backend.log(step, metrics)

    def close(self) -> None:
        for backend in self._backends:
            backend.close()
        os.close(self._descriptor)


class _InBackground:
    """Runs one backend in a thread of its own. It may raise, hang or fill up: it is then given up with one message."""

    def __init__(self, name: str, make: Callable[[], Backend], notify: Callable[[str], None]) -> None:
        self._name, self._notify = name, notify
        self._queue: queue.Queue[tuple[int, Metrics] | None] = queue.Queue(QUEUE_STEPS)
        self._alive = True
        self._thread = threading.Thread(target=self._work, args=(make,), name=f"tracking-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Metrics) -> None:
        if not self._alive:
            return
        try:
            self._queue.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._give_up(f"it is {QUEUE_STEPS} steps behind")

    def close(self) -> None:
        if self._alive:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                self._give_up(f"it is {QUEUE_STEPS} steps behind")
            self._thread.join(CLOSE_S)
            if self._alive and self._thread.is_alive():
                self._give_up(f"it did not finish within {CLOSE_S:.0f} s")

    def _work(self, make: Callable[[], Backend]) -> None:
        try:
            backend = make()
            while (item := self._queue.get()) is not None:
                backend.log(*item)
            backend.close()
        except Exception as error:  # noqa: BLE001  a plugin boundary: whatever it is, training goes on
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, reason: str) -> None:
        if self._alive:
            self._alive = False
            self._notify(f"tracking: {self._name} is off from here on ({reason}); {FILE} has everything")


class _TensorBoard:
    """Scalars under their metric names; points of steps that run again after a resume are replaced."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second: only when asked for

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else None)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in as_json(metrics).items():
            if value is not None:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _odd_lines(text: bytes) -> str:
    """Names the first line that is no step's, or one after a later step's; empty when there is none."""
    last = 0
    for number, line in enumerate(text.splitlines(), 1):
        try:
            step = json.loads(line)["step"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return f"line {number} is no step's"
        if not isinstance(step, int) or step <= last:
            return f"line {number} is of step {step}, after step {last}"
        last = step
    return ""


def _whole_lines(descriptor: int, limit: int) -> int:
    """Bytes of the file's complete lines within its first ``limit`` bytes."""
    return os.pread(descriptor, limit, 0).rfind(b"\n") + 1
