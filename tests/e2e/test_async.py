"""``rollout.mode: async`` through the real trainer on two ranks: conversations go on while it trains, and nothing is
trained twice or with tokens that are too old, however the run is stopped. The engine is a mock of servers
(`plugin.local_for_servers`); what it writes when depends on the clock, so no two runs are equal in every bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from soundness import is_sound
from tiny_run import TWO_RANKS, Command, Material, mdapo, metrics, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
KEYS = (
    *TWO_RANKS,
    "rollout.mode=async",
    "rollout.engine=sglang",
    "rollout.urls=['http://127.0.0.1:9']",
    "sync.timeout_s=60",
    "sync.check=true",
    "algorithm.rollout_correction.rollout_is=token",
)
MOCK = {"LOCAL_FOR_SERVERS": "1"}


def command(material: Material, folder: Path, *more: str) -> tuple[str, ...]:
    return ("train", str(material.config), f"run.dir={folder}", *KEYS, *more)


def newest(run: Path) -> dict[str, Any]:
    return json.loads((max((run / "checkpoints").glob("step_*")) / "state.json").read_text())


def test_an_asynchronous_run_trains_evaluates_and_says_how_old_its_tokens_are(
    material: Material, tmp_path: Path
) -> None:
    done = mdapo(*command(material, tmp_path, "run.eval_every=2"), **MOCK)
    assert done.code == 0 and done.err == "", done.err
    run = tmp_path / "run"
    is_sound(run)
    rows = metrics(run)
    assert [row["step"] for row in rows if "eval/success" in row] == [2, 4]
    assert any(row["rollout/staleness"] > 0 for row in rows), "some groups were begun while a step before trained"
    summary = json.loads((run / "summary.json").read_text())
    assert {"success_before", "success_after"} <= summary.keys()


def test_a_signal_ends_it_with_a_checkpoint_and_the_same_command_goes_on(material: Material, tmp_path: Path) -> None:
    """In the middle: conversations are under way when it comes, and go on with the tokens that they had."""
    slow, run = tmp_path / "slow", tmp_path / "run"
    slow.touch()
    running = Command(*command(material, tmp_path), SLOW=str(slow), **MOCK)
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(metrics(run)) >= 2)
    running.process.send_signal(signal.SIGTERM)
    done = running.wait()
    assert done.code == 75 and "stopped on a signal; the same command resumes" in done.err, (done.out, done.err)
    assert "Traceback" not in done.err
    state = newest(run)
    assert state["train"]["step"] >= 2
    assert state["rollout"]["unfinished"], "nothing was under way: the test shows less than it says"
    slow.unlink()
    done = mdapo(*command(material, tmp_path), **MOCK)
    assert done.code == 0, done.err
    assert f"weights of step {state['train']['step']}, from" in done.out
    is_sound(run)


def test_a_kill_while_a_checkpoint_is_written_costs_no_prompt(material: Material, tmp_path: Path) -> None:
    """Groups that were handed out to the step that was lost, too."""
    run = tmp_path / "run"
    for number in (2, 3):
        done = mdapo(*command(material, tmp_path), SABOTAGE=f"killed-before-commit:{number}", **MOCK)
        assert done.code == 75, done.err
    assert newest(run)["train"]["step"] == 3
    done = mdapo(*command(material, tmp_path), **MOCK)
    assert done.code == 0, done.err
    is_sound(run)
