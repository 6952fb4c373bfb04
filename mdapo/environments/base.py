"""What an environment is: the other side of one conversation.

An environment is made for one episode and used once. It is deterministic under its seed, does no I/O unless it says so,
and knows text only: token ids never reach it.

An environment can be made again: its state is its seed and the messages so far. A conversation that is put off
(``rollout.mode`` partial or async, a run that resumes) goes on with a new environment of the same seed, which is
brought to where it stood (``resuming.py``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from mdapo.types import EndReason, Message, Prompt


@dataclass(frozen=True)
class Observation:
    """The answer to an assistant turn. ``end`` is None while the conversation goes on; when it is set, ``messages``
    are kept in the transcript but the policy is not asked again."""

    messages: tuple[Message, ...] = ()
    end: EndReason | None = None


Tools = tuple[Mapping[str, Any], ...]
"""Functions that the policy may call, as chat templates take them: ``{"type": "function", "function": {"name": ...,
"description": ..., "parameters": <JSON schema>}}``."""


class Environment(Protocol):
    """One conversation's counterpart; construct it as ``Environment(prompt, seed=..., **config args)``.

    Its calls come one after the other, but not in the process's main thread, and after a slow one (seconds) not always
    in the same thread; those of different dialogues may run at the same time. One that has not returned after
    ``environment.timeout_s`` is left behind; its episode ends with ``error``.

    A class that asks a network or other processes says ``waits = True``, or has ``async def observe`` (which runs in an
    event loop of the environments' own; a call given up is cancelled there): see ``mdapo/environments/aside.py``.

    An environment with functions that the policy may call has an attribute ``tools`` (`Tools`), which the chat template
    shows to the policy; read once, after ``opening()``. A conversation that goes on later keeps the tokens in which it
    was shown them.

    It may have one method more, ``resume(messages)`` (`Resumable`). Without it, a conversation that goes on later asks
    a new environment for its opening and for each answer once more, and they must be what they were. One that is not
    so, or that acts on something outside itself (a model behind it, a data base), takes the messages in ``resume``, all
    that were said until the policy's next turn, and is asked for no answer twice that has been heard. An answer that
    was not there yet when the conversation was put off is asked for again, and the first call may still be running
    then.
    """

    def opening(self) -> tuple[Message, ...]:
        """All messages before the first assistant turn (system, first user message). It is called once, before any
        turn; and at the start of a run, for each row, to learn how long it is."""
        ...

    def observe(self, messages: Sequence[Message]) -> Observation | Awaitable[Observation]:
        """``messages`` ends with the assistant turn just written. What the other side says to it."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """An `Environment` that takes a conversation so far instead of having it again."""

    def resume(self, messages: Sequence[Message]) -> Awaitable[None] | None: ...


class EnvironmentFactory(Protocol):
    """Makes one episode's environment; the configured arguments are bound.

    ``mdapo.plugins`` loads what takes them, ``(prompt, *, seed, **config args)``, from a name, ``pkg.mod:name`` or
    ``file.py:name``.

    A class whose environments share something (a key, processes), or whose arguments are worth a check before anything
    runs, has ``@classmethod for_run(cls, **config args)``: called once a run, it returns what makes the environments,
    ``(prompt, *, seed)``, with ``close()`` if something is to be closed, and raises ``ValueError`` for wrong arguments.
    """

    def __call__(self, prompt: Prompt, *, seed: int) -> Environment: ...
