"""Filling the batch. Engine and rewards are scripts except in the last test: what is shown is the bookkeeping."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mdapo.config.schema import Config
from mdapo.data.prompts import PromptStream
from mdapo.data.wire import dump_groups, load_groups
from mdapo.environments.base import Observation
from mdapo.errors import NothingLearnableError, UserError
from mdapo.rollout.dynamic_batch import Collected, DynamicBatch, Held
from mdapo.rollout.engine import Completion, EngineError, Request
from mdapo.rollout.local_engine import LocalEngine
from mdapo.types import Episode, Message, Prompt, Score

from .fakes import STOP, ScriptedEngine, ScriptedEnv, WordChat

Outcomes = Callable[[str, int], float]  # (uid, episode index) -> outcome


class TableRewards:
    def __init__(self, outcome: Outcomes) -> None:
        self.outcome, self.scored = outcome, 0

    async def score(self, episode: Episode) -> Score:
        self.scored += 1
        if episode.end == "error":
            return Score(0.0, 0.0, valid=False)
        value = self.outcome(episode.prompt.uid, episode.index)
        return Score(value, value)

    def check_step(self, *, at_least: int = 0) -> None:
        pass

    def end_step(self) -> Counter[str]:
        return Counter()


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", i, (Message("user", f"{100 + i}"),)) for i in range(count)]


def config(**keys: Any) -> Config:
    """``config(train_prompt_bsz=4, n=2, filter={...})``."""
    data = {"train_files": ["x"], "train_prompt_bsz": keys.get("bsz", 4), "gen_batch_size": keys.get("wave")}
    rollout = {"n_resp_per_prompt": keys.get("n", 2), "max_turns": 3, "max_response_len": 30, **keys.get("rollout", {})}
    return Config.model_validate(
        {
            "model": {"path": "x", "max_context": 200},
            "data": data,
            "rollout": rollout,
            "algorithm": {"filter_groups": keys.get("filter", {})},
        }
    )


def make(
    outcome: Outcomes, *, count: int = 100, epochs: int | None = None, engine: Any = None, **keys: Any
) -> DynamicBatch:
    lines: list[str] = []
    batch = DynamicBatch(
        engine or ScriptedEngine(lambda _: ([20, STOP], "stop")),
        WordChat(),
        lambda prompt, *, seed, **_: ScriptedEnv(prompt, []),
        TableRewards(outcome),
        PromptStream(prompts(count), seed=0, shuffle=False, epochs=epochs),
        config(**keys),
        notify=lines.append,
    )
    batch.lines = lines  # type: ignore[attr-defined]
    return batch


def collect(batch: DynamicBatch, version: int = 0) -> Collected:
    return asyncio.run(batch.collect(version))


def uids(collected: Collected) -> list[str]:
    return [g.prompt.uid for g in collected.groups]


def good(_: str, index: int) -> float:
    return float(index % 2)


def good_unless(*bad: str) -> Outcomes:
    return lambda uid, index: 1.0 if uid in bad else good(uid, index)


def test_uniform_groups_end_after_the_round_limit_without_an_exception() -> None:
    """Case 1."""
    batch = make(lambda uid, _: float(int(uid[1:]) % 2), filter={"max_num_gen_batches": 10})
    collected = collect(batch)
    assert (collected.groups, collected.limit_reached, collected.exhausted) == ((), True, False)
    stats = collected.stats
    assert (stats["rollout/rounds"], stats["rollout/groups_generated"], stats["rollout/groups_dropped"]) == (10, 40, 40)
    assert stats["rollout/uniform_share"] == 1.0
    assert (stats["rollout/dropped/no_spread_all_solved"], stats["rollout/dropped/no_spread_none_solved"]) == (20, 20)
    assert [line.split(":")[0] for line in batch.lines] == [*(f"round {i}" for i in range(1, 11)), "warning"]  # type: ignore[attr-defined]


def test_at_the_limit_the_stated_policy_decides_over_what_is_there() -> None:
    """Case 1: one good group in 100, four wanted."""
    only_p1 = lambda uid, index: good(uid, index) if uid == "p1" else 0.0  # noqa: E731
    limit = {"max_num_gen_batches": 3}
    partial = collect(make(only_p1, filter={**limit, "on_limit": "train_partial"}))
    assert (uids(partial), partial.limit_reached) == (["p1"], True)

    batch = make(only_p1, filter={**limit, "on_limit": "skip"})
    skipped = collect(batch)
    assert (skipped.groups, skipped.limit_reached, skipped.stats["rollout/groups_carried"]) == ((), True, 1)
    assert [g.prompt.uid for g in batch.carried] == ["p1"]  # in hand for the next step

    batch = make(only_p1, filter={**limit, "on_limit": "stop"})
    with pytest.raises(NothingLearnableError, match=r"1 of 4 groups after 3 rounds .* none solved 9"):
        collect(batch)
    assert [g.prompt.uid for g in batch.carried] == ["p1"]  # for the checkpoint


def test_when_prompts_run_out_what_is_there_is_returned() -> None:
    """Case 3: the first is accepted, the second rejected, the third still pending and good when the data ends."""
    slow_third = ScriptedEngine(
        lambda _: ([20, STOP], "stop"), delay=lambda request: 50 if "p2" in request.session else 0
    )
    batch = make(good_unless("p1"), count=3, epochs=1, engine=slow_third)
    collected = collect(batch)
    assert (uids(collected), collected.exhausted, collected.limit_reached) == (["p0", "p2"], True, False)
    batch.trained(collected)
    assert batch.stream.state()["again"] == []
    after = collect(batch)
    assert (after.groups, after.exhausted) == ((), True)


@pytest.mark.parametrize(
    ("outcomes", "reason"),
    [
        ([0.5, 0.5, 0.5, 0.5], "no_spread"),  # case 4
        ([0.1, 0.1, 0.1], "no_spread"),  # case 5a: their standard deviation is 1.4e-17, not 0
    ],
)
def test_a_group_without_spread_is_rejected(outcomes: Sequence[float], reason: str) -> None:
    """Cases 4 and 5a."""
    batch = make(lambda _, index: outcomes[index], n=len(outcomes), filter={"max_num_gen_batches": 1})
    collected = collect(batch)
    assert (collected.groups, collected.stats[f"rollout/dropped/{reason}"]) == ((), 4)


def test_a_group_with_one_loser_is_kept_whole() -> None:
    """Case 5b: one 0.0 and seven 0.95."""
    collected = collect(make(lambda _, index: 0.95 if index else 0.0, n=8))
    assert [len(g.episodes) for g in collected.groups] == [8] * 4


def test_one_missing_group_asks_for_one_prompt_and_not_for_a_wave() -> None:
    """Case 6."""
    engine = ScriptedEngine(lambda _: ([20, STOP], "stop"))
    collected = collect(make(good_unless("p3"), bsz=32, engine=engine))
    assert len(collected.groups) == 32
    assert (collected.stats["rollout/rounds"], len(engine.requests)) == (2, 33 * 2)
    oversampled = collect(make(good_unless(*(f"p{i}" for i in range(33))), bsz=32, wave=64))
    assert oversampled.stats["rollout/groups_generated"] == 64 + 2  # one missing, at the configured ratio of two


def test_a_dialogue_of_several_turns_has_one_reward() -> None:
    """Case 7: episodes of two turns each; rewards and filter see one number an episode."""
    batch = make(good)
    batch.talks.environment = lambda prompt, *, seed, **_: ScriptedEnv(prompt, [Observation((Message("user", "30"),))])
    collected = collect(batch)
    episodes = [e for g in collected.groups for e in g.episodes]
    assert [e.num_agent_turns for e in episodes] == [2] * 8
    assert batch.talks.rewards.scored == 8  # type: ignore[attr-defined]
    assert len(collected.groups) == 4


def test_surplus_is_carried_and_opens_the_next_step() -> None:
    batch = make(good, bsz=4, wave=6)
    first = collect(batch, version=0)
    batch.trained(first)
    assert (uids(first), first.stats["rollout/groups_carried"]) == (["p0", "p1", "p2", "p3"], 2)
    second = collect(batch, version=1)
    assert uids(second) == ["p4", "p5", "p6", "p7"]
    assert [g.version for g in second.groups] == [0, 0, 1, 1]
    assert second.stats["rollout/staleness"] == 0.5
    assert (second.stats["rollout/groups_carried_in"], second.stats["rollout/groups_generated"]) == (2, 3)


def test_carried_groups_that_are_too_old_are_dropped_and_their_prompts_come_again() -> None:
    batch = make(good, bsz=4, wave=6)
    batch.trained(collect(batch, version=0))
    later = collect(batch, version=2)
    assert (uids(later), later.stats["rollout/dropped/stale"]) == (["p4", "p5", "p6", "p7"], 2)
    assert {g.version for g in later.groups} == {2}


def test_without_carry_over_surplus_is_counted_and_comes_again() -> None:
    batch = make(good, bsz=4, wave=6, filter={"carry_over": False})
    first = collect(batch)
    batch.trained(first)
    assert (first.stats["rollout/dropped/surplus"], batch.carried) == (2, ())
    assert uids(collect(batch, version=1))[:2] == ["p4", "p5"]


def test_books_add_up_and_every_prompt_is_trained_or_rejected_once_an_epoch() -> None:
    """Over many steps with rejections, surplus and stale groups, one epoch of 97 prompts."""
    outcome = lambda uid, index: good(uid, index) if int(uid[1:]) % 3 else 0.0  # noqa: E731
    batch = make(outcome, count=97, epochs=1, bsz=5, wave=9, filter={"max_num_gen_batches": 2})
    trained: list[str] = []
    totals: Counter[str] = Counter()
    step, exhausted = 0, False
    while not exhausted:
        collected = collect(batch, version=step + step // 4)  # now and then two versions at once: stale
        batch.trained(collected)
        trained += uids(collected)
        totals.update({k: int(v) for k, v in collected.stats.items() if k.startswith("rollout/groups_")})
        step, exhausted = step + 1, collected.exhausted
    assert sorted(trained) == sorted(f"p{i}" for i in range(97) if i % 3)
    assert totals["rollout/groups_generated"] == totals["rollout/groups_trained"] + totals["rollout/groups_dropped"]


def test_the_order_of_completion_does_not_change_the_batch() -> None:
    def run(delay: Callable[[Request], int]) -> bytes:
        engine = ScriptedEngine(lambda request: ([20 + request.seed % 7, STOP], "stop"), delay=delay)
        return dump_groups(collect(make(good_unless("p1"), engine=engine)).groups)

    assert run(lambda _: 0) == run(lambda request: request.seed % 13)


def test_an_engine_failure_gives_a_prompt_a_second_chance_and_no_third() -> None:
    def engine_that_fails_for(uid: str, times: int) -> ScriptedEngine:
        left = [times]

        def reply(request: Request) -> Any:
            if uid in request.session and left[0]:
                left[0] -= 1
                return EngineError("dead")
            return [20, STOP], "stop"

        return ScriptedEngine(reply)

    once = collect(make(good, engine=engine_that_fails_for("p1", 2)))
    assert (uids(once), once.stats["rollout/dropped/invalid"]) == (["p0", "p2", "p3", "p1"], 1)
    for_ever = collect(make(good, engine=engine_that_fails_for("p1", 999)))
    assert (uids(for_ever), for_ever.stats["rollout/dropped/invalid"]) == (["p0", "p2", "p3", "p4"], 2)
    assert for_ever.stats["rollout/errors"] == 4


def test_a_member_without_score_has_no_say() -> None:
    """One of three episodes could not be scored; the other two differ: the group is kept with all three."""

    def reply(request: Request) -> Any:
        return EngineError("dead") if request.session.endswith("/2") else ([20, STOP], "stop")

    collected = collect(make(good, n=3, engine=ScriptedEngine(reply)))
    assert [[e.score.valid for e in g.episodes if e.score] for g in collected.groups] == [[True, True, False]] * 4


def test_too_many_failed_rewards_raise_and_lose_nothing() -> None:
    batch = make(good)

    def end_step() -> Counter[str]:
        raise UserError("too many failed")

    batch.talks.rewards.end_step = end_step  # type: ignore[method-assign]
    with pytest.raises(UserError, match="too many failed"):
        collect(batch)
    assert len(batch.carried) == 4


def test_a_reward_that_always_fails_ends_the_step_after_its_first_full_round() -> None:
    batch = make(lambda *_: 0.0)
    asked: list[int] = []

    def check_step(*, at_least: int = 0) -> None:
        asked.append(at_least)
        raise UserError("too many failed")

    batch.talks.rewards.check_step = check_step  # type: ignore[method-assign]
    with pytest.raises(UserError, match="too many failed"):
        collect(batch)
    assert asked == [4 * 2] and len(batch.lines) == 1  # type: ignore[attr-defined]


def test_a_cancelled_collection_aborts_the_engine_and_loses_no_prompt() -> None:
    """Cases 24 and 25: groups kept in the first round are carried, those in flight come again, the engine is told."""

    class HangsInRoundTwo(ScriptedEngine):
        async def generate(self, request: Request) -> Completion:
            self.hang = "p4" in request.session
            return await super().generate(request)

    engine = HangsInRoundTwo(lambda _: ([20, STOP], "stop"))
    batch = make(good_unless("p1"), engine=engine)

    async def interrupted() -> None:
        collecting = asyncio.create_task(batch.collect(0))
        while sum("p4" in request.session for request in engine.requests) < 2:
            await asyncio.sleep(0.001)
        collecting.cancel()
        await collecting

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    assert {session for session in engine.aborted if session} == {"4/p4/0", "4/p4/1"}
    assert [g.prompt.uid for g in batch.carried] == ["p0", "p2", "p3"]
    batch.talks.engine = ScriptedEngine(lambda _: ([20, STOP], "stop"))
    assert uids(collect(batch)) == ["p0", "p2", "p3", "p4"]


def test_a_restored_batch_goes_on_as_if_it_had_never_stopped() -> None:
    def step(batch: DynamicBatch, version: int) -> bytes:
        collected = collect(batch, version)
        batch.trained(collected)
        return dump_groups(collected.groups)

    def fresh() -> DynamicBatch:
        engine = ScriptedEngine(lambda request: ([20 + request.seed % 50, STOP], "stop"))
        return make(good_unless("p1", "p8"), bsz=4, wave=7, engine=engine)

    whole = fresh()
    want = [step(whole, v) for v in range(6)]
    first = fresh()
    got = [step(first, v) for v in range(3)]
    held = asyncio.run(first.held())
    state, carried = json.loads(json.dumps(held.state)), dump_groups(held.carried)
    second = fresh()
    second.restore(Held(state, tuple(load_groups(carried))))
    got += [step(second, v) for v in range(3, 6)]
    assert got == want


def test_evaluation_samples_as_asked_and_leaves_the_stream_alone() -> None:
    engine = ScriptedEngine(lambda _: ([20, STOP], "stop"))
    batch = make(good, engine=engine, rollout={"val": {"n": 3, "temperature": 0.0, "top_p": 0.7}})
    episodes = asyncio.run(batch.evaluate(prompts(2)))
    assert [(e.prompt.uid, e.index) for e in episodes] == [(f"p{p}", i) for p in range(2) for i in range(3)]
    assert all(e.score is not None for e in episodes)
    assert {(r.params.temperature, r.params.top_p) for r in engine.requests} == {(0.0, 0.7)}
    assert batch.stream.state()["next"] == 0


def test_groups_meet_one_environment_and_sample_with_seeds_of_their_own() -> None:
    seeds: list[int] = []
    engine = ScriptedEngine(lambda _: ([20, STOP], "stop"))
    batch = make(good, engine=engine, n=3)

    def environment(prompt: Prompt, *, seed: int, **_: object) -> ScriptedEnv:
        seeds.append(seed)
        return ScriptedEnv(prompt, [])

    batch.talks.environment = environment
    collect(batch)
    assert Counter(Counter(seeds).values()) == {3: 4}
    assert len({r.seed for r in engine.requests}) == 12


def test_a_tiny_random_model_fills_a_batch_and_the_same_seed_fills_it_again(tiny_model: Path) -> None:
    """The real engine: three-turn dialogues, scored by the parity of their tokens, twice, bit for bit."""

    class Parity(TableRewards):
        async def score(self, episode: Episode) -> Score:
            value = float(sum(episode.ids[episode.response_mask]) % 2)
            return Score(value, value)

    def run(**rollout: Any) -> tuple[Collected, bytes]:
        engine = LocalEngine(tiny_model, dtype="float32", max_running=6, max_context=200, threads=1)
        keys: Mapping[str, Any] = {"max_turn_len": 6, "max_response_len": 40, **rollout}
        batch = make(good, n=4, engine=engine, rollout=keys)
        batch.talks.rewards = Parity(good)
        said = Observation((Message("user", "30 31"),))
        batch.talks.environment = lambda prompt, *, seed, **_: ScriptedEnv(prompt, [said, said])
        collected = collect(batch)
        return collected, dump_groups(collected.groups)

    collected, first = run()
    assert len(collected.groups) == 4
    assert collected.stats["rollout/turns_mean"] == 3
    for group in collected.groups:
        assert {e.score.outcome for e in group.episodes if e.score} == {0.0, 1.0}
        assert len({e.ids.tobytes() for e in group.episodes}) > 1
        assert all(replace(e, score=None).num_model_tokens > 3 for e in group.episodes)
    assert run()[1] == first


@pytest.mark.parametrize("dead", [True, False])
def test_a_step_in_which_every_conversation_fails_ends_the_run_with_the_first_reasons(dead: bool) -> None:
    engine = ScriptedEngine(
        lambda r: (
            EngineError("logits are not finite") if dead or not r.session.startswith("3/") else ([20, STOP], "stop")
        )
    )
    batch = make(good, bsz=2, engine=engine, filter={"max_num_gen_batches": 5})
    if not dead:
        assert collect(batch).groups
        return
    with pytest.raises(UserError) as caught:
        collect(batch)
    assert caught.value.problems == [
        "all 8 conversations of this step failed:",
        "  0/p0/0: logits are not finite",
        "  0/p0/1: logits are not finite",
        "  1/p1/0: logits are not finite",
        "  ... and 5 more",
    ]
    assert asyncio.run(batch.evaluate(prompts(1)))[0].end == "error"
    assert batch.told() == ["val/p0/0: logits are not finite"]
