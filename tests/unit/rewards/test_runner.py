"""Rewards: weights, breakdown, three signatures, and functions that hang, raise, fork, die or answer nonsense."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from mdapo.config.schema import RewardCfg, RewardPart
from mdapo.errors import UserError
from mdapo.rewards.calling import BadReward, load_function, read_verdict
from mdapo.rewards.runner import RewardRunner
from mdapo.types import Episode, Message, Prompt, Score, Turn

HOSTILE = str(Path(__file__).with_name("hostile.py"))


def episode(*replies: str, end: str = "done", opening: tuple[Message, ...] = (Message("user", "3 + 4?"),)) -> Episode:
    prompt = Prompt("p", 0, opening, data_source="gsm8k", ground_truth="7", extra={"index": 5})
    messages, turns = list(opening), []
    for reply in replies:
        if turns:
            messages.append(Message("user", "Again."))
        messages.append(Message("assistant", reply))
        turns.append(Turn("assistant", np.ones(1, np.int32), np.ones(1, bool), np.zeros(1, np.float32), 0, "stop"))
    return Episode(prompt, 0, np.ones(2, np.int32), tuple(turns), tuple(messages), end)  # type: ignore[arg-type]


def part(name: str, weight: float = 1.0, **args: object) -> RewardPart:
    return RewardPart(name=f"{HOSTILE}:{name}", weight=weight, args=args)


@pytest.fixture
def make() -> Iterator[object]:
    made: list[RewardRunner] = []

    def runner(
        *parts: RewardPart, timeout_s: float = 30.0, workers: int = 1, every_turn: bool = False, **cfg: object
    ) -> RewardRunner:
        settings = RewardCfg(functions=list(parts), timeout_s=timeout_s, workers=workers, **cfg)  # type: ignore[arg-type]
        made.append(RewardRunner(settings, every_turn=every_turn))
        return made[-1]

    yield runner
    for r in made:
        r.close()


def score(runner: RewardRunner, *episodes: Episode) -> list[Score]:
    async def all_of_them() -> list[Score]:
        return list(await asyncio.gather(*map(runner.score, episodes)))

    return asyncio.run(all_of_them())


def test_built_in_reward_of_the_environment_is_the_default() -> None:
    runner = RewardRunner(RewardCfg(), default="gsm8k")
    right, wrong = score(runner, episode("#### 7"), episode("#### 8"))
    assert right == Score(1.0, 1.0, {"gsm8k": 1.0, "gsm8k/correct": 1.0, "gsm8k/marked": 1.0})
    assert (wrong.value, wrong.outcome, wrong.valid) == (0.0, 0.0, True)
    assert runner.end_step() == {}


def test_environment_without_a_reward_is_a_clear_error() -> None:
    with pytest.raises(UserError, match="single_turn brings none; built-in rewards are customer_service, gsm8k"):
        RewardRunner(RewardCfg(), default="single_turn")


def test_weights_breakdown_and_outcome_of_the_first_part_that_tells_one(make) -> None:
    runner = make(part("number", 2.0, value=-3), part("good", 0.5), part("number", value=10.0))
    (got,) = score(runner, episode("12345"))
    assert got.value == 2.0 * -3 + 0.5 * 0.5 + 10.0
    assert got.outcome == 1.0
    assert got.parts == {"number": -3.0, "good": 0.5, "good/acc": 1.0, "good/length": 5.0, "number.3": 10.0}


def test_outcome_where_no_part_tells_one_is_the_first_value_cut_to_the_unit_interval(make) -> None:
    assert score(make(part("number", value=3)), episode("x"))[0].outcome == 1.0
    assert score(make(part("number", value=-3)), episode("x"))[0].outcome == 0.0


def test_verl_and_trl_functions_are_called_as_they_are(make) -> None:
    runner = make(part("verl"), part("trl"), part("trl_async"))
    (got,) = score(runner, episode("6", "7"))
    assert got.parts == {"verl": 1.0 + 10 + 500, "trl": 3 + 50 + 700.0, "trl_async": 2.0}
    assert got.valid


def test_examples_in_the_prompt_are_not_taken_for_the_policys_words(make) -> None:
    shots = (Message("user", "1 + 1?"), Message("assistant", "2"), Message("user", "3 + 4?"))
    (got,) = score(make(part("trl"), part("verl")), episode("7", opening=shots))
    assert got.parts["trl"] == 1 + 50 + 700.0
    assert got.parts["verl"] == 1.0 + 10 + 500


BAD = {
    "raising": "raised KeyError",
    "exiting": "raised SystemExit",
    "dying": "died",
    "returns_none": "returned None",
    "returns_nan": "returned NaN",
    "returns_inf": "returned infinity",
    "returns_text": "returned str",
    "returns_list": "returned list",
    "returns_no_score": "returned a mapping without score",
    "returns_huge": "returned a number beyond 1e+06",
    "returns_1e308": "returned a number beyond 1e+06",
    "returns_a_huge_outcome": "returned a number beyond 1e+06",
    "returns_an_outcome_beyond_one": "returned acc outside 0 to 1",
    "trl_returns_two": "returned list, not a list of one reward",
    "trl_returns_none": "returned None",
}


def test_what_is_only_logged_may_be_large_but_never_sums_up_to_infinity(make) -> None:
    (got,) = score(make(part("logs_large_numbers")), episode("x"))
    assert got.valid and got.parts == {"logs_large_numbers": 0.5, "logs_large_numbers/seconds": 1.8e9}


@pytest.mark.parametrize(("name", "reason"), BAD.items())
def test_bad_reward_is_counted_and_never_passes_for_zero(make, name: str, reason: str) -> None:
    runner = make(part("number"), part(name), part("number"), max_error_rate=1.0)
    got = score(runner, episode("x"), episode("y"))
    assert [s.valid for s in got] == [False, False]
    assert runner.errors == {f"{name}: {reason}": 2}
    assert runner.end_step() == {f"{name}: {reason}": 2}
    assert runner.end_step() == {}


def test_hanging_function_is_killed_at_its_deadline_and_the_next_episode_is_scored(make) -> None:
    runner = make(part("hanging"), timeout_s=0.3, max_error_rate=1.0)
    (worker,) = runner._workers
    (got,) = score(runner, episode("x"))
    assert not got.valid
    assert runner.errors == {"hanging: timed out": 1}
    assert not psutil.pid_exists(worker.pid)
    (new,) = runner._workers
    assert new.pid != worker.pid
    assert not score(runner, episode("x"))[0].valid
    assert runner.errors == {"hanging: timed out": 2}


def test_one_bad_episode_leaves_the_others_alone(make) -> None:
    runner = make(part("sometimes"), workers=2)
    got = score(runner, *(episode("bad" if i == 3 else "fine") for i in range(8)))
    assert [s.valid for s in got] == [i != 3 for i in range(8)]
    assert runner.end_step() == {"sometimes: raised RuntimeError": 1}


def test_what_a_function_prints_or_reads_does_not_disturb_the_protocol(make) -> None:
    assert score(make(part("printing")), episode("x"))[0].value == 0.25


def gone(pid: int) -> bool:
    """Ended, or a zombie that only its adoptive parent has yet to reap."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_forking_function_answers_once_and_its_children_end_with_it(make, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    runner = make(part("forking", note=str(note)), part("number", value=2))
    got = score(runner, episode("x"), episode("y"))
    assert [s.parts for s in got] == [{"forking": 0.75, "number": 2.0}] * 2
    runner.close()
    assert gone(int(note.read_text()))


