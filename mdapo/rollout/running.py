"""Groups under way: their conversations run until they are paused, and go on where they were, here or after a restart.

A group is *ended* once none of its conversations goes on, and *scored* once all have their score. Nothing here depends
on how long a score takes: a caller that pauses by what has ended gets the same tokens from an engine that decodes in
step with the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import numpy as np

from mdapo.rollout.conversations import Conversations
from mdapo.rollout.engine import EngineError
from mdapo.rollout.pause import Pause
from mdapo.types import UNFINISHED, Episode, Group, Prompt

log = logging.getLogger(__name__)
ABORT_AGAIN_S = 2.0  # requests that were on their way when the engine was told to abort
ABORTS = 30  # after which turns at hand are given up; counted, so that a process that stood still does not


@dataclass(eq=False)
class Begun:
    """One group under way. ``name`` tells its seeds; ``version`` is the weight version it was begun with and
    ``length_scale`` the scale of its budgets; ``seconds`` is what each conversation has used of its deadline."""

    name: str
    prompt: Prompt
    version: int
    episodes: list[Episode]
    seconds: list[float] = field(default_factory=list)
    length_scale: float = 1.0
    talking: int = field(init=False)  # conversations that are not over
    unscored: int = field(init=False)
    taken: bool = False  # no longer under way
    busy: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # conversations that talk, or wait for a score

    def __post_init__(self) -> None:
        self.seconds = self.seconds or [0.0] * len(self.episodes)
        self.talking = sum(episode.end == UNFINISHED for episode in self.episodes)
        self.unscored = sum(episode.score is None for episode in self.episodes)

    @classmethod
    def new(cls, name: str, prompt: Prompt, *, n: int, version: int, length_scale: float = 1.0) -> Begun:
        nothing = np.zeros(0, np.int32)
        episodes = [Episode(prompt, i, nothing, (), (), UNFINISHED) for i in range(n)]
        return cls(name, prompt, version, episodes, length_scale=length_scale)

    @property
    def ended(self) -> bool:
        return self.talking == 0

    @property
    def scored(self) -> bool:
        return self.unscored == 0

    @property
    def group(self) -> Group:
        return Group(self.prompt, tuple(self.episodes), self.version, self.length_scale)

    @property
    def model_tokens(self) -> int:
        return sum(episode.num_model_tokens for episode in self.episodes)


class Running:
    """``begun`` in the order of dispatch. It stands still until ``start``, and again after ``pause``.

    ``on_scored`` is called with each group as its last score comes. An exception of a conversation or of ``on_scored``
    is raised by ``wait``.
    """

    def __init__(self, talks: Conversations, *, on_scored: Callable[[Begun], object] = lambda _: None) -> None:
        self.talks, self.on_scored = talks, on_scored
        self.begun: list[Begun] = []
        self.paused = True
        self._pause = Pause()
        self._talking: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()  # those too that wait for a score
        self._unended: Counter[int] = Counter()  # groups by the version that they were begun with
        self._waiters: set[asyncio.Future[None]] = set()
        self._error: BaseException | None = None

    @property
    def ended(self) -> int:
        """How many groups are."""
        return len(self.begun) - self._unended.total()

    def unended(self) -> list[tuple[int, int]]:
        """(version, how many groups begun with it or before are not ended), oldest first."""
        versions = sorted(version for version, count in self._unended.items() if count)
        return list(zip(versions, accumulate(self._unended[version] for version in versions), strict=True))

    @property
    def model_tokens(self) -> int:
        return sum(begun.model_tokens for begun in self.begun)

    def add(self, begun: Iterable[Begun]) -> None:
        added = list(begun)
        self.begun += added
        self._unended.update(b.version for b in added if not b.ended)
        if not self.paused:
            self._spawn(added)

    def take(self, taken: Sequence[Begun]) -> None:
        """These are no longer under way."""
        for begun in taken:
            begun.taken = True
            self._unended[begun.version] -= not begun.ended
        self.begun = [begun for begun in self.begun if not begun.taken]

    def start(self) -> None:
        """Everything goes on."""
        if self.paused:
            self.paused = False
            self._pause.lift()
            self._spawn(self.begun)

    async def pause(self) -> None:
        """Every conversation ends where it is, with what the engine has written; scores that are on their way come.

        An engine that does not let go after ``ABORTS`` times loses the turns at hand, no more.
        """
        self.paused = True
        self._pause.request()
        aborts = 0
        while self._talking:
            if aborts >= ABORTS:
                log.warning("%d turns given up: %d times not aborted", len(self._talking), aborts)
                for task in list(self._talking):
                    self._pause.cut(task)
            try:
                await self.talks.engine.abort()
            except EngineError as error:  # its requests fail, or are given up
                log.warning("the engine could not be told to abort: %s", error)
            aborts += 1
            try:
                async with asyncio.timeout(ABORT_AGAIN_S):
                    await self._until(lambda: not self._talking)
            except TimeoutError:
                continue

    async def settle(self) -> None:
        """After ``pause``: until the scores have come too."""
        await self._until(lambda: not self._tasks)

    async def stop(self) -> None:
        """End all conversations at once. What each had when it was last put off stands."""
        self.paused = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._error = None

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Until ``condition`` holds, asked anew whenever a group ended, the last conversation or score has come, or
        ``wake`` was called."""
        await self._until(lambda: self._error is not None or condition())
        if self._error is not None:
            raise self._error

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    def wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _spawn(self, groups: Sequence[Begun]) -> None:
        for begun in groups:
            for index, episode in enumerate(begun.episodes):
                if episode.score is None and index not in begun.busy:  # a score may be on its way since before a pause
                    task = asyncio.create_task(self._run(begun, index))
                    begun.busy[index] = task
                    self._tasks.add(task)
                    self._talking.add(task)
                    task.add_done_callback(partial(self._done, begun, index))

    async def _run(self, begun: Begun, index: int) -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        episode = begun.episodes[index]
        if episode.end == UNFINISHED:
            started = loop.time()
            episode = await self.talks.talk(
                begun.prompt,
                index,
                name=begun.name,
                sampling=self.talks.sampling,
                begun=episode,
                spent_s=begun.seconds[index],
                length_scale=begun.length_scale,
                pause=self._pause,
            )
            begun.seconds[index] += loop.time() - started
            begun.episodes[index] = episode
            if episode.end != UNFINISHED:
                begun.talking -= 1
                self._unended[begun.version] -= begun.ended and not begun.taken
        if episode.end == UNFINISHED:
            del begun.busy[index]  # it may go on before this task is seen to be done
        self._talking.discard(task)
        if begun.ended or not self._talking:
            self.wake()
        if episode.end == UNFINISHED:
            return
        begun.episodes[index] = await self.talks.scored(episode)
        begun.unscored -= 1
        if begun.scored and not begun.taken:
            self.talks.progress(f"{self.ended} of {len(self.begun)} groups under way are complete")
            self.on_scored(begun)

    def _done(self, begun: Begun, index: int, task: asyncio.Task[None]) -> None:
        if begun.busy.get(index) is task:
            del begun.busy[index]
        self._tasks.discard(task)
        self._talking.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
        if self._error is not None or not self._tasks:
            self.wake()
