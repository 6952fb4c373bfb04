"""Batches whose groups outlive a step, over many steps: books, ages, restarts. What plans is the real code; engine and
clock are simulated, lengths have a long tail."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import SimulatedEngine, simulated

from mdapo.config.schema import Config
from mdapo.data.prompts import PromptStream
from mdapo.data.wire import dump_groups, load_groups
from mdapo.environments.aside import Aside
from mdapo.environments.base import Observation
from mdapo.rollout.ahead import AheadBatch
from mdapo.rollout.dynamic_batch import Collected, DynamicBatch, Held
from mdapo.rollout.engine import Request
from mdapo.rollout.event_loop import EventLoop
from mdapo.rollout.partial import Pacing
from mdapo.rollout.seeds import seed_of, uniform
from mdapo.types import Episode, Message, Score

from .fakes import STOP, ScriptedEngine, ScriptedEnv, WordChat
from .test_dynamic_batch import TableRewards, prompts

MODES = ("partial", "async")
LIMIT = 120
SAID = Observation((Message("user", "30 31"),))


class Slowly(TableRewards):
    """Scores after a while; every fourth prompt teaches nothing."""

    async def score(self, episode: Episode) -> Score:
        await asyncio.sleep(seed_of("score", episode.prompt.uid, episode.index) % 6)  # whole seconds: no rounding
        return await super().score(episode)


def outcome(uid: str, index: int) -> float:
    return 0.0 if int(uid[1:]) % 4 == 3 else float(index % 2)


def words(request: Request) -> list[int]:
    """What follows from the dialogue's name and the place: the same whenever it goes on."""
    tail = uniform(seed_of("length", request.session), len(request.ids) // 40)
    end, ids = int(3 + 6 / (1.001 - tail) ** 0.8), list(request.ids)
    while len(ids) < len(request.ids) + 1 or (ids[-1] != STOP and len(ids) < LIMIT + 60):
        ids.append(STOP if len(ids) % (end + 5) == end else 40 + len(ids) % 50)
    return ids[len(request.ids) :]


def build(mode: str, *, count: int = 10_000, epochs: int | None = None, **keys: Any) -> tuple[Any, SimulatedEngine]:
    config = Config.model_validate(
        {
            "model": {"path": "x", "max_context": 200},
            "data": {"train_files": ["x"], "train_prompt_bsz": 4, "gen_batch_size": keys.pop("wave", 6)},
            "rollout": {"mode": mode, "n_resp_per_prompt": 3, "max_turns": 2, "max_response_len": LIMIT, **keys},
        }
    )
    engine = SimulatedEngine(words, slots=9, token_s=1.0)
    batch = (AheadBatch if mode == "async" else DynamicBatch)(
        engine, WordChat(), lambda prompt, *, seed, **_: ScriptedEnv(prompt, [SAID]), Slowly(outcome),
        PromptStream(prompts(count), seed=0, shuffle=False, epochs=epochs), config, calls=Aside(pace="inline"),
    )  # fmt: skip
    return batch, engine


def carried_over(held: Held) -> Held:
    """As a checkpoint has it."""
    carried, unfinished = (tuple(load_groups(dump_groups(groups))) for groups in (held.carried, held.unfinished))
    return Held(json.loads(json.dumps(held.state)), carried, unfinished)


async def steps(
    batch: Any, engine: SimulatedEngine, versions: range, *, train_s: float = 30.0
) -> tuple[list[Collected], Held]:
    engine.version = versions.start
    found = []
    for version in versions:
        collected = await batch.collect(version)
        await asyncio.sleep(train_s)
        await batch.pause()
        await engine.update_weights((), version + 1)
        await batch.resume()
        batch.trained(collected)
        found.append(collected)
        if collected.exhausted:
            break
    held = await batch.held()
    await batch.close()
    return found, carried_over(held)


def check(found: list[Collected], *, max_staleness: int, first: int = 0) -> None:
    seen: set[str] = set()
    for version, collected in enumerate(found, start=first):
        stats, groups = collected.stats, collected.groups
        uids = [group.prompt.uid for group in groups]
        assert len(set(uids)) == len(uids) and not seen & set(uids), "a group trained twice"
        seen |= set(uids)
        generated, dropped = stats["rollout/groups_generated"], stats["rollout/groups_dropped"]
        carried, carried_in = stats["rollout/groups_carried"], stats["rollout/groups_carried_in"]
        assert generated + carried_in == len(groups) + carried + dropped
        begun, given_up = stats["rollout/groups_begun"], stats["rollout/groups_given_up"]
        assert (
            begun + stats["rollout/groups_unfinished_in"] == generated + stats["rollout/groups_unfinished"] + given_up
        )
        for group in groups:
            assert 0 <= version - group.version <= max_staleness, "past its staleness"
            for episode in group.episodes:
                ids, mask = episode.ids, episode.response_mask
                assert len(mask) == len(ids) and len(ids) - len(episode.prompt_ids) <= LIMIT
                versions = episode.versions[mask]
                assert (episode.rollout_logps[mask] == -1.0 - versions).all(), "a token without its version"
                assert group.version <= versions.min() and versions.max() <= version
    for earlier, later in pairwise(found):
        assert later.stats["rollout/groups_carried_in"] == earlier.stats["rollout/groups_carried"]
        assert later.stats["rollout/groups_unfinished_in"] == earlier.stats["rollout/groups_unfinished"]


@settings(max_examples=20, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    max_staleness=st.integers(1, 3),
    over_sampling=st.sampled_from([1.0, 1.4, 2.0]),
    wave=st.sampled_from([2, 4, 6, 8]),
    train_s=st.floats(0, 200),
)
def test_books_add_up_no_group_is_trained_twice_and_none_past_its_staleness(
    mode: str, max_staleness: int, over_sampling: float, wave: int, train_s: float
) -> None:
    batch, engine = build(mode, max_staleness=max_staleness, over_sampling=over_sampling, wave=wave)
    found, _ = simulated(steps(batch, engine, range(8), train_s=train_s))
    assert [len(c.groups) for c in found] == [4] * 8
    check(found, max_staleness=max_staleness)
    if mode == "async" or over_sampling == 2.0:  # so that there is something to show
        assert sum(c.stats["rollout/groups_unfinished"] for c in found) > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", [1, 2, 5])
def test_a_run_that_is_killed_and_resumed_trains_each_prompt_once_and_loses_none(mode: str, cut: int) -> None:
    """Case 24: one epoch of 61 prompts, restarted every ``cut`` steps; long conversations have no disadvantage."""
    trained: list[str] = []
    held, version, exhausted, dropped = None, 0, False, Counter()
    while not exhausted:
        batch, engine = build(mode, count=61, epochs=1)
        if held is not None:
            batch.restore(held)
        found, held = simulated(steps(batch, engine, range(version, version + cut)))
        version += len(found)
        trained += [group.prompt.uid for c in found for group in c.groups]
        exhausted = found[-1].exhausted
        dropped.update({k: int(v) for c in found for k, v in c.stats.items() if k.startswith("rollout/dropped/")})
    assert sorted(trained) == sorted(f"p{i}" for i in range(61) if i % 4 != 3)


def test_partial_steps_killed_and_resumed_anywhere_are_bitwise_those_of_one_go() -> None:
    def bits(found: list[Collected]) -> list[bytes]:
        return [dump_groups(collected.groups) for collected in found]

    whole, _ = simulated(steps(*build("partial"), range(6)))
    assert any(turn.pieces for c in whole for g in c.groups for e in g.episodes for turn in e.turns)
    for cut in range(1, 6):
        first, held = simulated(steps(*build("partial"), range(cut)))
        batch, engine = build("partial")
        batch.restore(held)
        second, _ = simulated(steps(batch, engine, range(cut, 6)))
        assert bits(first) + bits(second) == bits(whole)


def test_a_step_cancelled_in_the_middle_of_a_partial_round_loses_nothing() -> None:
    batch, engine = build("partial")

    async def interrupted() -> None:
        async with asyncio.timeout(20):
            await batch.collect(0)

    with pytest.raises(TimeoutError):
        simulated(interrupted())
    outstanding = {begun.prompt.uid for begun in batch._running.begun} | {g.prompt.uid for g in batch.carried}
    assert outstanding == {f"p{i}" for i in range(batch.stream.state()["next"])}
    found, _ = simulated(steps(batch, engine, range(4)))
    check(found, max_staleness=1)


def test_an_async_step_finds_its_groups_ready_and_a_partial_one_leaves_its_tail() -> None:
    def waited(mode: str) -> float:
        async def measured() -> float:
            batch, engine = build(mode)
            loop, total = asyncio.get_running_loop(), 0.0
            for version in range(6):
                begin = loop.time()
                collected = await batch.collect(version)
                total += loop.time() - begin
                await asyncio.sleep(100.0)
                await batch.pause()
                await engine.update_weights((), version + 1)
                await batch.resume()
                batch.trained(collected)
            await batch.close()
            return total

        return simulated(measured())

    assert waited("async") < waited("partial") < waited("sync")


def test_async_groups_that_a_failed_step_took_are_in_its_checkpoint() -> None:
    async def failed() -> tuple[list[str], Held]:
        batch, _ = build("async")
        collected = await batch.collect(0)
        held = await batch.held()  # the step has not trained: an error, a signal
        await batch.close()
        return [group.prompt.uid for group in collected.groups], held

    uids, held = simulated(failed())
    assert [group.prompt.uid for group in held.carried][: len(uids)] == uids
    batch, engine = build("async")
    batch.restore(carried_over(held))
    found, _ = simulated(steps(batch, engine, range(1)))
    assert {group.prompt.uid for group in found[0].groups} == set(uids)


def test_unfinished_groups_begin_again_in_a_run_that_goes_on_in_mode_sync() -> None:
    _, held = simulated(steps(*build("partial"), range(2)))
    assert held.unfinished
    batch, _ = build("sync")
    said: list[str] = []
    batch.notify = said.append
    batch.restore(held)
    assert said == [f"{len(held.unfinished)} groups that rollout.mode=partial or async had begun begin again"]
    again = batch.stream.next(len(held.unfinished))
    assert {p.uid for p in again} == {group.prompt.uid for group in held.unfinished}


def test_how_many_groups_are_begun_and_waited_for() -> None:
    pacing = Pacing(batch=4, wave=6, over_sampling=2.0, max_staleness=1)
    assert pacing.to_begin(6, accepted=0, under_way=0) == 12
    assert pacing.to_begin(6, accepted=4, under_way=0) == 6  # accepted ones make a batch of the two already
    assert pacing.to_begin(6, accepted=0, under_way=7) == 5
    assert (pacing.enough(6, 12), pacing.enough(6, 6), pacing.enough(6, 1)) == (6, 3, 1)
    assert pacing.must_wait([(3, 1)], version=4)  # must be trained now
    assert not pacing.must_wait([(4, 6)], version=4)
    assert pacing.must_wait([(4, 7)], version=4)


def test_conversations_go_on_in_a_thread_of_their_own_while_the_caller_works() -> None:
    """The real event loop and clock, with a scripted engine."""
    engine = ScriptedEngine(lambda _: ([20, STOP], "stop"))
    batch, _ = build("async")
    batch.talks.engine, batch.talks.rewards = engine, TableRewards(outcome)
    loop = EventLoop(background=True)
    try:
        collected = loop.run(batch.collect(0))
        asked = len(engine.requests)
        loop.call(lambda: batch.trained(collected))
        deadline = time.monotonic() + 60
        while len(engine.requests) == asked and time.monotonic() < deadline:  # this thread does nothing else
            time.sleep(0.01)
        assert len(engine.requests) > asked
        loop.run(batch.pause())
        standing = len(engine.requests)
        loop.run(engine.update_weights((), 1))
        assert len(engine.requests) == standing
        loop.run(batch.resume())
        second = loop.run(batch.collect(1))
        assert not {g.prompt.uid for g in second.groups} & {g.prompt.uid for g in collected.groups}
        loop.run(batch.close())
    finally:
        loop.close()


def test_a_cancelled_run_of_the_background_loop_has_ended_when_it_returns() -> None:
    loop, ended = EventLoop(background=True), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    try:
        with pytest.raises(asyncio.CancelledError):
            loop.run(work(), cancels=lambda cancel: cancel())
        assert loop.call(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            loop.call(lambda: 1 // 0)
    finally:
        loop.close()


def test_an_error_of_a_conversation_is_raised_by_the_step_and_a_checkpoint_can_still_be_written() -> None:
    class Refuses(WordChat):
        def observation_ids(self, messages: Any, *, after_stop: bool) -> list[int]:
            raise ValueError("the template refuses")

    async def run() -> Held:
        batch, _ = build("async")
        batch.talks.chat = Refuses()
        with pytest.raises(ValueError, match="the template refuses"):
            await batch.collect(0)
        held = await batch.held()
        await batch.close()
        return held

    held = simulated(run())
    assert held.unfinished and held.state["stream"]["next"] == len(held.unfinished)
