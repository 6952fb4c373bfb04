"""A request to stop talking: each conversation ends where it is, to go on later with the tokens that it has."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


class Pause:
    """One for all conversations that stop together.

    The policy's turns end because the engine is told to abort; a call of an environment is cancelled (it is made again
    when the conversation goes on), one that begins after the request too unless it answers on the spot.
    """

    def __init__(self) -> None:
        self.requested = False
        self._listening: set[asyncio.Task[Any]] = set()
        self._cut: set[asyncio.Task[Any]] = set()

    @contextmanager
    def listening(self) -> Generator[None]:
        """The current task waits for an environment."""
        task = asyncio.current_task()
        assert task is not None
        self._listening.add(task)
        if self.requested:
            asyncio.get_running_loop().call_soon(self._cut_if_listening, task)
        try:
            yield
        finally:
            self._listening.discard(task)

    def request(self) -> None:
        """From now on, until ``lift``."""
        self.requested = True
        for task in list(self._listening):
            self.cut(task)

    def _cut_if_listening(self, task: asyncio.Task[Any]) -> None:
        if self.requested and task in self._listening:
            self.cut(task)

    def cut(self, task: asyncio.Task[Any]) -> None:
        """End one conversation now; what the engine has written of the turn at hand is given up."""
        self._cut.add(task)
        task.cancel()

    def lift(self) -> None:
        self.requested = False

    def took(self) -> bool:
        """In a ``CancelledError``: whether it is this pause's alone. The task goes on then."""
        task = asyncio.current_task()
        if task not in self._cut:
            return False
        self._cut.discard(task)
        return task.uncancel() == 0
