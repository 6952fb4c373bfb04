"""The environment and the reward of the tests' runs, as a user's plug-in file; and sabotage, where a test asks for it.

The trainer imports this file on rank 0 only, before it makes its loss. ``SABOTAGE`` in the environment says what goes
wrong there, ``what`` or ``what:number``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mdapo.environments.base import Observation
from mdapo.types import EndReason, Message, Prompt


class Echo:
    """Answers once with how long the reply was. ``pause_s`` slows each turn, ``marker`` is a file it makes then."""

    def __init__(self, prompt: Prompt, *, seed: int, pause_s: float = 0.0, marker: str | None = None) -> None:
        self.prompt, self.pause_s, self.marker = prompt, pause_s, marker

    def opening(self) -> tuple[Message, ...]:
        return self.prompt.messages

    def observe(self, messages: Sequence[Message]) -> Observation:
        if self.marker is not None:
            Path(self.marker).touch()
        time.sleep(self.pause_s)
        return Observation((Message("user", f"Only {len(messages[-1].content)}?"),))


def vowels(messages: Sequence[Message], prompt: Prompt, end: EndReason, *, constant: bool = False) -> dict[str, float]:
    """The share of vowels in what the policy wrote, so that two replies differ; the same for all if ``constant``."""
    said = "".join(m.content for m in messages if m.role == "assistant").lower()
    share = 0.5 if constant else sum(c in "aeiou" for c in said) / (len(said) + 1)
    return {"score": share, "acc": share}


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(number: int, act: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    """``then``, with ``act`` before its ``number``-th call."""
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            act(*args, **kwargs)
        return then(*args, **kwargs)

    return counted


def sabotage(what: str, number: int) -> None:
    from mdapo.trainer import flow, state

    if what == "die-before-commit":  # all files written, the commit not yet there
        state.close_commit = at_call(number, die, state.close_commit)
    elif what == "die-in-sync":
        flow.sync_weights = at_call(number, die, flow.sync_weights)
    elif what == "nan-loss":  # on this rank alone, in the first so many micro-batches
        make_loss_fn = flow.make_loss_fn
        flow.make_loss_fn = lambda config: poisoned(make_loss_fn(config), number)
    else:
        raise AssertionError(what)


def poisoned(loss_fn: Callable[..., Any], times: int) -> Callable[..., Any]:
    calls = 0

    def with_nan(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        loss, metrics = loss_fn(*args)
        return (loss * float("nan") if calls <= times else loss), metrics

    return with_nan


if "SABOTAGE" in os.environ and "mdapo.trainer.flow" in sys.modules:  # not in the reward processes
    _what, _, _number = os.environ["SABOTAGE"].partition(":")
    sabotage(_what, int(_number or 1))
