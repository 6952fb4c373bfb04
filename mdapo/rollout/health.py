"""The state of one server, as a pure machine: what happened goes in; what may be done with the server comes out.

    healthy -- failed --> suspect -- failed again and again --> dead --> restarting --> stale -- synced --> healthy
                                                                 |---- no restarts left --> retired

A server is stale when it missed a weight update, failed in one, answered with another version, or has just started:
it serves nothing until it has been synced. Nothing here waits, and time comes from the clock that is given.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"  # failed lately: serves where there is no healthy one
    DEAD = "dead"  # nothing is sent to it but questions after its health
    RESTARTING = "restarting"
    STALE = "stale"  # answers, without the newest weights
    RETIRED = "retired"  # for good


ANSWERING = frozenset({State.HEALTHY, State.SUSPECT, State.STALE})


@dataclass(frozen=True)
class HealthLimits:
    """``failures`` in a row, of its work or of questions after its health, make a server dead; it is started again at
    most ``restarts`` times within ``window_s``, after a wait of ``restart_wait_s`` that doubles each time up to
    ``restart_wait_max_s``. Seconds."""

    failures: int = 3
    restarts: int = 3
    window_s: float = 3600.0
    restart_wait_s: float = 1.0
    restart_wait_max_s: float = 60.0


class Health:
    """One server's state; it begins stale. ``can_restart``: somebody can start it again. ``notify`` hears of each
    change as (old, new, why). An event that means nothing in the present state changes nothing."""

    def __init__(
        self,
        *,
        can_restart: bool,
        limits: HealthLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        notify: Callable[[State, State, str], object] = lambda *_: None,
    ) -> None:
        self.can_restart, self.limits, self.clock, self.notify = can_restart, limits or HealthLimits(), clock, notify
        self.state = State.STALE
        self.cause = "it has no weights of this run yet"
        self.version: int | None = None  # of the weights it has for certain
        self.restarts = 0  # of all time
        self._failures = 0  # of its work, in a row
        self._silences = 0  # unanswered questions after its health, in a row
        self._counted = float("-inf")  # when the last failure was
        self._died = 0.0
        self._begun: deque[float] = deque()  # restarts within the window

    # ---- what may be done ------------------------------------------------------------------------------------------

    def serves(self, version: int) -> bool:
        """Whether it may be asked for tokens of these weights."""
        return self.state in (State.HEALTHY, State.SUSPECT) and self.version == version

    @property
    def answers(self) -> bool:
        """Whether it is worth sending it weights."""
        return self.state in ANSWERING

    @property
    def restart_at(self) -> float | None:
        """The time from which a dead server may be started again; None when there is nothing to start."""
        if self.state is not State.DEAD or not self.can_restart:
            return None
        wait = self.limits.restart_wait_s * 2.0 ** min(len(self._recent()), 32)
        return self._died + min(wait, self.limits.restart_wait_max_s)

    # ---- what happened ---------------------------------------------------------------------------------------------

    def worked(self, *, began: float) -> None:
        """It did what it is for, asked at ``began``."""
        if self.state in ANSWERING:
            self._failures = 0
        self.answered(began=began)

    def answered(self, *, began: float) -> None:
        """It says that it is well, asked at ``began``. That alone does not wipe out failures of its work, or one that
        does nothing else would never be dead. A dead server that answers what it was asked since may be another
        process: it is stale."""
        if self.state in ANSWERING:
            self._silences = 0
        if self.state is State.SUSPECT:
            self._become(State.HEALTHY, "it answers again")
        elif self.state is State.DEAD and began > self._died:
            self._failures = self._silences = 0
            self._become(State.STALE, "it answers again, with weights that nobody vouches for")

    def failed(self, why: str, *, began: float) -> None:
        """Work that began at ``began`` came to nothing. What began before the last failure counted tells nothing new:
        sixty requests lost in one moment are one failure."""
        if self.state in ANSWERING and began >= self._counted:
            self._failures += 1
            self._suspect(why, self._failures)

    def silent(self, why: str, *, began: float) -> None:
        """It did not say that it is well when asked at ``began``."""
        if self.state in ANSWERING and began >= self._counted:
            self._silences += 1
            self._suspect(why, self._silences)

    def _suspect(self, why: str, times: int) -> None:
        self._counted = self.clock()
        if times >= self.limits.failures:
            self._die(why)
        elif self.state is State.HEALTHY:
            self._become(State.SUSPECT, why)

    def died(self, why: str) -> None:
        """The process is gone, or nothing listens."""
        if self.state in ANSWERING:
            self._die(why)

    def missed(self, why: str) -> None:
        """It has not, or not wholly, taken an update, or answered with another version."""
        self.version = None
        if self.state in ANSWERING:
            self._become(State.STALE, why)

    def synced(self, version: int) -> None:
        """It has taken all weights of ``version``."""
        if self.state in ANSWERING:
            self.version = version
            if self.state is not State.HEALTHY:
                self._become(State.HEALTHY, f"it has the weights of version {version}")

    def begin_restart(self) -> bool:
        """Take one restart from the budget; False when it is not due."""
        at = self.restart_at
        if at is None or self.clock() < at:
            return False
        self._begun.append(self.clock())
        self.restarts += 1
        self._become(State.RESTARTING, self.cause)
        return True

    def started(self) -> None:
        """The restart came to an answering server; it has the weights of its folder."""
        if self.state is State.RESTARTING:
            self._failures, self._silences, self._counted = 0, 0, self.clock()
            self._become(State.STALE, "it has just started")

    def start_failed(self, why: str) -> None:
        if self.state is State.RESTARTING:
            self._die(why)

    def retire(self, why: str) -> None:
        """For good: nothing leads out."""
        if self.state is not State.RETIRED:
            self.version = None
            self._become(State.RETIRED, why)

    # ---- within ----------------------------------------------------------------------------------------------------

    def _die(self, why: str) -> None:
        self.version, self._died = None, self.clock()
        self._become(State.DEAD, why)
        if self.can_restart and len(self._recent()) >= self.limits.restarts:
            count, window = self.limits.restarts, self.limits.window_s
            self.retire(f"{why} (after {count} restarts within {window:g} s)")

    def _recent(self) -> deque[float]:
        while self._begun and self._begun[0] <= self.clock() - self.limits.window_s:
            self._begun.popleft()
        return self._begun

    def _become(self, state: State, why: str) -> None:
        old, self.state, self.cause = self.state, state, why
        if old is not state:
            self.notify(old, state, why)
