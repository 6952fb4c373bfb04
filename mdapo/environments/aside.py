"""Calls that may hang or take long, in daemon threads: whoever waits for one can give it up, none keeps the process
alive, and those of many dialogues run at the same time.

How a call is waited for is the environment's pace:

- ``inline``: mdapo's own, microseconds of plain Python. Made in the event loop itself: a thread would cost as much.
- ``quick``: a plug-in of which nothing is known. A quick call is waited for on the spot: the event loop does nothing
  else meanwhile, as if the call had been made in it, so that which dialogues the engine decodes together, and with it
  every bit of a run, depends on no thread. Calls that turn out slow are not: see `Aside`.
- ``waits``: it says itself that it waits for others (network, processes). The dialogues go on meanwhile.

A call that returns a coroutine (``async def observe``) has that run in an event loop of its own, in one more thread:
one that blocks by mistake holds up other environments, never the engine.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, Literal, NamedTuple, TypeVar, cast

from mdapo.errors import UserError

log = logging.getLogger(__name__)

Pace = Literal["inline", "quick", "waits"]
PATIENCE_S = 2.0
QUICK_S = 0.05  # what a call may take that counts as quick
MAX_RUNNING = 64
END_S = 5.0  # for coroutines that are cancelled when all is closed
MOST_LEFT = 256  # calls that were given up and still run; more of them are a leak, not an accident
T = TypeVar("T")


class _Outcome(NamedTuple):
    value: Any
    error: BaseException | None
    seconds: float = 0.0


_Job = tuple[Callable[[], Any], "Future[_Outcome]"]


class Aside:
    """Calls of one environment. For one event loop at a time.

    ``timeout_s``: deadline of one call, from its start (None: none but the caller's). ``max_running``: how many run at
    the same time, so many threads at most; more wait for their turn, first come, first served. One whose caller has
    gone (a conversation that is put off) counts until it is over or its deadline is past.

    With the pace ``quick`` all calls together may hold the event loop up for ``patience_s``: those over ``QUICK_S`` use
    it up, each quick one gives back ``QUICK_S``. With none left, and while a call is overdue, calls are made as with
    ``waits``. An environment that asks a network thus costs ``patience_s`` once, not a call; one that is quick as a
    rule stays reproducible although a busy machine delays it now and then.
    """

    def __init__(
        self,
        *,
        pace: Pace = "quick",
        patience_s: float = PATIENCE_S,
        timeout_s: float | None = None,
        max_running: int = MAX_RUNNING,
    ) -> None:
        self.pace, self.patience_s, self.timeout_s, self.max_running = pace, patience_s, timeout_s, max_running
        self._slots = asyncio.Semaphore(max_running)
        self._idle: list[queue.SimpleQueue[_Job | None]] = []
        self._overdue: set[Future[_Outcome]] = set()
        self._left: set[Future[_Outcome]] = set()
        self._in_slots: set[asyncio.Task[_Outcome | TimeoutError | UserError]] = set()
        self._held_s = 0.0  # how long slow calls have held the event loop up, less what quick ones gave back
        self._told = self._closed = False
        self._others: asyncio.AbstractEventLoop | None = None

    async def call(self, work: Callable[[], T]) -> T:
        """What ``work()`` returns or raises, or what the coroutine that it returns does.

        Cancelled, it leaves the thread to itself. ``TimeoutError`` after ``timeout_s``; ``UserError`` when more than
        ``MOST_LEFT`` calls never came back.
        """
        if self.pace == "inline":
            value: Any = work()
        else:
            value = await self._in_a_thread(work)
        if inspect.iscoroutine(value):
            value = await self._in_the_other_loop(value)
        return cast("T", value)

    def close(self) -> None:
        """Threads that wait for work end; those that hang end with the process."""
        self._closed = True
        while self._idle:
            self._idle.pop().put(None)
        if self._others is not None:
            self._others.call_soon_threadsafe(self._others.stop)
            self._others = None

    # ---- threads -----------------------------------------------------------------------------------------------------

    async def _in_a_thread(self, work: Callable[[], Any]) -> Any:
        if self._on_the_spot:
            outcome, spot_s = self._give(work), min(self.patience_s, self.timeout_s or self.patience_s)
            wait_for([outcome], timeout=spot_s)
            return self._read(outcome.result() if outcome.done() else await self._wait(outcome, waited_s=spot_s))
        await self._slots.acquire()
        running = asyncio.create_task(self._to_its_end(work))
        self._in_slots.add(running)
        running.add_done_callback(self._free_slot)
        try:
            found = await (running if self.timeout_s is None else asyncio.shield(running))
        except asyncio.CancelledError:
            running.add_done_callback(_drop_found)
            raise
        if not isinstance(found, _Outcome):
            raise found
        return self._read(found)

    async def _to_its_end(self, work: Callable[[], Any]) -> _Outcome | TimeoutError | UserError:
        """Errors as values: there may be nobody left to raise them to."""
        try:
            return await self._wait(self._give(work))
        except (TimeoutError, UserError) as error:
            return error

    def _free_slot(self, running: asyncio.Task[Any]) -> None:
        self._in_slots.discard(running)
        self._slots.release()

    @property
    def at_once(self) -> bool:
        """Whether a call made now answers, as a rule, before anything else happens."""
        return self.pace == "inline" or self._on_the_spot

    @property
    def _on_the_spot(self) -> bool:
        return self.pace == "quick" and not self._overdue and self._held_s < self.patience_s

    def _read(self, outcome: _Outcome) -> Any:
        slow = outcome.seconds > QUICK_S
        self._held_s += outcome.seconds if slow else -QUICK_S
        self._held_s = min(max(self._held_s, 0.0), 2 * self.patience_s)
        if self.pace == "quick" and self._held_s >= self.patience_s and not self._told:
            self._told = True
            log.warning(
                "the environment's calls take long (%.2g s): dialogues no longer wait for each other's, and runs are "
                "no longer equal in every bit (say `waits = True` in its class, and they do not from the start)",
                outcome.seconds,
            )
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    async def _wait(self, outcome: Future[_Outcome], *, waited_s: float = 0.0) -> _Outcome:
        self._overdue.add(outcome)
        try:
            async with asyncio.timeout(None if self.timeout_s is None else self.timeout_s - waited_s):
                return await asyncio.wrap_future(outcome)
        except TimeoutError as error:
            outcome.add_done_callback(_drop)
            raise TimeoutError(f"no answer after {self.timeout_s:g} s (environment.timeout_s)") from error
        except asyncio.CancelledError:
            outcome.add_done_callback(_drop)
            raise
        finally:
            self._overdue.discard(outcome)
            if not outcome.done():
                self._give_up(outcome)

    def _give_up(self, outcome: Future[_Outcome]) -> None:
        self._left.add(outcome)
        outcome.add_done_callback(self._left.discard)

    def _give(self, work: Callable[[], Any]) -> Future[_Outcome]:
        if len(self._left) > MOST_LEFT:
            raise UserError(
                f"environment: {len(self._left)} of its calls never came back after their deadline (environment."
                "timeout_s or rollout.episode_timeout_s); each is a thread that nobody can end: give it a deadline"
            )
        outcome: Future[_Outcome] = Future()
        outcome.set_running_or_notify_cancel()  # it cannot be cancelled: nobody knows how to end a thread
        job = (work, outcome)
        if self._idle:
            self._idle.pop().put(job)
            return outcome
        jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        jobs.put(job)
        threading.Thread(target=self._work, args=(jobs,), name="environment", daemon=True).start()
        return outcome

    def _work(self, jobs: queue.SimpleQueue[_Job | None]) -> None:
        while (job := jobs.get()) is not None:
            work, outcome = job
            value, failure, started = None, None, time.monotonic()
            try:
                value = work()
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                failure = error
            seconds = time.monotonic() - started
            if not self._closed:
                self._idle.append(jobs)  # before the outcome is known: the next call finds this thread
            outcome.set_result(_Outcome(value, failure, seconds))
            if self._closed:
                return

    # ---- coroutines --------------------------------------------------------------------------------------------------

    async def _in_the_other_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def finish() -> _Outcome:
            try:
                return _Outcome(await work, None)
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for, not in that loop's thread
                return _Outcome(None, error)

        others = self._other_loop()
        try:
            async with self._slots:
                running = asyncio.run_coroutine_threadsafe(finish(), others)
                value, error, _ = await self._wait(running)  # giving it up cancels it
        except (asyncio.CancelledError, TimeoutError):
            if not others.is_closed():
                others.call_soon_threadsafe(_close_unused, work)
            raise
        if error is not None:
            raise error
        return value

    def _other_loop(self) -> asyncio.AbstractEventLoop:
        if self._others is None:
            self._others = asyncio.new_event_loop()
            threading.Thread(target=_run_until_stopped, args=(self._others,), name="environments", daemon=True).start()
        return self._others


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    """Then what is left is cancelled, and has ``END_S`` to close its connections."""
    loop.run_forever()
    if tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=END_S))
    loop.close()


def _drop_found(running: asyncio.Task[_Outcome | TimeoutError | UserError]) -> None:
    if not running.cancelled() and isinstance(found := running.result(), _Outcome):
        _close_unused(found.value)


def _drop(outcome: Future[_Outcome]) -> None:
    if not outcome.cancelled():
        _close_unused(outcome.result().value)


def _close_unused(value: Any) -> None:
    """A coroutine that nobody will wait for and that has not begun."""
    if inspect.iscoroutine(value) and inspect.getcoroutinestate(value) == inspect.CORO_CREATED:
        value.close()