def test_children_of_a_function_that_hangs_are_killed_with_it(make, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    runner = make(part("hangs_after_forking", note=str(note)), timeout_s=2.0)
    assert not score(runner, episode("x"))[0].valid
    assert runner.errors == {"hangs_after_forking: timed out": 1}
    assert gone(int(note.read_text()))


def test_worker_that_died_while_idle_is_replaced_and_no_episode_pays_for_it(make) -> None:
    runner = make(part("number"))
    (worker,) = runner._workers
    os.kill(worker.pid, 9)
    assert gone(worker.pid)
    assert score(runner, episode("x"))[0].value == 1.0
    assert not runner.errors


def test_a_failure_of_our_own_is_raised_and_the_next_episode_finds_a_worker(
    make, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make(part("number"))
    (worker,) = runner._workers

    def fail(*_: object) -> None:
        raise OverflowError("too long")

    monkeypatch.setattr(worker, "_wait", fail)
    with pytest.raises(OverflowError):
        score(runner, episode("x"))
    assert gone(worker.pid), "its answers could be taken for those of another episode"
    assert score(runner, episode("x"))[0].value == 1.0


def test_a_function_that_cannot_be_loaded_a_second_time_ends_every_call(make, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "once.py").write_text(
        f"import os\nif os.path.exists({str(mark)!r}):\n    raise RuntimeError('second import')\n"
        f"def f(messages, prompt, end):\n    open({str(mark)!r}, 'w').close()\n    os._exit(1)\n"
    )
    runner = make(RewardPart(name=f"{tmp_path}/once.py:f"))
    assert not score(runner, episode("x"))[0].valid
    with pytest.raises(UserError, match="second import"):
        score(runner, episode("x"), episode("y"), episode("z"))


def test_closing_ends_processes_in_the_middle_of_a_call(make) -> None:
    runner = make(part("hanging"), timeout_s=100.0)
    pids = [w.pid for w in runner._workers]

    async def close_while_scoring() -> Score:
        task = asyncio.create_task(runner.score(episode("x")))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(runner.close)
        return await task

    assert not asyncio.run(close_while_scoring()).valid
    assert all(gone(pid) for pid in pids)


def test_error_rate_above_the_limit_stops_the_run_with_the_reasons(make) -> None:
    runner = make(part("sometimes"), max_error_rate=0.25)
    score(runner, *(episode("bad" if i < 1 else "fine") for i in range(4)))
    assert runner.end_step().total() == 1
    score(runner, *(episode("bad" if i < 2 else "fine") for i in range(4)))
    with pytest.raises(UserError, match=r"2 of 4 episodes .*max_error_rate=0.25") as caught:
        runner.end_step()
    assert "2 x sometimes: raised RuntimeError" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_episode_that_ended_in_an_infrastructure_error_is_not_scored_nor_counted() -> None:
    runner = RewardRunner(RewardCfg(), default="gsm8k")
    (got,) = score(runner, episode("#### 7", end="error"))
    assert not got.valid and not runner.errors


@pytest.mark.parametrize("workers", [1, 0])
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("gsm8kk", "did you mean gsm8k"),
        ("nowhere.at.all:f", "nowhere"),
        ("no_such_file.py:f", "no such file"),
        (f"{HOSTILE}:goood", "goood"),
        (f"{HOSTILE}:strange", "signature not known: (a, b)"),
        (f"{HOSTILE}:not_a_function", "must be a class or a function"),
    ],
)
def test_function_that_cannot_be_used_is_named_at_start(workers: int, name: str, what: str) -> None:
    if workers:
        with pytest.raises(UserError) as caught:
            RewardRunner(RewardCfg(functions=[RewardPart(name=name)], workers=1))
        assert what in str(caught.value)
    else:
        with pytest.raises(UserError, match=r"set reward.workers=1 or more|neither built-in"):
            RewardRunner(RewardCfg(functions=[RewardPart(name=name)]))


