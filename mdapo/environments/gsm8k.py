"""Word problems with a second chance: a wrong answer is said to be wrong once, and the policy may answer again."""

from __future__ import annotations

from collections.abc import Sequence

from mdapo.environments.base import Observation
from mdapo.rewards.math import extract_answer, same_answer
from mdapo.types import Message, Prompt

FEEDBACK = "That is not right. Check your steps and answer again."


class Gsm8k:
    """Ends "done" at a right answer and "gave_up" at the last wrong one. ``tries``: answers allowed.

    The feedback never names the right answer. Raises ValueError where the prompt has no ground truth.
    """

    def __init__(self, prompt: Prompt, *, seed: int, tries: int = 2) -> None:
        if not isinstance(prompt.ground_truth, str | int | float):
            raise ValueError(f"{prompt.uid}: ground_truth must be text or a number")
        self.prompt, self.tries = prompt, tries

    def opening(self) -> tuple[Message, ...]:
        return self.prompt.messages

    def observe(self, messages: Sequence[Message]) -> Observation:
        self.tries -= 1
        answer = extract_answer(messages[-1].content)
        if answer is not None and same_answer(answer, str(self.prompt.ground_truth)):
            return Observation(end="done")
        if self.tries <= 0:
            return Observation(end="gave_up")
        return Observation((Message("user", FEEDBACK),))
