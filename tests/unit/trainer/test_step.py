"""The order of a step: servers on the actor's devices make room only for a training that brings them new weights."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from mdapo.trainer import step as steps
from mdapo.trainer.record import first_step_health


class Recording:
    """A trainer that only writes down what it is asked to do."""

    def __init__(self, *, mini_batches: int) -> None:
        self.done: list[str] = []
        self.count, self.trains, self.loss_fn = mini_batches, True, None
        self.config = SimpleNamespace(actor=SimpleNamespace(ppo_epochs=1))
        self.state = SimpleNamespace(step=0, version=4)
        self.actor = SimpleNamespace(update=lambda *_: self.note("update"))

    def note(self, what: str) -> str:
        self.done.append(what)
        return what

    def timers(self, name: str) -> Any:
        return nullcontext()

    def collect(self) -> None:
        self.note("collect")

    def scatter(self, samples: Any) -> list[list[Any]]:
        return [[]] * self.count

    def make_room(self) -> None:
        self.note("make room")

    def with_logps(self, mini_batches: Any) -> Any:
        self.note("score")
        return mini_batches

    def check_finite(self, *_: Any) -> None: ...

    def sync(self) -> None:
        self.note(f"sync {self.state.version}")


@pytest.fixture(autouse=True)
def no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "make_record", lambda *_: None)


def test_room_is_made_between_collecting_and_the_first_use_of_the_actor_and_ended_by_the_sync() -> None:
    trainer = Recording(mini_batches=2)
    steps.step(trainer)
    assert trainer.done == ["collect", "make room", "score", "update", "update", "sync 5"]


def test_a_step_that_trains_nothing_leaves_the_servers_as_they_are() -> None:
    trainer = Recording(mini_batches=0)
    steps.step(trainer)
    assert trainer.done == ["collect", "score"]


def test_an_engine_that_computes_differently_is_told_at_the_first_step() -> None:
    assert "WARNING" not in first_step_health({"actor/rollout_logp_gap": 0.05})
    told = first_step_health({"actor/rollout_logp_gap": 5.26, "actor/rollout_kl": 4.27})
    assert told.startswith("first step: log-prob gap 5.26, KL(engine, actor) 4.27\nWARNING: ") and "sync.check" in told
