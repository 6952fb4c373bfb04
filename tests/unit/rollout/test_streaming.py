"""Batches without rounds, and all of them under any stages, settings and outcomes: they end, their books add up, no
group is trained twice or past its staleness, and a restart loses nothing. Engine and clock are simulated."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from simulated import SimulatedEngine, simulated

from mdapo.config.presets import resolve_algorithm
from mdapo.config.schema import Config, RewardCfg
from mdapo.data.batching import make_samples
from mdapo.data.prompts import PromptStream
from mdapo.data.wire import dump_groups
from mdapo.environments.aside import Aside
from mdapo.environments.base import Observation
from mdapo.errors import NothingLearnableError, UserError
from mdapo.rollout.dynamic_batch import Collected, DynamicBatch
from mdapo.rollout.engine import Completion, EngineError, Request
from mdapo.rollout.kinds import batch_of
from mdapo.rollout.seeds import seed_of
from mdapo.rollout.streaming import InOrderBatch, StreamingBatch
from mdapo.types import Message

from .fakes import STOP, ScriptedEnv, WordChat
from .test_ahead_of_steps import LIMIT, carried_over, check, steps
from .test_dynamic_batch import Outcomes, TableRewards, good, good_unless, prompts

N = 3
TALKS = {"n_resp_per_prompt": N, "max_turns": 2, "max_response_len": LIMIT, "episode_timeout_s": 86400.0}
SAID = Observation((Message("user", "30 31"),))
MODES = ("sync", "partial", "async")
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking takes minutes here
SETTINGS = settings(deadline=None, phases=PHASES, suppress_health_check=[HealthCheck.too_slow])


class Engine(SimulatedEngine):
    """Fails for prompts that ``broken`` names."""

    def __init__(self, *, slots: int, broken: Callable[[str], bool] = lambda _: False) -> None:
        super().__init__(words, slots=slots, token_s=1.0)
        self.broken, self.begun = broken, set[str]()

    async def generate(self, request: Request) -> Completion:
        self.begun.add(request.group)
        if self.broken(request.group.split("/")[1]) or self.broken(request.session.split("/", 1)[1]):
            raise EngineError("dead")
        return await super().generate(request)


def words(request: Request) -> list[int]:
    length = 2 + seed_of("length", request.session, len(request.ids) // 40) % 7
    if seed_of("long", request.session) % 9 == 0:
        length += 40
    return [*[50] * (length - 1), STOP]


def build(outcome: Outcomes, *, count: int = 400, epochs: int | None = 1, slots: int = 9, **keys: Any) -> Any:
    filters = {"sample": "yield", **keys.pop("filter", {})}
    wave, bsz, broken = keys.pop("wave", 6), keys.pop("bsz", 4), keys.pop("broken", lambda _: False)
    config = Config.model_validate(
        {
            "model": {"path": "x", "max_context": 200},
            "data": {"train_files": ["x"], "train_prompt_bsz": bsz, "gen_batch_size": wave},
            "rollout": {**TALKS, **keys},
            "algorithm": {"filter_groups": filters},
        }
    )
    lines: list[str] = []
    batch: Any = batch_of(config)(
        Engine(slots=slots, broken=broken),
        WordChat(),
        lambda prompt, *, seed, **_: ScriptedEnv(prompt, [SAID]),
        TableRewards(outcome),
        PromptStream(prompts(count), seed=0, shuffle=False, epochs=epochs),
        config,
        calls=Aside(pace="inline"),
        notify=lines.append,
    )
    batch.lines = lines
    return batch


def run(batch: Any, versions: range = range(1), *, train_s: float = 5.0) -> list[Collected]:
    return simulated(steps(batch, batch.talks.engine, versions, train_s=train_s))[0]


def uids(collected: Collected) -> list[str]:
    return [group.prompt.uid for group in collected.groups]


def test_the_configuration_says_which_batch_it_is() -> None:
    kinds = {mode: type(build(good, mode=mode)) for mode in MODES}
    assert [kinds[mode].__name__ for mode in MODES] == ["InOrderBatch", "StreamingBatch", "AheadBatch"]
    assert type(build(good, filter={"sample": "wave"})) is DynamicBatch


# ---- any outcomes, any settings -------------------------------------------------------------------------


@st.composite
def worlds(draw: Any) -> dict[str, Any]:
    mode = draw(st.sampled_from(MODES))
    sample = draw(st.sampled_from(["wave", "yield"]))
    carry = mode != "sync" or draw(st.booleans())
    keys: dict[str, Any] = {
        "mode": mode,
        "bsz": draw(st.integers(1, 5)),
        "wave": draw(st.integers(2, 12)),
        "slots": draw(st.integers(1, 40)),
        "max_staleness": draw(st.integers(0 if mode == "sync" else 1, 3)),
        "filter": {
            "sample": sample,
            "filter": draw(st.sampled_from(["fixed", "adaptive"])),
            "fill": draw(st.sampled_from(["arrival", "long_dialogs_first", "balanced"])) if carry else "arrival",
            "carry_over": carry,
            "on_limit": draw(st.sampled_from(["train_partial", "skip", "stop"])),
            "max_num_gen_batches": draw(st.integers(1, 4)),
            "skip_prompts": {"enable": draw(st.booleans()), "recheck": draw(st.sampled_from([0.0, 0.5]))},
        },
    }
    if mode == "partial":
        keys["over_sampling"] = draw(st.sampled_from([1.0, 1.5, 2.0]))
    return keys


@settings(SETTINGS, max_examples=40)
@given(
    keys=worlds(),
    kinds=st.lists(st.sampled_from(["right", "wrong", "spread", "broken"]), min_size=1, max_size=12),
    count=st.integers(1, 60),
    epochs=st.sampled_from([1, 2, None]),
    train_s=st.floats(0, 100),
)
def test_any_loop_ends_its_books_add_up_and_no_group_is_trained_twice_or_too_late(
    keys: dict[str, Any], kinds: Sequence[str], count: int, epochs: int | None, train_s: float
) -> None:
    """Also when everything is all right, all wrong, or fails."""

    def kind(name: str) -> str:
        return kinds[int(name.split("/")[0][1:]) % len(kinds)]

    def outcome(uid: str, index: int) -> float:
        return {"right": 1.0, "wrong": 0.0, "broken": 0.0, "spread": float(index % 2)}[kind(uid)]

    batch = build(outcome, count=count, epochs=epochs, broken=lambda uid: kind(uid) == "broken", **keys)
    found: list[Collected] = []

    async def go() -> None:
        async with asyncio.timeout(1e7):  # simulated seconds
            for version in range(5):
                batch.talks.engine.version = version
                collected = await batch.collect(version)
                await asyncio.sleep(train_s)
                await batch.pause()
                await batch.talks.engine.update_weights((), version + 1)
                await batch.resume()
                batch.trained(collected)
                found.append(collected)
                if collected.exhausted:
                    break
            await batch.close()

    try:
        simulated(go())
    except NothingLearnableError:
        assert keys["filter"]["on_limit"] == "stop"
    except UserError as error:
        assert "broken" in kinds and str(error).startswith("all ")
    most = keys["filter"]["max_num_gen_batches"] * max(keys["wave"], keys["bsz"])
    for collected in found:
        assert len(collected.groups) <= keys["bsz"]
        if keys["mode"] == "sync":  # at the limit, what is under way is still judged
            assert collected.stats["rollout/groups_generated"] <= 8 * most
        if len(collected.groups) < keys["bsz"]:
            assert collected.limit_reached or batch.stream.exhausted
    if epochs == 1:
        check(found, max_staleness=keys["max_staleness"])
    last = Counter(uid for collected in found for uid in uids(collected))
    assert all(times <= (epochs or 1e9) for times in last.values())


@settings(SETTINGS, max_examples=6)
@given(keys=worlds(), cut=st.integers(1, 4))
def test_a_run_that_is_restarted_trains_each_prompt_once_and_keeps_its_books(keys: dict[str, Any], cut: int) -> None:
    """Case 24, with the state of every stage: one epoch of 61 prompts, a new process every ``cut`` steps."""
    keys["filter"] |= {"on_limit": "train_partial", "filter": "fixed", "max_num_gen_batches": 4}
    keys["filter"]["skip_prompts"] = {"enable": False}
    keys["bsz"], keys["wave"] = 4, 6

    def outcome(uid: str, index: int) -> float:
        return float(index % 2) if int(uid[1:]) % 3 else 0.0

    trained: list[str] = []
    held, version, exhausted, groups = None, 0, False, Counter[str]()
    while not exhausted:
        batch = build(outcome, count=61, epochs=1, **keys)
        if held is not None:
            batch.restore(held)
            assert batch.pool.state().items() <= held.state.items()
        found, held = simulated(steps(batch, batch.talks.engine, range(version, version + cut)))
        version += len(found)
        trained += [uid for collected in found for uid in uids(collected)]
        for collected in found:
            groups.update({k: int(v) for k, v in collected.stats.items() if k.startswith("rollout/groups_")})
        exhausted = found[-1].exhausted
    assert sorted(trained) == sorted(f"p{i}" for i in range(61) if i % 3)
    total = held.state["groups"]
    assert total["generated"] == total["trained"] + total.get("dropped", 0) and total["trained"] == len(trained)
    assert total["begun"] == total["generated"] + total.get("given_up", 0)
    if keys["mode"] != "async":  # there, what was begun after a process's last step is in no step's line
        for name in ("begun", "generated", "trained", "dropped", "given_up"):
            assert total.get(name, 0) == groups[f"rollout/groups_{name}"], name


def test_a_step_killed_in_the_middle_begins_again_with_all_that_was_learned() -> None:
    """What a checkpoint of the step before holds: carried groups, yield, pass rates, threshold, the cursor."""
    keys: dict[str, Any] = {"mode": "partial", "filter": {"filter": "adaptive", "skip_prompts": {"enable": True}}}

    def outcome(uid: str, index: int) -> float:
        return float(index % 2) * (0.3 + int(uid[1:]) % 7 / 10)

    batch = build(outcome, epochs=None, **keys)

    async def killed() -> Any:
        for version in range(6):
            batch.talks.engine.version = version
            batch.trained(await batch.collect(version))
        held = carried_over(await batch.held())
        begun = set(batch.talks.engine.begun)
        try:
            async with asyncio.timeout(12):
                await batch.collect(6)
        except TimeoutError:
            pass
        assert batch.talks.engine.begun != begun, "it was in the middle of the step"
        return held

    held = simulated(killed())
    assert held.carried or held.unfinished
    assert (
        held.state["pass_rates"]["uids"] and held.state["stages"]["filter"]["window"] and held.state["yield"]["judged"]
    )
    again = build(outcome, epochs=None, **keys)
    again.restore(held)
    assert simulated(restated(again)) == held.state
    outstanding = {group.prompt.uid for group in (*held.carried, *held.unfinished)}
    found = run(again, range(6, 10))
    assert outstanding & {uid for collected in found for uid in uids(collected)}
    check(found, max_staleness=1, first=6)


async def restated(batch: Any) -> dict[str, Any]:
    return carried_over(await batch.held()).state


# ---- mode sync: in the order of dispatch ----------------------------------------------------------------


def test_the_order_of_completion_does_not_change_what_a_sync_step_trains() -> None:
    """With few slots or many, the groups trained are the first that teach; those after them come again."""
    outcome = good_unless("p1", "p4", "p5")
    for slots in (1, 4, 50):
        batch = build(outcome, slots=slots, max_staleness=0)
        (collected,) = run(batch)
        assert uids(collected) == ["p0", "p2", "p3", "p6"]
        assert not batch.carried
    first, second = run(build(outcome, max_staleness=0), range(2))
    assert (uids(first), uids(second)) == (["p0", "p2", "p3", "p6"], ["p7", "p8", "p9", "p10"])
    assert second.stats["rollout/staleness_max"] == 0


def test_a_long_conversation_in_the_batch_is_waited_for_and_one_after_it_is_not() -> None:
    batch = build(good, bsz=2, wave=4, slots=50, max_staleness=0)
    engine = batch.talks.engine
    engine.turn = lambda request: [*[50] * (90 if "/p1" in request.session else 3), STOP]
    (collected,) = run(batch, train_s=0.0)
    assert uids(collected) == ["p0", "p1"] and len(engine.begun) == 4
    assert collected.stats["rollout/groups_given_up"] == 2  # complete long before, and no part of the batch


def test_a_rejected_group_is_replaced_by_one_while_the_others_run() -> None:
    """Case 6."""
    batch = build(good_unless("p3"), bsz=32, wave=32, slots=400)
    (collected,) = run(batch)
    assert len(collected.groups) == 32 and "p3" not in uids(collected)
    assert len(batch.talks.engine.begun) <= 34  # not a wave of 64


# ---- cases of the field, in every batch -----------------------------------------------------------------

ALL = [(mode, sample) for mode in MODES for sample in ("wave", "yield")]


@pytest.mark.parametrize(("mode", "sample"), ALL)
def test_uniform_groups_end_at_the_limit_without_an_exception(mode: str, sample: str) -> None:
    """Case 1."""
    batch = build(lambda uid, _: float(int(uid[1:]) % 2), mode=mode, filter={"sample": sample}, epochs=None)
    (collected,) = run(batch)
    assert (collected.groups, collected.limit_reached, collected.exhausted) == ((), True, False)
    assert collected.stats["rollout/rounds"] >= 10 and collected.stats["rollout/uniform_share"] == 1.0
    assert [line for line in batch.lines if line.startswith("round 10:")]
    assert sum(line.startswith("warning: 0 of the last 40 groups") for line in batch.lines) == 1


@pytest.mark.parametrize(("mode", "sample"), ALL)
def test_when_prompts_run_out_what_is_there_is_trained(mode: str, sample: str) -> None:
    """Cases 2 and 3: the last of three prompts is slow and good; the end of the data is announced."""
    batch = build(good_unless("p1"), mode=mode, count=3, filter={"sample": sample})
    batch.talks.engine.turn = lambda request: [*[50] * (50 if "/p2" in request.session else 2), STOP]
    found = run(batch, range(4))
    assert sorted(uid for collected in found for uid in uids(collected)) == ["p0", "p2"]
    assert found[-1].exhausted and batch.stream.state()["again"] == []


@pytest.mark.parametrize(("mode", "sample"), ALL)
def test_groups_are_judged_by_raw_outcomes_with_a_tolerance(mode: str, sample: str) -> None:
    """Cases 4, 5 and 7: conversations of two turns, one reward each."""
    values = {0: [0.5] * 3, 1: [0.1] * 3, 2: [0.0, 0.95, 0.95]}
    batch = build(lambda uid, i: values[int(uid[1:]) % 3][i], mode=mode, count=12, filter={"sample": sample})
    found = run(batch, range(6))
    groups = [group for collected in found for group in collected.groups]
    assert {int(group.prompt.uid[1:]) % 3 for group in groups} == {2} and len(groups) == 4
    assert all(len(group.episodes) == N and group.episodes[0].num_agent_turns == 2 for group in groups)


@pytest.mark.parametrize(("mode", "sample"), ALL)
def test_a_small_data_set_is_dealt_over_its_epochs(mode: str, sample: str) -> None:
    """Case 8: three prompts, batches of four."""
    found = run(build(good, mode=mode, count=3, epochs=None, filter={"sample": sample}), range(3))
    assert [len(collected.groups) for collected in found] == [4, 4, 4]


@pytest.mark.parametrize(("mode", "sample"), ALL)
def test_what_is_collected_is_credited_by_the_policys_tokens_alone(mode: str, sample: str) -> None:
    """Cases 20, 21 and 22: six tokens of the policy and four of the environment, limit 10 and buffer 4; a uniform group
    beside others, one of which has a member without a score."""
    values = {"p0": [0.0, 1.0, 1.0], "p1": [5.0] * 3, "p2": [0.0, 1.0, 0.0]}
    keys: dict[str, Any] = {"mode": mode, "bsz": 3, "wave": 3, "count": 3, "max_response_len": 10}
    filters = {"sample": sample, "enable": False}
    batch = build(lambda uid, i: values[uid][i], filter=filters, broken=lambda name: name == "p2/2", **keys)
    batch.talks.engine.turn = lambda _: [50, 50, STOP]
    (collected,) = run(batch)
    config = batch.config.model_copy(
        update={
            "algorithm": resolve_algorithm(batch.config.algorithm),
            "reward": RewardCfg.model_validate({"overlong_buffer_cfg": {"enable": True, "len": 4}}),
        }
    )
    groups = sorted(collected.groups, key=lambda group: group.prompt.uid)
    samples, _ = make_samples(groups, config)
    by_uid = dict(zip(samples.uids, samples, strict=True))
    assert all(
        sample.response_mask.sum() == 6 and len(sample.ids) == 12 for uid, sample in by_uid.items() if uid != "p2/2"
    )
    for sample in by_uid.values():
        off = ~sample.response_mask
        assert np.isfinite(sample.advantages).all()
        assert not sample.advantages[off].any() and not sample.loss_weights[off].any()
    assert all(not by_uid[f"p1/{i}"].advantages.any() for i in range(N))  # uniform: exactly 0
    first = [by_uid[f"p0/{i}"].advantages.max() for i in (1, 2)]
    assert first == pytest.approx([(1 - 2 / 3) / np.std([0, 1, 1], ddof=1)] * 2, rel=1e-3)  # no penalty took part
    assert not by_uid["p2/2"].loss_weights.any() and by_uid["p2/1"].advantages.max() > 0


@pytest.mark.parametrize("mode", MODES)
def test_what_fails_for_good_ends_with_its_reason(mode: str) -> None:
    with pytest.raises(UserError, match="conversations of this step failed"):
        run(build(good, mode=mode, epochs=None, broken=lambda _: True))


# ---- what is told ---------------------------------------------------------------------------------------


def test_a_warning_names_the_likely_cause() -> None:
    def warned(outcome: Outcomes) -> str:
        batch = build(outcome, epochs=None, filter={"sample": "wave"})
        run(batch)
        (line,) = [line for line in batch.lines if line.startswith("warning")]
        return line

    assert "too easy" in warned(lambda *_: 1.0)
    hard = warned(lambda *_: 0.0)
    assert "too hard for this policy, or the grader is broken" in hard
    assert "p2 '102', p3 '103', p4 '104'" in hard
    assert "same value" in warned(lambda *_: 0.5)


def test_a_round_has_a_line_with_what_came_of_it() -> None:
    batch = build(good_unless("p1"), filter={"sample": "wave"}, wave=4)
    run(batch)
    assert batch.lines[0].startswith(
        "round 1: asked 4 prompts x 3; finished so far 4 groups; 3 of 4 groups in hand; dropped so far: "
        "no spread: all solved 1; yield 0.67 ("
    )


def test_a_fill_that_chooses_trains_what_is_due_first_and_tells_its_bias() -> None:
    """Surplus of two steps; what the next step could not train goes first, whatever its length."""
    batch = build(good, bsz=2, wave=6, filter={"sample": "wave", "fill": "long_dialogs_first"}, max_staleness=1)
    batch.pool.wave = 6
    found = run(batch, range(5))
    check(found, max_staleness=1)
    assert all("rollout/fill/turns_trained" in collected.stats for collected in found)
    assert sum(collected.stats.get("rollout/dropped/stale", 0) for collected in found) > 0  # that is its price


def test_waves_do_not_stream_and_streams_resume_where_they_were() -> None:
    """Bits of a partial run in rounds do not depend on the slots; what streams is the same when nothing differs."""
    first, second = (run(build(good_unless("p2"), mode="partial"), range(3)) for _ in range(2))
    assert [dump_groups(c.groups) for c in first] == [dump_groups(c.groups) for c in second]
    assert issubclass(InOrderBatch, StreamingBatch)
