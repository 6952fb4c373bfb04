"""However a run is stopped, the same command goes on, and the end is bit for bit that of a run that was not."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest
from tiny_run import TWO_RANKS, Command, Material, mdapo, metrics, trained_prompts, wait_for, weights

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
GONE_S = 10.0


def lines(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def same_run(run: Path, whole: Path) -> None:
    assert metrics(run) == metrics(whole)
    assert weights(run) == weights(whole)
    assert trained_prompts(run) == trained_prompts(whole)


def test_the_whole_run_trains_every_step_each_prompt_once(whole: Path) -> None:
    rows = metrics(whole)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert sum(row["rollout/groups_carried"] for row in rows) > 0  # so that resuming has something to lose
    assert max(Counter(trained_prompts(whole)).values()) == 1
    assert [row["step"] for row in rows if "eval/success" in row] == [4]


def test_the_start_says_once_what_was_chosen(whole: Path) -> None:
    said = (whole.parent / "said.txt").read_text()
    for label in (
        "device ",
        "attention ",
        "ops ",
        "engine ",
        "layout ",
        "prompts a step ",
        "first step: log-prob gap ",
    ):
        assert sum(line.strip().startswith(label) for line in said.splitlines()) >= 1, label
    assert said.count("megatron-core") == 1  # of two ranks one speaks
    assert "tensor 1 x pipeline 1 x data 2, distributed optimizer" in said


def test_a_run_stopped_and_killed_at_every_point_ends_as_the_whole_one(
    material: Material, whole: Path, tmp_path: Path
) -> None:
    """Each prompt trained once, none skipped (case 24); metrics, weights and replay to the last bit."""
    run, slow = tmp_path / "run", tmp_path / "slow"
    command = ("train", str(material.config), f"run.dir={tmp_path}", *TWO_RANKS)

    def newest() -> str:
        return max(folder.name for folder in (run / "checkpoints").glob("step_*"))

    # a signal while a step trains: it is finished and saved
    done = mdapo(*command, SABOTAGE="terminated-in-sync:2")  # the first brings the first weights
    assert (done.code, newest(), lines(run)) == (75, "step_000001", 1), done.err
    assert "resumes" in done.err

    # in mid-collection: saved as before it
    slow.touch()
    running = Command(*command, SLOW=str(slow))
    wait_for(Path(f"{slow}.noticed").exists)
    running.process.send_signal(signal.SIGTERM)
    done = running.wait()
    slow.unlink()
    assert (done.code, newest(), lines(run)) == (75, "step_000001", 1), done.err

    # one rank killed: all others end, with their reward process
    running = Command(*command, SLOW=str(slow))
    wait_for(lambda: lines(run) >= 2)
    slow.touch()
    family = running.family
    running.rank(1).kill()
    done = running.wait()
    slow.unlink()
    assert done.code == 75 and "a rank was killed" in done.err and "Traceback" not in done.err, done.err
    assert len(family) >= 5 and not psutil.wait_procs(family, timeout=GONE_S)[1]
    stood = lines(run)

    # the command itself killed
    running = Command(*command, SLOW=str(slow))
    wait_for(lambda: lines(run) > stood or len(running.family) >= 5)
    slow.touch()
    family = running.family
    running.process.kill()
    running.process.communicate(timeout=GONE_S)
    assert not psutil.wait_procs(family, timeout=GONE_S)[1]
    slow.unlink()

    # killed with a checkpoint written but not committed
    done = mdapo(*command, SABOTAGE="killed-before-commit:1")
    assert done.code == 75, done.err

    # a signal in an evaluation: what was trained is saved, and the evaluation made good
    stood = lines(run)
    done = mdapo(*command, SABOTAGE="terminated-in-evaluation:1")
    assert (done.code, newest(), lines(run)) == (75, "step_000004", 3), done.err

    done = mdapo(*command)
    assert done.code == 0, done.err
    same_run(run, whole)
    assert not list((run / "checkpoints").glob(".*"))
