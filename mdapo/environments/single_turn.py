"""One question, one reply."""

from __future__ import annotations

from collections.abc import Sequence

from mdapo.environments.base import Observation
from mdapo.types import Message, Prompt


class SingleTurn:
    """Says the prompt's messages and ends with the first reply."""

    def __init__(self, prompt: Prompt, *, seed: int) -> None:
        self.prompt = prompt

    def opening(self) -> tuple[Message, ...]:
        return self.prompt.messages

    def observe(self, messages: Sequence[Message]) -> Observation:
        return Observation(end="done")
