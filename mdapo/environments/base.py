"""What an environment is: the other side of one conversation.

An environment is made for one episode and used once. It is deterministic under its seed, does no I/O unless it says so,
and knows text only: token ids never reach it.

An environment can be made again: its state is its seed and the messages so far. A conversation that is put off
(``rollout.mode`` partial or async, a run that resumes) goes on with a new environment of the same seed, which is
brought to where it stood (``resuming.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from mdapo.types import EndReason, Message, Prompt


@dataclass(frozen=True)
class Observation:
    """The answer to an assistant turn. ``end`` is None while the conversation goes on; when it is set, ``messages``
    are kept in the transcript but the policy is not asked again."""

    messages: tuple[Message, ...] = ()
    end: EndReason | None = None


class Environment(Protocol):
    """One conversation's counterpart; construct it as ``Environment(prompt, seed=..., **config args)``.

    Its calls come one after the other, but not in the process's main thread, and after a slow one (seconds) not always
    in the same thread. One that has not returned by ``rollout.episode_timeout_s`` is left behind; its episode is
    ``aborted``.

    It may have one method more, ``resume(messages)``. Without it, a conversation that goes on later asks a new
    environment for its opening and for each answer once more, and they must be what they were. One that is not so, or
    that acts on something outside itself (a model behind it, a data base), takes the messages in ``resume``, all that
    were said until the policy's next turn, and is asked for nothing twice.
    """

    def opening(self) -> tuple[Message, ...]:
        """All messages before the first assistant turn (system, first user message). It is called once, before any
        turn."""
        ...

    def observe(self, messages: Sequence[Message]) -> Observation:
        """``messages`` ends with the assistant turn just written. What the other side says to it."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """An `Environment` that takes a conversation so far instead of having it again."""

    def resume(self, messages: Sequence[Message]) -> None: ...


class EnvironmentFactory(Protocol):
    """``mdapo.plugins`` loads one of these from a name, ``pkg.mod:name`` or ``file.py:name``."""

    def __call__(self, prompt: Prompt, *, seed: int, **args: object) -> Environment: ...
