"""The event loop in a thread of its own, with items that the caller's thread makes for it."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from mdapo.rollout.event_loop import EventLoop


@pytest.fixture(params=[False, True], ids=["here", "background"])
def loop(request: pytest.FixtureRequest) -> Iterator[EventLoop]:
    made = EventLoop(background=request.param)
    yield made
    made.close()


class Item:
    def __init__(self, number: int) -> None:
        self.number, self.thread = number, threading.current_thread()


def items(count: int, *, then: Exception | None = None) -> Iterator[Item]:
    for number in range(count):
        yield Item(number)
    if then is not None:
        raise then


def test_items_are_made_in_the_callers_thread_one_at_a_time(loop: EventLoop) -> None:
    alive: list[weakref.ref[Item]] = []

    async def work(given: Iterator[Item]) -> list[int]:
        numbers = []
        for item in given:
            assert item.thread is threading.main_thread()
            alive.append(weakref.ref(item))
            numbers.append(item.number)
            await asyncio.sleep(0)
            del item
            gc.collect()
            assert not [ref for ref in alive if ref() is not None], "an item outlives its turn"
        return numbers

    assert loop.feed(items(5), work) == [0, 1, 2, 3, 4]


def test_an_error_of_an_item_is_raised_where_it_was_asked_for(loop: EventLoop) -> None:
    seen = []

    async def work(given: Iterator[Item]) -> None:
        try:
            for _ in given:
                pass
        except ValueError as error:
            seen.append(str(error))
            raise

    with pytest.raises(ValueError, match="a rank died"):
        loop.feed(items(2, then=ValueError("a rank died")), work)
    assert seen == ["a rank died"]


def test_work_that_ends_early_leaves_the_rest_to_the_caller(loop: EventLoop) -> None:
    async def work(given: Iterator[Item]) -> int:
        return next(given).number

    source = items(3)
    assert loop.feed(source, work) == 0
    assert [item.number for item in source] == [1, 2]

    async def fails(given: Iterator[Item]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop.feed(items(3), fails)
