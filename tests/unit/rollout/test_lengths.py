"""Budgets follow the conversations' turns from step to step; what has begun keeps its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from mdapo.config.schema import Config
from mdapo.data.batching import make_samples
from mdapo.data.prompts import PromptStream
from mdapo.data.wire import dump_groups, load_groups
from mdapo.environments.base import Observation
from mdapo.rollout.dynamic_batch import Collected, DynamicBatch, Held
from mdapo.rollout.engine import Completion, Request
from mdapo.rollout.lengths import Lengths
from mdapo.types import Message, Prompt

from .fakes import STOP, IndexRewards, ScriptedEngine, ScriptedEnv, WordChat

MORE = Observation((Message("user", "50"),))


def config(*, rollout: dict[str, Any] | None = None, buffer: dict[str, Any] | None = None, **adaptive: Any) -> Config:
    lengths = {"enable": True, "decay": 0.0, "hysteresis": 0.0, **adaptive}
    return Config.model_validate(
        {
            "model": {"path": "x", "max_context": 200},
            "data": {"train_files": ["x"], "train_prompt_bsz": 2},
            "reward": {"overlong_buffer_cfg": buffer or {}},
            "rollout": {
                "n_resp_per_prompt": 2,
                "max_turns": 9,
                "max_response_len": 40,
                "max_turn_len": 10,
                "adaptive_lengths": lengths,
                **(rollout or {}),
            },
            "algorithm": {"advantage_estimator": "group_mean", "loss_agg_mode": "token-mean"},
        }
    )


class Talk:
    """A batch whose conversations have ``turns`` turns, as the test says."""

    def __init__(self, cfg: Config, engine: Any = None, *, turns: int = 1) -> None:
        self.turns, self.lines = turns, list[str]()
        self.engine = engine or ScriptedEngine(lambda _: ([20, STOP], "stop"))
        prompts = [Prompt(f"p{i}", i, (Message("user", f"{100 + i}"),)) for i in range(40)]
        self.batch = DynamicBatch(
            self.engine,
            WordChat(),
            lambda prompt, *, seed, **_: ScriptedEnv(prompt, [MORE] * (self.turns - 1)),
            IndexRewards(),
            PromptStream(prompts, seed=0, shuffle=False),
            cfg,
            notify=self.lines.append,
        )

    @property
    def lengths(self) -> Lengths:
        return self.batch.talks.lengths

    def step(self, version: int = 0, *, trained: bool = True) -> Collected:
        self.engine.requests.clear()
        found = asyncio.run(self.batch.collect(version))
        if trained:
            self.batch.trained(found)
        return found

    @property
    def turn_budget(self) -> int:
        """Of the first turns of the conversations of the newest step."""
        (found,) = {r.params.max_new_tokens for r in self.engine.requests if len(r.ids) == 2}
        return found


def through_json(held: Held) -> Held:
    state = json.loads(json.dumps(held.state))
    carried, unfinished = (load_groups(dump_groups(groups)) for groups in (held.carried, held.unfinished))
    return Held(state, tuple(carried), tuple(unfinished))


def test_conversations_begin_with_what_the_step_before_asked_for() -> None:
    talk = Talk(config(), turns=1)
    stats = talk.step().stats
    assert (talk.turn_budget, stats["lengths/scale"], stats["lengths/max_response_len"]) == (10, 1.0, 40)
    assert (stats["lengths/turns"], stats["lengths/response"]) == (1.0, 2.0)
    assert talk.lines[-1] == (
        "dialogues have 1.00 turns on average: lengths x 0.7, rollout.max_response_len 28 (was 40)"
    )
    talk.turns = 6
    collected = talk.step(1)
    assert (talk.turn_budget, collected.stats["lengths/max_response_len"]) == (7, 28)
    assert {group.length_scale for group in collected.groups} == {0.7}
    assert {episode.end for group in collected.groups for episode in group.episodes} == {"done"}
    collected = talk.step(2)
    assert (talk.turn_budget, collected.stats["lengths/scale"]) == (15, 1.5)
    assert {group.length_scale for group in collected.groups} == {1.5}
    asyncio.run(talk.batch.evaluate([group.prompt for group in collected.groups][:1]))
    assert talk.engine.requests[-6].params.max_new_tokens == 10  # evaluations have the base


def test_a_step_that_was_not_trained_counts_for_nothing() -> None:
    talk = Talk(config(), turns=1)
    before = talk.lengths.state()
    talk.step(trained=False)
    assert talk.lengths.state() == before and talk.lengths.scale == 1.0
    talk.step()
    assert talk.lengths.scale == 0.7


def test_off_nothing_is_measured_and_no_budget_moves() -> None:
    talk = Talk(config(enable=False), turns=1)
    for version in range(3):
        stats = talk.step(version).stats
        assert talk.turn_budget == 10 and not [name for name in stats if name.startswith("lengths/")]
    assert talk.lines == [] and talk.lengths.state() == Lengths(config()).state()


def test_a_restored_run_goes_on_with_the_same_lengths() -> None:
    talk, other = Talk(config(decay=0.9, hysteresis=0.5), turns=1), Talk(config(decay=0.9, hysteresis=0.5), turns=1)
    talk.step()
    talk.turns = 3
    talk.step(1)  # 2.05 turns on average: below the hysteresis
    other.batch.restore(through_json(asyncio.run(talk.batch.held())))
    assert other.lengths.state() == talk.lengths.state() and other.lengths.scale == talk.lengths.scale == 0.7
    talk.turns = other.turns = 4
    assert other.step(2).stats["lengths/turns"] == talk.step(2).stats["lengths/turns"]
    former = through_json(asyncio.run(talk.batch.held()))
    del former.state["lengths"]  # of a checkpoint before there were any
    Talk(config()).batch.restore(former)


class Half(ScriptedEngine):
    """Of the prompts after the second, the first call is never answered; an abort ends it."""

    def __init__(self) -> None:
        super().__init__(lambda _: ([20, STOP], "stop"))
        self.hold = True
        self.waiting: list[asyncio.Event] = []

    async def generate(self, request: Request) -> Completion:
        if self.hold and request.ids[0] > 101:
            self.requests.append(request)
            event = asyncio.Event()
            self.waiting.append(event)
            await event.wait()
            return Completion((), (), "abort", self.version)
        return await super().generate(request)

    async def abort(self, session: str | None = None) -> None:
        for event in self.waiting:
            event.set()
        self.waiting.clear()


@pytest.mark.parametrize("restored", [False, True])
def test_unfinished_conversations_keep_the_budgets_they_began_with(restored: bool) -> None:
    cfg = config(rollout={"mode": "partial", "over_sampling": 2.0, "max_staleness": 3})
    talk = Talk(cfg, Half(), turns=1)
    talk.step()
    assert talk.lengths.scale == 0.7
    if restored:
        again = Talk(cfg, Half(), turns=1)
        again.batch.restore(through_json(asyncio.run(talk.batch.held())))
        talk = again
    talk.engine.hold = False
    collected = talk.step(1)
    budgets = {r.ids[0] - 100: r.params.max_new_tokens for r in talk.engine.requests}
    assert budgets[2] == budgets[3] == 10 and set(budgets.values()) == {10, 7}
    assert {group.length_scale for group in collected.groups} == {1.0}


# The overlong buffer.


def test_an_auto_buffer_follows_the_dialogues_this_step_included() -> None:
    talk = Talk(config(enable=False, decay=0.5, buffer={"enable": True, "len": "auto"}), turns=2)
    assert talk.step().stats["lengths/overlong_buffer"] == talk.lengths.overlong_len == 6  # 1.5 x 2 turns of 2 tokens
    talk.turns = 4
    collected = talk.step(1)
    mean = (0.5 * 4 + 8) / 1.5
    assert collected.stats["lengths/overlong_buffer"] == talk.lengths.overlong_len == round(1.5 * mean)
    _, credit = make_samples(collected.groups, talk.batch.config, overlong_len=talk.lengths.overlong_len)
    assert credit["batch/overlong"] == 0
    assert "lengths/scale" not in collected.stats and talk.turn_budget == 10


def penalties(scale: float, tokens: int) -> Callable[[int | str, int | None], float]:
    """The mean penalty of a group whose conversations have so many tokens of the policy."""
    engine = ScriptedEngine(lambda r: ([20] * (tokens - 1) + [STOP], "stop"))

    def found(length: int | str, overlong_len: int | None) -> float:
        rollout = {"max_turn_len": None}
        cfg = config(rollout=rollout, buffer={"enable": True, "len": length})
        talk = Talk(cfg, engine)
        talk.lengths.regime = {0.7: "shorter", 1.0: "base", 1.5: "longer"}[scale]
        groups = talk.step().groups
        return make_samples(groups, cfg, overlong_len=overlong_len)[1]["batch/overlong_penalty_mean"]

    return found


def test_the_penalty_ends_at_the_budget_that_a_conversation_began_with() -> None:
    """28, 40 and 60 tokens; a buffer of 10."""
    assert penalties(0.7, 23)(10, None) == pytest.approx(-0.5)
    assert penalties(1.0, 23)(10, None) == 0.0
    assert penalties(1.0, 35)(10, None) == pytest.approx(-0.5)
    assert penalties(1.5, 35)(10, None) == 0.0
    assert penalties(1.5, 58)(10, None) == pytest.approx(-0.8)
    assert penalties(0.7, 7)(40, None) == pytest.approx(-0.25)  # a buffer is at most the budget
    assert penalties(1.0, 35)("auto", 20) == pytest.approx(-0.75)