def test_argument_that_the_function_does_not_have_is_named() -> None:
    with pytest.raises(UserError, match="gsm8k: has no argument strikt"):
        load_function("gsm8k", {"strikt": True})
    assert load_function("gsm8k", {"strict": True}).args == {"strict": True}


def test_numpy_and_bool_values_are_numbers() -> None:
    assert read_verdict(np.float32(0.5)).value == 0.5
    assert read_verdict({"score": np.int64(2), "acc": True}).outcome == 1.0
    assert read_verdict(Score(1.0, 0.5, {"a": 1.0})).outcome == 0.5
    with pytest.raises(BadReward, match="returned NaN"):
        read_verdict(Score(1.0, float("nan")))
    with pytest.raises(BadReward, match="returned outcome outside 0 to 1"):
        read_verdict(Score(1.0, -0.5))
    with pytest.raises(BadReward, match="returned success outside 0 to 1"):
        read_verdict({"score": 1.0, "success": 100})
    assert read_verdict({"score": 7.0, "acc": 1.0 + 2e-16 * 4}).outcome == 1.0, "a sum of shares, rounded"
    with pytest.raises(BadReward, match="not valid"):
        read_verdict(Score(1.0, 1.0, valid=False))


TRAINER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from test_runner import episode, part
from mdapo.config.schema import RewardCfg
from mdapo.rewards.runner import RewardRunner

