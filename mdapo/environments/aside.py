"""Calls that may hang, in daemon threads: whoever waits for one can give it up, and none keeps the process alive.

A quick call is waited for on the spot. The event loop does nothing else meanwhile, as if the call had been made in it,
so that which dialogues the engine decodes together, and with it every bit of a run, depends on no thread. A call that
is not back after ``PATIENCE_S`` lets the others go on; while there is such a one, nothing is waited for on the spot.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

PATIENCE_S = 2.0
T = TypeVar("T")
_Outcome = tuple[Any, BaseException | None]
_Job = tuple[Callable[[], Any], "Future[_Outcome]"]


class Aside:
    """As many threads as calls run at once: one, as long as all are quick. For one event loop at a time."""

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        self.patience_s = patience_s
        self._idle: list[queue.SimpleQueue[_Job | None]] = []
        self._overdue: set[Future[_Outcome]] = set()
        self._closed = False

    async def call(self, work: Callable[[], T]) -> T:
        """What ``work()`` returns or raises. Cancelled (by a deadline, say), it leaves the thread to itself."""
        outcome: Future[_Outcome] = Future()
        outcome.set_running_or_notify_cancel()  # it cannot be cancelled: nobody knows how to end a thread
        self._give((work, outcome))
        if self._overdue or wait_for([outcome], timeout=self.patience_s).not_done:
            self._overdue.add(outcome)
            try:
                await asyncio.wrap_future(outcome)
            finally:
                self._overdue.discard(outcome)
        value, error = outcome.result()
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """Threads that wait for work end; those that hang end with the process."""
        self._closed = True
        while self._idle:
            self._idle.pop().put(None)

    def _give(self, job: _Job) -> None:
        if self._idle:
            self._idle.pop().put(job)
            return
        jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        jobs.put(job)
        threading.Thread(target=self._work, args=(jobs,), name="environment", daemon=True).start()

    def _work(self, jobs: queue.SimpleQueue[_Job | None]) -> None:
        while (job := jobs.get()) is not None:
            work, outcome = job
            value, failure = None, None
            try:
                value = work()
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                failure = error
            if not self._closed:
                self._idle.append(jobs)  # before the outcome is known: the next call finds this thread
            outcome.set_result((value, failure))
            if self._closed:
                return
