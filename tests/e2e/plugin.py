"""The environment and the reward of the tests' runs, as a user's plug-in file; and sabotage, where a test asks for it.

The trainer imports this file on rank 0 only, before it makes its loss. ``SABOTAGE`` in the environment says what goes
wrong there, ``what`` or ``what:number``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mdapo.environments.base import Observation
from mdapo.types import EndReason, Message, Prompt


class Echo:
    """Answers once with how long the reply was. While the file that ``SLOW`` names is there, turns take a while."""

    def __init__(self, prompt: Prompt, *, seed: int) -> None:
        self.prompt = prompt

    def opening(self) -> tuple[Message, ...]:
        return self.prompt.messages

    def observe(self, messages: Sequence[Message]) -> Observation:
        if "SLOW" in os.environ and Path(os.environ["SLOW"]).exists():
            Path(os.environ["SLOW"] + ".noticed").touch()
            time.sleep(0.5)
        return Observation((Message("user", f"Only {len(messages[-1].content)}?"),))


class Hangs(Echo):
    """Sleeps for ever in ``opening`` or ``observe`` once it has made the file that ``SLOW`` names."""

    def __init__(self, prompt: Prompt, *, seed: int, where: str) -> None:
        super().__init__(prompt, seed=seed)
        self.where = where

    def hang(self, here: str) -> None:
        if here == self.where:
            Path(os.environ["SLOW"]).touch()
            time.sleep(1e6)

    def opening(self) -> tuple[Message, ...]:
        self.hang("opening")
        return super().opening()

    def observe(self, messages: Sequence[Message]) -> Observation:
        self.hang("observe")
        return super().observe(messages)


def vowels(
    messages: Sequence[Message], prompt: Prompt, end: EndReason, *, same_for: Sequence[str] = ()
) -> dict[str, float]:
    """The share of vowels in what the policy wrote; one for all replies to a question with a word of ``same_for``."""
    said = "".join(m.content for m in messages if m.role == "assistant").lower()
    same = any(word in prompt.messages[0].content for word in same_for)
    share = 0.5 if same else sum(c in "aeiou" for c in said) / (len(said) + 1)
    return {"score": share, "acc": share}


def end(signum: int) -> Callable[..., None]:
    return lambda *_, **__: os.kill(os.getpid(), signum)


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


def poisoned(loss_fn: Callable[..., Any], times: int) -> Callable[..., Any]:
    """``loss_fn``, whose first ``times`` losses are not finite."""
    calls = 0

    def with_nan(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        loss, metrics = loss_fn(*args)
        return (loss * float("nan") if calls <= times else loss), metrics

    return with_nan


def then_infinite(update: Callable[..., Any], number: int) -> Callable[..., Any]:
    """``update``, after whose ``number``-th call one weight is infinite."""
    calls = 0

    def updated(actor: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        stats = update(actor, *args)
        if calls == number:
            next(actor.chunks[0].parameters()).data.view(-1)[0] = float("inf")
        return stats

    return updated


def with_noise(update_weights: Callable[..., Any], number: int) -> Callable[..., Any]:
    """``update_weights``, whose ``number``-th call gets a tenth more of every weight."""
    calls = 0

    async def updated(engine: Any, weights: Any, version: int) -> None:
        nonlocal calls
        calls += 1
        more = 1.1 if calls == number else 1.0
        await update_weights(engine, ((name, tensor * more) for name, tensor in weights), version)

    return updated


def sabotage(what: str, number: int) -> None:
    from mdapo.megatron.actor import Actor
    from mdapo.rollout.dynamic_batch import DynamicBatch
    from mdapo.rollout.local_engine import LocalEngine
    from mdapo.trainer import flow, state

    if what == "killed-before-commit":  # all files are written, the commit is not there yet
        state.close_commit = at_call(number, end(signal.SIGKILL), state.close_commit)
    elif what == "terminated-in-sync":
        flow.sync_weights = at_call(number, end(signal.SIGTERM), flow.sync_weights)
    elif what == "terminated-in-evaluation":
        DynamicBatch.evaluate = at_call(number, end(signal.SIGTERM), DynamicBatch.evaluate)
    elif what == "other-weights":  # a sync brings the engine others than the actor's
        LocalEngine.update_weights = with_noise(LocalEngine.update_weights, number)
    elif what == "nan-loss":  # on this rank alone
        make_loss_fn = flow.make_loss_fn
        flow.make_loss_fn = lambda config: poisoned(make_loss_fn(config), number)
    elif what == "inf-weight":  # on this rank alone
        Actor.update = then_infinite(Actor.update, number)
    else:
        raise AssertionError(what)


def local_for_servers() -> None:
    """A mock of servers, for ``rollout.mode: async``, whose rule asks for them: the local engine answers in their
    place, in the event loop's thread. With real servers: tests/sglang/test_trainer_real.py."""
    from mdapo.megatron.actor import Actor
    from mdapo.rollout.local_engine import LocalEngine
    from mdapo.trainer import rollout
    from mdapo.trainer.engines import OpenEngine

    export = Actor.export

    def exported(actor: Any) -> Any:
        for item in export(actor):
            assert threading.current_thread() is threading.main_thread(), "it has the device and the collectives"
            yield item

    async def open_engine(config: Any, **_: Any) -> OpenEngine:
        path, model = config.model.path, config.model
        return OpenEngine(
            LocalEngine(path, dtype=model.dtype, max_running=16, max_context=model.max_context, threads=1)
        )

    Actor.export, rollout.open_engine = exported, open_engine


if "LOCAL_FOR_SERVERS" in os.environ and "mdapo.trainer.flow" in sys.modules:
    local_for_servers()
if "SABOTAGE" in os.environ and "mdapo.trainer.flow" in sys.modules:  # not in the reward processes
    _what, _, _number = os.environ["SABOTAGE"].partition(":")
    sabotage(_what, int(_number))
