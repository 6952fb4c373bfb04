"""SIGTERM and SIGINT: the first asks for a checkpoint and a clean end, a second one ends the process at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

from mdapo.errors import EXIT_INTERRUPTED

RESUMES = "stopped on a signal; the same command resumes"


class Interrupted(RuntimeError):
    """The run was asked to stop; a checkpoint was written and the same command resumes it."""


class StopSignal:
    """Set once a signal came. ``on_stop`` is called in the handler (rank 0 cancels the rollout with it)."""

    def __init__(self) -> None:
        self.requested = False
        self.on_stop: Callable[[], object] | None = None

    def install(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._handle)

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if self.requested:
            os._exit(EXIT_INTERRUPTED)
        self.requested = True
        if self.on_stop is not None:
            self.on_stop()
