"""``rollout.mode: async``: conversations go on while the actor trains, at most ``rollout.max_staleness`` steps ahead.

The event loop has a thread of its own (`EventLoop`). Groups are begun as long as there is room (`Pacing.room`), judged
as they are scored, and wait for the step that takes them. A step takes the oldest, and waits for none but those that
would be too old for the next one. Before the engine's weights change, every conversation is put off, with its tokens
and their version; afterwards it goes on: no token has another version than that of the weights that wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mdapo.rollout.dynamic_batch import Collected, Held
from mdapo.rollout.streaming import StreamingBatch
from mdapo.types import Episode, Group, Prompt


class AheadBatch(StreamingBatch):
    """A `StreamingBatch` that is filled in the background. All calls are made in the event loop's thread. Its books are
    opened when the step before takes its groups."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._handed: tuple[Group, ...] = ()  # to the step that trains now
        self._goes_on = False  # from the first step on

    async def collect(self, version: int) -> Collected:
        """As soon as there are enough groups. What is under way goes on, whatever this raises."""
        oldest = version - self.config.rollout.max_staleness
        if any(begun.version < oldest for begun in self._running.begun):
            await self._running.pause()
        self._version = version
        self.pool.open_step(version)
        self._drop_late(version, self._books)
        self._goes_on = True
        await self.resume()
        await self._running.wait(self._is_full)
        self._end_round(self._books)
        collected = self._hand_out(version, self._failures(self._books), self._books)
        self.talks.failures.clear()
        self._handed, self._books = collected.groups, self._open_books()
        return collected

    async def evaluate(self, prompts: Sequence[Prompt]) -> list[Episode]:
        await self._running.pause()
        try:
            return await super().evaluate(prompts)
        finally:
            await self.resume()

    def trained(self, collected: Collected) -> None:
        super().trained(collected)
        self._handed = ()
        self._fill()

    async def pause(self) -> None:
        await self._running.pause()

    async def resume(self) -> None:
        if self._goes_on:
            self._version = self.talks.engine.version
            self._running.renew(self._version)
            self._running.start()
            self._fill()

    async def held(self) -> Held:
        """Nothing is under way when this is taken. Groups handed out and not trained yet are among those carried."""
        await self._running.pause()
        await self._running.settle()
        found = await super().held()
        found.state["groups"]["trained"] = self.pool.run["trained"] - len(self._handed)
        await self.resume()
        return found

    def restore(self, held: Held) -> None:
        super().restore(held)
        self._handed, self._books = (), self._open_books()

    @property
    def carried(self) -> tuple[Group, ...]:
        return (*self._handed, *self.pool.kept)

    @property
    def _accepted(self) -> int:
        return len(self._handed) + len(self.pool.kept)

    @property
    def _goal(self) -> int:
        return (self.config.rollout.max_staleness + 1) * self.pool.target
