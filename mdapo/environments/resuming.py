"""An environment made again is brought to where its conversation stands."""

from __future__ import annotations

from collections.abc import Sequence

from mdapo.environments.base import Environment, Resumable
from mdapo.types import Message


class NotTheSame(RuntimeError):
    """An environment made again says something else than it did; it is not a function of its seed and the messages."""


def catch_up(env: Environment, messages: Sequence[Message], *, answered: int, unheard: bool) -> None:
    """The policy's first ``answered`` turns were observed; ``unheard``: one more, which ends ``messages``, was not.

    Raises ``NotTheSame``, and what the environment raises.
    """
    said = tuple(messages[:-1] if unheard else messages)
    if isinstance(env, Resumable):
        env.resume(said)
        return
    heard = tuple(env.opening())
    for turn in range(answered):
        if heard != said[: len(heard)] or len(heard) == len(said):
            raise NotTheSame(f"before turn {turn + 1} its messages are not those of the conversation")
        heard = (*heard, said[len(heard)])
        answer = env.observe(heard)
        heard = (*heard, *answer.messages)
        if answer.end is not None:
            raise NotTheSame(f"after turn {turn + 1} it ends with {answer.end}, where the conversation went on")
    if heard != said:
        raise NotTheSame("its messages are not those of the conversation")
