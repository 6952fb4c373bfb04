"""The event loop of rank 0: in the caller's thread, or in one of its own, where conversations go on meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
Item = TypeVar("Item")
END_S = 30.0  # that ``close`` waits for the thread


class EventLoop:
    """``background``: in a thread of its own. Its tasks run whatever the caller does; else only inside ``run``."""

    def __init__(self, *, background: bool = False) -> None:
        self._runner = asyncio.Runner()
        self._thread: threading.Thread | None = None
        if background:
            loop = self._runner.get_loop()
            self._thread = threading.Thread(target=loop.run_forever, name="event loop", daemon=True)
            self._thread.start()

    def run(
        self, work: Coroutine[Any, Any, T], *, cancels: Callable[[Callable[[], object]], object] | None = None
    ) -> T:
        """What ``work`` returns or raises. ``cancels`` is given, before it begins, what another thread or a signal
        handler may call to cancel it; ``asyncio.CancelledError`` then, once it has ended."""
        loop = self._runner.get_loop()
        if self._thread is None:
            task = loop.create_task(work)
            if cancels is not None:
                cancels(lambda: loop.call_soon_threadsafe(task.cancel))
            return loop.run_until_complete(task)
        begun: list[asyncio.Task[T]] = []
        outcome: Future[asyncio.Task[T]] = Future()

        def begin() -> None:
            begun.append(loop.create_task(work))
            begun[0].add_done_callback(outcome.set_result)

        loop.call_soon_threadsafe(begin)
        if cancels is not None:
            cancels(lambda: loop.call_soon_threadsafe(lambda: begun[0].cancel()))
        return outcome.result().result()

    def feed(self, items: Iterator[Item], work: Callable[[Iterator[Item]], Coroutine[Any, Any, T]]) -> T:
        """What ``work(items)`` returns or raises; each item is made in the caller's thread, when ``work`` asks for it.

        Collectives, and whatever else belongs to the thread that has the device, can so be made for a task of another
        thread, which stands still meanwhile.
        """
        if self._thread is None:
            return self.run(work(items))
        loop = self._runner.get_loop()
        asked: SimpleQueue[asyncio.Task[T] | None] = SimpleQueue()  # the task when it has ended
        made: SimpleQueue[Callable[[], Item]] = SimpleQueue()
        given = _Asked(lambda: asked.put(None), made)
        loop.call_soon_threadsafe(lambda: loop.create_task(work(given)).add_done_callback(asked.put))
        while (task := asked.get()) is None:
            made.put(_outcome(items))
        return task.result()

    def call(self, work: Callable[[], T]) -> T:
        """What ``work()`` returns or raises, called where the tasks run."""

        async def called() -> T:
            return work()

        return self.run(called())

    def close(self) -> None:
        """Ends the thread, and with it every task that is left."""
        if self._thread is not None:
            loop = self._runner.get_loop()
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(END_S)
            assert not self._thread.is_alive(), f"the event loop did not end within {END_S:g} s"
        self._runner.close()


class _Asked(Iterator[Item]):
    """No generator: that would keep an item until it is asked for the next."""

    def __init__(self, ask: Callable[[], object], made: SimpleQueue[Callable[[], Item]]) -> None:
        self._ask, self._made = ask, made

    def __next__(self) -> Item:
        self._ask()
        return self._made.get()()


def _outcome(items: Iterator[Item]) -> Callable[[], Item]:
    """Returns the next item, or raises what making it raised."""
    try:
        item = next(items)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where the item was asked for
        return partial(_raise, error)
    return lambda: item


def _raise(error: Exception) -> NoReturn:
    raise error
