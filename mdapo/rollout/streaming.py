"""A batch without rounds: a group is judged as soon as it is scored, and the stage *sample* asked again.

* `StreamingBatch` (``rollout.mode: partial``): conversations go on over steps, and as many groups are under way as the
  next steps can use; see `partial.py` for their age, where a batch's worth of groups is what the stage *sample* says.
* `InOrderBatch` (``sync``): a step begins what it needs and ends with the shortest run of groups, in the order of
  dispatch, that holds a batch. How long a conversation took has no say in what is trained: groups after that run come
  again, also those that were complete already.
* `AheadBatch` (``async``) is in `ahead.py`.

What is begun depends on what was scored when, and so on the clock: unlike rounds, these are not the same in every bit
each time.
"""

from __future__ import annotations

from typing import Any

from mdapo.algorithms.filters import Verdict
from mdapo.rollout.dynamic_batch import Collected, DynamicBatch
from mdapo.rollout.ledger import Ledger
from mdapo.rollout.running import Begun


class StreamingBatch(DynamicBatch):
    """``_books`` are those of the step under way."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._books = self._open_books()
        self._version = 0  # of the step under way

    async def collect(self, version: int) -> Collected:
        await self.talks.engine.abort()
        self._version, self._books = version, self._open_step(version)
        self._running.renew(version)
        try:
            self._running.start()
            self._fill()
            await self._running.wait(self._is_full)
            await self._running.pause()
            await self._running.settle()
        except BaseException:  # each conversation is as it was when it was last put off, or over
            await self._running.stop()
            raise
        self._end_round(self._books)
        return self._hand_out(version, self._failures(self._books), self._books)

    # ---- how many are under way ----------------------------------------------------------------------------------

    @property
    def _goal(self) -> int:
        """Groups to have accepted, those under way among them as far as they will be."""
        steps = min(self.config.rollout.over_sampling, self.config.rollout.max_staleness + 1.0)
        return int(steps * self.pool.target)

    @property
    def _accepted(self) -> int:
        return len(self.pool.kept)

    def _fill(self) -> None:
        """Begin what there is room for."""
        if not self._running.paused and not self._at_limit:
            missing = max(self._goal - self._accepted, 0)
            count = self.pool.ask(missing, under_way=self._under_way, ahead=True)
            if count:
                self._begin(count, self._version, self._books)

    @property
    def _under_way(self) -> int:
        return len(self._running.begun)

    @property
    def _at_limit(self) -> bool:
        """As many groups as ``max_num_gen_batches`` waves have were judged in this step, and more are missing."""
        return self._books.seen >= self.cfg.max_num_gen_batches * self.pacing.wave and self.pool.missing > 0

    def _is_full(self) -> bool:
        if self._at_limit or (not self._running.begun and self.stream.exhausted):
            return True
        return self.pool.missing == 0 and not self._must_wait()

    def _must_wait(self) -> bool:
        batch = max(self.pool.ask(self.pool.target, ahead=True), 1)
        return self.pacing.must_wait(self._running.unended(), self._version, wave=batch)

    # ---- one group -----------------------------------------------------------------------------------------------

    def _on_scored(self, begun: Begun) -> None:
        self._running.take([begun])
        group = begun.group
        self.pool.book(group, self.pool.see(group, self._books), self._books)
        self._after_one(self._books)

    def _after_one(self, books: Ledger) -> None:
        if books.seen % self.pacing.wave == 0:
            self._end_round(books)
            self._raise_if_broken(books, rounds=books.rounds)
        self._fill()
        self._running.wake()

    def _end_round(self, books: Ledger) -> None:
        """As many groups as a wave has were judged; the step's last round may have fewer."""
        if -(-books.seen // self.pacing.wave) > books.rounds:
            books.rounds = -(-books.seen // self.pacing.wave)
            self._tell_round(books.begun - books.told, books)
            books.told = books.begun


class InOrderBatch(StreamingBatch):
    """Of ``rollout.mode: sync``: no token is older than its step, and nothing is under way between steps."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._verdicts: dict[Begun, Verdict] = {}  # of this step's groups that are scored
        self._promised = 0  # of which so many are kept
        self._run = self._in_run = 0  # the first groups, all of them scored, and how many of these are kept

    async def collect(self, version: int) -> Collected:
        await self.talks.engine.abort()
        self._version, self._books = version, self._open_step(version)
        self._verdicts.clear()
        self._promised = self._run = self._in_run = 0
        running = self._running
        try:
            running.start()
            self._fill()
            await running.wait(self._is_full)
            await running.pause()
            await running.settle()
            self._end_round(self._books)
            run = running.begun[: self._run]
            for begun in run:
                self.pool.book(begun.group, self._verdicts[begun], self._books)
            running.take(run)
        finally:  # what is not in the run comes again; after an error all of it
            await running.stop()
            self._give_up(running.begun, self._books)
        return self._hand_out(version, self._failures(self._books), self._books)

    def _fill(self) -> None:
        """Begin what makes a batch, beside those under way."""
        missing = self.pool.missing - self._promised
        if missing > 0 and not self._running.paused and not self._at_limit:
            under_way = len(self._running.begun) - len(self._verdicts)
            self._begin(self.pool.ask(missing, under_way=under_way), self._version, self._books)

    @property
    def _at_limit(self) -> bool:
        return self._books.seen >= self.cfg.max_num_gen_batches * self.pacing.wave

    def _is_full(self) -> bool:
        """The run holds what is missing, or all there is and no more comes. It never grows beyond a batch."""
        begun = self._running.begun
        while self._in_run < self.pool.missing and self._run < len(begun) and begun[self._run] in self._verdicts:
            self._in_run += self._verdicts[begun[self._run]].kept
            self._run += 1
        nothing_comes = self._run == len(begun) and (self._at_limit or self.stream.exhausted)
        return self._in_run == self.pool.missing or nothing_comes

    def _on_scored(self, begun: Begun) -> None:
        verdict = self.pool.see(begun.group, self._books)
        self._verdicts[begun] = verdict
        self._promised += verdict.kept
        self._after_one(self._books)
