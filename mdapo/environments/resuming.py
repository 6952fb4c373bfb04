"""An environment made again is brought to where its conversation stands."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from mdapo.environments.base import Environment, Resumable
from mdapo.types import Message

Call = Callable[[Callable[[], Any]], Awaitable[Any]]


class NotTheSame(RuntimeError):
    """An environment made again says something else than it did; it is not a function of its seed and the messages."""


async def catch_up(env: Environment, messages: Sequence[Message], *, answered: int, unheard: bool, call: Call) -> None:
    """The policy's first ``answered`` turns were observed; ``unheard``: one more, which ends ``messages``, was not.

    ``call`` makes each call of the environment and waits for it (`Aside.call`). Raises ``NotTheSame``, and what
    ``call`` raises.
    """
    said = tuple(messages[:-1] if unheard else messages)
    if isinstance(env, Resumable):
        await call(lambda: env.resume(said))
        return
    heard = tuple(await call(env.opening))
    for turn in range(answered):
        if heard != said[: len(heard)] or len(heard) == len(said):
            raise NotTheSame(f"before turn {turn + 1} its messages are not those of the conversation")
        heard = (*heard, said[len(heard)])
        answer = await call(lambda heard=heard: env.observe(heard))
        heard = (*heard, *answer.messages)
        if answer.end is not None:
            raise NotTheSame(f"after turn {turn + 1} it ends with {answer.end}, where the conversation went on")
    if heard != said:
        raise NotTheSame("its messages are not those of the conversation")


def after_opening(messages: Sequence[Message], opening: Sequence[Message]) -> tuple[Message, ...]:
    """For ``resume``: what was said after ``opening``. Raises ``NotTheSame`` where ``messages`` begin otherwise."""
    if tuple(messages[: len(opening)]) != tuple(opening):
        raise NotTheSame("the conversation does not begin with the row's messages")
    return tuple(messages[len(opening) :])