runner = RewardRunner(RewardCfg(functions=[part("hanging")], workers=2))
print(*(w.pid for w in runner._workers), flush=True)
asyncio.run(runner.score(episode("x")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_trainer_that_is_killed_leaves_no_reward_process_behind() -> None:
    command = [sys.executable, "-c", TRAINER, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        trainer.kill()
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_the_value_before_each_turn_is_that_of_the_conversation_so_far() -> None:
    runner = RewardRunner(RewardCfg(), default="customer_service", every_turn=True)
    facts = {"detail": "order_number", "value": "KX-48213", "remedy": "refund", "topic": ["kettle"]}
    said = ["I am sorry about your kettle. What is your order number?", "We can offer a full refund. Is that okay?"]
    heard = ["My kettle is broken.", "It is KX-48213. What can you offer me?", "Yes, that works."]
    texts = [text for pair in zip(heard, said, strict=False) for text in pair] + heard[2:]
    prompt = Prompt("p", 0, (Message("user", heard[0]),), "customer_service", facts)
    turns = [Turn("assistant", np.ones(1, np.int32), np.ones(1, bool), np.zeros(1, np.float32), 0, "stop")] * 2
    talk = tuple(Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts))
    whole = Episode(prompt, 0, np.ones(2, np.int32), tuple(turns), talk, "done")
    (scored,) = score(runner, whole)
    assert scored.value == 1.0 and scored.before[0] == 0.0
    assert 0.0 < scored.before[1] < 0.5  # sorry, asked and told
    (plain,) = score(RewardRunner(RewardCfg(), default="customer_service"), whole)
    assert plain == replace(scored, before=())


def test_a_reward_without_a_value_for_unfinished_conversations_is_no_failure(make) -> None:
    runner = make(part("wants_two_turns"), every_turn=True, max_error_rate=0.0)
    got = score(runner, episode("a", "b", "c", "d"))
    assert [s.before for s in got] == [(0.0, 0.0, 2.0, 3.0)], "what the first turn gained is unknown"
    assert runner.end_step() == {} == runner.errors


def test_an_episode_without_a_score_counts_once_however_many_turns_it_has(make) -> None:
    runner = make(part("wants_two_turns"), every_turn=True, max_error_rate=0.5)
    score(runner, episode("a"), episode("a", "b"))
    assert runner.end_step() == {"wants_two_turns: raised ValueError": 1}


def test_the_error_rate_within_a_step_waits_for_enough_episodes(make) -> None:
    runner = make(part("sometimes"), max_error_rate=0.25)
    score(runner, episode("bad"), episode("fine"))
    runner.check_step(at_least=3)
    score(runner, episode("bad"))
    with pytest.raises(UserError, match=r"2 of 3 episodes .*max_error_rate=0.25"):
        runner.check_step(at_least=3)
    assert runner.end_step() == {}


def test_failures_of_an_evaluation_do_not_count_for_the_next_step(make) -> None:
    runner = make(part("sometimes"), max_error_rate=0.25)
    score(runner, episode("bad"), episode("fine"))
    assert runner.end_evaluation() == {"sometimes: raised RuntimeError": 1}
    score(runner, episode("fine"))
    assert runner.end_step() == {}
