"""``rollout.mode: async``: conversations go on while the actor trains, at most ``rollout.max_staleness`` steps ahead.

The event loop has a thread of its own (`EventLoop`). Groups are begun as long as there is room (`Pacing.room`), judged
as they are scored, and wait for the step that takes them. A step takes the oldest, and waits for none but those that
would be too old for the next one. Before the engine's weights change, every conversation is put off, with its tokens
and their version; afterwards it goes on: no token has another version than that of the weights that wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mdapo.rollout.dynamic_batch import ROUNDS_ALL_FAILED, Collected, DynamicBatch, Held
from mdapo.rollout.running import Begun
from mdapo.types import Episode, Group, Prompt


class AheadBatch(DynamicBatch):
    """A `DynamicBatch` that is filled in the background. All calls are made in the event loop's thread."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._wave = self.pacing.wave
        # A rejected group is replaced at once, so each under way may count as accepted: none is begun in vain.
        self.pacing = replace(self.pacing, wave=self.pacing.batch)
        self._handed: tuple[Group, ...] = ()  # to the step that trains now
        self._goes_on = False  # from the first step on
        self._books = self._open_books()

    async def collect(self, version: int) -> Collected:
        """As soon as there are enough groups. What is under way goes on, whatever this raises."""
        oldest = version - self.config.rollout.max_staleness
        if any(begun.version < oldest for begun in self._running.begun):
            await self._running.pause()
        self._drop_stale(version, self._books)
        self._goes_on = True
        await self.resume()
        await self._running.wait(lambda: self._is_full(version))
        books = self._books
        books.rounds = -(-books.generated // self._wave)
        self._raise_if_all_failed(books)
        failures = self.talks.rewards.end_step()
        if failures:
            self.notify(f"rewards that failed: {', '.join(sorted(failures))}")
        collected = self._hand_out(version, failures, books)
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
            self._running.start()
            self._fill()

    async def held(self) -> Held:
        """Nothing is under way when this is taken. Groups handed out and not trained yet are among those carried."""
        await self._running.pause()
        await self._running.settle()
        found = await super().held()
        await self.resume()
        return found

    def restore(self, held: Held) -> None:
        super().restore(held)
        self._handed, self._books = (), self._open_books()

    @property
    def carried(self) -> tuple[Group, ...]:
        return (*self._handed, *self._kept)

    def _is_full(self, version: int) -> bool:
        nothing_comes = not self._running.begun and self.stream.exhausted
        if self._at_limit or nothing_comes:
            return True
        full = len(self._kept) >= self.config.data.train_prompt_bsz
        return full and not self.pacing.must_wait(self._running.unended(), version)

    @property
    def _at_limit(self) -> bool:
        """As many groups as ``max_num_gen_batches`` waves have were judged since the last step."""
        most = self.config.algorithm.filter_groups.max_num_gen_batches * self._wave
        return self._books.generated >= most and len(self._kept) < self.config.data.train_prompt_bsz

    def _fill(self) -> None:
        """Begin what there is room for, with the engine's weights."""
        if self._running.paused or self._at_limit:
            return
        room = self.pacing.room(accepted=len(self.carried), under_way=len(self._running.begun))
        self._begin(room, self.talks.engine.version, self._books)

    def _on_scored(self, begun: Begun) -> None:
        self._raise_if_lost()
        self._running.take([begun])
        self._judge(begun.group, self._books)
        wave, books = self._wave, self._books
        self.talks.rewards.check_step(at_least=wave * self.config.rollout.n_resp_per_prompt)
        if books.generated == ROUNDS_ALL_FAILED * wave:
            self._raise_if_all_failed(books)
        self._fill()
        self._running.wake()
