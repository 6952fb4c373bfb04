"""A clock that does not wait, and an engine on it: how long a rollout would take, without taking it.

The event loop is asyncio's own; only its clock jumps to the next timer instead of sleeping. The engine answers with as
many tokens as a model of lengths says, at a fixed time a token, in a limited number of slots, first come first served.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from mdapo.rollout.engine import Completion, Request

T = TypeVar("T")
ROUNDING = 1e-6  # of clocks: a token that is written at this very moment is


class _Selector(selectors.SelectSelector):
    """Never waits: time passes instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits for something that no clock will bring"
            self.now += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on a simulated clock, which begins at 0."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def simulated(work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns, on a simulated clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


@dataclass(eq=False)
class _Job:
    request: Request
    answer: asyncio.Future[Completion]
    tokens: int
    finish: str
    began: float = -1.0
    timer: asyncio.TimerHandle | None = None


class SimulatedEngine:
    """``turn(request)`` gives the ids that the model would write from here on, its stop token last. Each token takes
    ``token_s``; ``slots`` requests run at a time. Its log-prob tells the version: ``-1 - version``."""

    def __init__(self, turn: Callable[[Request], list[int]], *, slots: int, token_s: float) -> None:
        self.turn, self.slots, self.token_s = turn, slots, token_s
        self.version, self.lost = 0, ""
        self.busy_s = 0.0  # of all slots together
        self._waiting: deque[_Job] = deque()
        self._running: set[_Job] = set()
        self._ids: dict[_Job, list[int]] = {}

    @property
    def description(self) -> str:
        return f"simulated, {self.slots} slots, {self.token_s:g} s a token"

    async def generate(self, request: Request) -> Completion:
        loop = asyncio.get_running_loop()
        ids = self.turn(request)
        most = request.params.max_new_tokens
        finish = "stop" if len(ids) <= most else "length"
        job = _Job(request, loop.create_future(), min(len(ids), most), finish)
        self._ids[job] = ids[:most]
        self._waiting.append(job)
        self._admit()
        try:
            return await job.answer
        finally:
            self._end(job, "abort")

    async def abort(self, session: str | None = None) -> None:
        for job in [*self._running, *self._waiting]:
            if session in (None, job.request.session):
                self._end(job, "abort")

    async def update_weights(self, weights: Iterable[Any], version: int) -> None:
        assert not self._running and not self._waiting, "a token would have a version that did not write it"
        self.version = version

    async def release(self, session: str) -> None: ...

    async def close(self) -> None: ...

    def _admit(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting and len(self._running) < self.slots:
            job = self._waiting.popleft()
            job.began = loop.time()
            job.timer = loop.call_later(job.tokens * self.token_s, self._end, job, job.finish)
            self._running.add(job)

    def _end(self, job: _Job, finish: str) -> None:
        if (ids := self._ids.pop(job, None)) is None:
            return
        tokens = 0
        if job in self._running:
            self._running.discard(job)
            spent = asyncio.get_running_loop().time() - job.began
            self.busy_s += spent
            tokens = len(ids) if finish != "abort" else min(int(spent / self.token_s + ROUNDING), len(ids))
            if job.timer is not None:
                job.timer.cancel()
        else:
            self._waiting.remove(job)
        if not job.answer.done():
            written = tuple(ids[:tokens])
            logps = (-1.0 - self.version,) * tokens
            job.answer.set_result(Completion(written, logps, finish, self.version))
        self._admit()
