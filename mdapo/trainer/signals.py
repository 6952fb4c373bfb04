"""SIGTERM, SIGINT and SIGHUP: the first asks for a checkpoint and a clean end, a second ends the process at once."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from types import FrameType

from mdapo.errors import EXIT_INTERRUPTED

RESUMES = "stopped on a signal; the same command resumes"


class Interrupted(RuntimeError):
    """The run was asked to stop; a checkpoint was written and the same command resumes it."""


class StopSignal:
    """Set once a signal came. ``on_stop`` is called in the handler (rank 0 cancels the rollout with it).

    ``leaving``: signals change nothing any more. As soon as one rank has left, torchrun tells the others to; the one
    that is ending its servers then takes a few seconds more (what hangs is killed).
    """

    def __init__(self) -> None:
        self.requested = self.leaving = False
        self.on_stop: Callable[[], object] | None = None

    def install(self) -> None:
        for signum in stop_signals():
            signal.signal(signum, self._handle)

    def _handle(self, signum: int, _: FrameType | None) -> None:
        leave_terminal(signum)
        if self.leaving:
            return
        if self.requested:
            os._exit(EXIT_INTERRUPTED)
        self.requested = True
        if self.on_stop is not None:
            self.on_stop()


def stop_signals() -> list[signal.Signals]:
    """What asks for an end. SIGHUP (the connection dropped) stays ignored where it is, as under nohup."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hang_up]


def exit_on_signal(last_word: Callable[[], object]) -> None:
    """Until another handler takes over, a signal ends this process at once: there is nothing to save yet, and an
    exception would be raised, and perhaps swallowed, in the middle of some import."""

    def leave(signum: int, _: FrameType | None) -> None:
        leave_terminal(signum)
        last_word()
        os._exit(EXIT_INTERRUPTED)

    for signum in stop_signals():
        signal.signal(signum, leave)


def leave_terminal(signum: int) -> None:
    """After SIGHUP there is no terminal: what is still said goes nowhere, instead of failing like a broken disk."""
    if signum == signal.SIGHUP:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in (1, 2):
            if stat.S_ISCHR(os.fstat(fd).st_mode):
                os.dup2(nowhere, fd)
        os.close(nowhere)
