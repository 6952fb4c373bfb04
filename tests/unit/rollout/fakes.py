"""Stand-ins where the real part is not the point: a chat of whole-number words, environments and engines by script."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mdapo.environments.base import Observation, Tools
from mdapo.rollout.engine import Completion, Request
from mdapo.types import EndReason, Episode, Message, Prompt, Score

STOP, ASK, SEPARATOR = 1, 2, 3


class WordChat:
    """Messages are numbers: "7 8" is the ids 7, 8. An assistant turn ends with STOP; ASK opens the next one. With
    ``bare`` nothing is put around what a message says."""

    stop_ids = (STOP,)

    def __init__(self, *, bare: bool = False) -> None:
        self.close_ids = () if bare else (STOP,)
        self.frame = () if bare else (SEPARATOR,)
        self.ask = () if bare else (ASK,)

    def prompt_ids(self, messages: Sequence[Message], *, tools: Tools = ()) -> list[int]:
        return [*self._words(messages), *self.ask]

    def observation_ids(self, messages: Sequence[Message], *, after_stop: bool) -> list[int]:
        assert after_stop  # episodes close a cut turn themselves
        return [*self.frame, *self._words(messages), *self.ask]

    def ids_with(self, texts: tuple[str, ...]) -> list[int]:
        return [int(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids if i != STOP)

    def _words(self, messages: Sequence[Message]) -> list[int]:
        return [int(word) for m in messages for word in m.content.split()]


class ScriptedEnv:
    """Says ``answers`` one after the other, then ends with ``end``. An exception among them is raised."""

    def __init__(
        self, prompt: Prompt, answers: Sequence[Observation | Exception], *, end: EndReason | None = "done"
    ) -> None:
        self.prompt, self.answers, self.end = prompt, list(answers), end
        self.heard: list[tuple[Message, ...]] = []

    def opening(self) -> tuple[Message, ...]:
        return self.prompt.messages

    def observe(self, messages: Sequence[Message]) -> Observation:
        self.heard.append(tuple(messages))
        answer = self.answers.pop(0) if self.answers else Observation(end=self.end)
        if isinstance(answer, Exception):
            raise answer
        return answer


class IndexRewards:
    """A group teaches: its episodes differ by their index."""

    async def score(self, episode: Episode) -> Score:
        if episode.end == "error":
            return Score(0.0, 0.0, valid=False)
        return Score(float(episode.index % 2), float(episode.index % 2))

    def check_step(self, *, at_least: int = 0) -> None:
        pass

    def end_step(self) -> Counter[str]:
        return Counter()


Reply = tuple[Sequence[int], str] | Exception


class ScriptedEngine:
    """Answers with ``reply(request)`` after ``delay(request)`` turns of the event loop; remembers what was asked."""

    def __init__(
        self, reply: Callable[[Request], Reply], *, delay: Callable[[Request], int] = lambda _: 0, hang: bool = False
    ) -> None:
        self.reply, self.delay, self.hang = reply, delay, hang
        self.version, self.lost = 0, ""
        self.requests: list[Request] = []
        self.aborted: list[str | None] = []
        self.released: list[str] = []

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        if self.hang:
            await asyncio.Event().wait()
        for _ in range(self.delay(request)):
            await asyncio.sleep(0)
        reply = self.reply(request)
        if isinstance(reply, Exception):
            raise reply
        ids, finish = reply
        assert len(ids) <= request.params.max_new_tokens
        return Completion(tuple(ids), tuple(-0.5 for _ in ids), finish, self.version)

    async def update_weights(self, weights: Iterable[Any], version: int) -> None:
        self.version = version

    async def abort(self, session: str | None = None) -> None:
        self.aborted.append(session)

    async def release(self, session: str) -> None:
        self.released.append(session)

    async def close(self) -> None: ...


def replies(*texts: Reply) -> Callable[[Request], Reply]:
    """The same replies in order, whoever asks."""
    left = list(texts)
    return lambda _: left.pop(0)
