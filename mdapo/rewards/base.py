"""What a reward is: a plain function of one conversation, finished unless turns have credit of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from mdapo.types import EndReason, Message, Prompt, Score


class Reward(Protocol):
    """Return a number, a mapping of named parts with ``score`` (and, if you have it, ``acc``) among them, or a
    ``Score``.

    ``messages`` is the whole conversation, prompt included. With ``algorithm.advantage.credit: turn`` the same
    function is also asked of the conversation as it stood before each later agent turn (``end`` is how the whole one
    ended); one that has no value for it may raise, and the value of the turn before stands.

    verl's ``(data_source, solution_str, ground_truth, extra_info)`` and TRL's ``(prompts, completions, **columns)``
    signatures are accepted as they are by ``rewards/runner.py``.
    """

    def __call__(
        self, messages: Sequence[Message], prompt: Prompt, end: EndReason, **args: object
    ) -> float | Mapping[str, float] | Score: ...
