"""A clock that does not wait, and an engine on it: how long a rollout would take, without taking it.

The event loop is asyncio's own; only its clock jumps to the next timer instead of sleeping. The engine answers with as
many tokens as a model of lengths says, at a fixed time a token, in a limited number of slots, first come first served.
"""

from __future__ import annotations

import asyncio
import selectors
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
    key: object
    ticks: int
    done: asyncio.Future[int]
    began: float = -1.0
    timer: asyncio.TimerHandle | None = None


class Slots:
    """Work in a limited number of slots, first come first served, each tick of it ``tick_s``."""

    def __init__(self, slots: int, tick_s: float) -> None:
        self.slots, self.tick_s = slots, tick_s
        self._busy_s = 0.0
        self._waiting: dict[_Job, None] = {}
        self._running: dict[_Job, None] = {}

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    @property
    def busy_s(self) -> float:
        """Of all slots together, until now."""
        now = asyncio.get_running_loop().time()
        return self._busy_s + sum(now - job.began for job in self._running)

    async def hold(self, ticks: int, key: object = None) -> int:
        """How many ticks had passed at the end, or when ``abort`` came."""
        job = _Job(key, ticks, asyncio.get_running_loop().create_future())
        self._waiting[job] = None
        self._admit()
        try:
            return await job.done
        finally:
            self._end(job, whole=False)

    def abort(self, key: object = None) -> None:
        """All work, or that with ``key``."""
        for job in [*self._waiting, *self._running]:
            if key is None or job.key == key:
                self._end(job, whole=False)

    def _admit(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting and len(self._running) < self.slots:
            job = next(iter(self._waiting))
            del self._waiting[job]
            job.began = loop.time()
            job.timer = loop.call_later(job.ticks * self.tick_s, self._finish, job)
            self._running[job] = None

    def _finish(self, job: _Job) -> None:
        self._end(job, whole=True)

    def _end(self, job: _Job, *, whole: bool) -> None:
        passed = 0
        if job in self._running:
            del self._running[job]
            spent = asyncio.get_running_loop().time() - job.began
            self._busy_s += spent
            passed = job.ticks if whole else min(int(spent / self.tick_s + ROUNDING), job.ticks)
            if job.timer is not None:
                job.timer.cancel()
        elif job in self._waiting:
            del self._waiting[job]
        else:
            return
        if not job.done.done():
            job.done.set_result(passed)
        self._admit()


class SimulatedEngine:
    """``turn(request)`` gives the ids that the model would write from here on, its stop token last. Each token takes
    ``token_s``; ``slots`` requests run at a time. Its log-prob tells the version: ``-1 - version``."""

    def __init__(self, turn: Callable[[Request], list[int]], *, slots: int, token_s: float) -> None:
        self.turn, self.slots = turn, Slots(slots, token_s)
        self.version = 0

    @property
    def description(self) -> str:
        return f"simulated, {self.slots.slots} slots, {self.slots.tick_s:g} s a token"

    async def generate(self, request: Request) -> Completion:
        ids, most = self.turn(request), request.params.max_new_tokens
        whole = min(len(ids), most)
        tokens = await self.slots.hold(whole, request.session)
        finish = "abort" if tokens < whole else "stop" if len(ids) <= most else "length"
        return Completion(tuple(ids[:tokens]), (-1.0 - self.version,) * tokens, finish, self.version)

    async def abort(self, session: str | None = None) -> None:
        self.slots.abort(session)

    async def update_weights(self, weights: Iterable[Any], version: int) -> None:
        assert self.slots.idle, "a token would have a version that did not write it"
        self.version = version

    async def release(self, session: str) -> None: ...

    async def close(self) -> None: ...
