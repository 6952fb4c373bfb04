"""``rollout.mode: partial`` with the local engine: conversations outlive steps, and a run that is killed ends, bit for
bit, as one that was not."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tiny_run import Command, Material, mdapo, metrics, trained_prompts, wait_for, weights

from mdapo.data.wire import load_groups_file

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
KEYS = (
    "rollout.mode=partial",
    "rollout.over_sampling=2.0",
    "rollout.max_turn_len=20",
    "tracking.replay=true",
    "run.eval_before=false",
    "run.eval_after=false",
    "run.eval_every=0",
    "algorithm.rollout_correction.rollout_is=token",
)


def test_a_killed_partial_run_goes_on_with_its_unfinished_conversations(material: Material, tmp_path: Path) -> None:
    """Killed twice while a checkpoint is written: what had been begun goes on from its tokens, none twice (case 24)."""
    whole, run = tmp_path / "whole", tmp_path / "killed"
    done = mdapo("train", str(material.config), f"run.dir={whole}", *KEYS)
    assert done.code == 0, done.err
    rows = metrics(whole / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert sum(row["rollout/groups_unfinished"] > 0 for row in rows) >= 3, [
        r["rollout/groups_unfinished"] for r in rows
    ]
    assert max(row["rollout/staleness_max"] for row in rows) == 1
    groups = [g for file in sorted((whole / "run" / "replay").glob("*")) for g in load_groups_file(file)]
    cut = [turn for g in groups for e in g.episodes for turn in e.turns if turn.pieces]
    assert cut and all(turn.version > turn.pieces[0][0] for turn in cut)  # written by two versions, and trained on

    command = ("train", str(material.config), f"run.dir={run}", *KEYS)
    saved = []
    for number in (2, 3):
        done = mdapo(*command, SABOTAGE=f"killed-before-commit:{number}")
        assert done.code == 75, done.err
        newest = max((run / "run" / "checkpoints").glob("step_*"))
        saved += [g for file in newest.glob("unfinished.safetensors") for g in load_groups_file(file)]
    assert any(e.end == "unfinished" and e.turns for g in saved for e in g.episodes)
    done = mdapo(*command)
    assert done.code == 0, done.err
    assert metrics(run / "run") == rows
    assert weights(run / "run") == weights(whole / "run")
    assert trained_prompts(run / "run") == trained_prompts(whole / "run")


def test_a_signal_in_mid_step_costs_two_ranks_no_bit(material: Material, tmp_path: Path) -> None:
    """The step begins again as it was, with what had been put off before it."""
    whole, stopped, slow = tmp_path / "whole", tmp_path / "stopped", tmp_path / "slow"
    done = mdapo("train", str(material.config), f"run.dir={whole}", *KEYS, "parallel.data=2")
    assert done.code == 0, done.err
    command, run = ("train", str(material.config), f"run.dir={stopped}", *KEYS, "parallel.data=2"), stopped / "run"
    running = Command(*command, SLOW=str(slow))
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(metrics(run)) >= 2, of=running)
    slow.touch()  # not before: slow calls go on beside the engine, and a step that is kept would feel it
    wait_for(Path(f"{slow}.noticed").exists, of=running)
    running.process.send_signal(signal.SIGTERM)
    done = running.wait()
    assert done.code == 75 and "Traceback" not in done.err, done.err
    slow.unlink()
    done = mdapo(*command)
    assert done.code == 0, done.err
    assert metrics(run) == metrics(whole / "run")
    assert weights(run) == weights(whole / "run")
    assert trained_prompts(run) == trained_prompts(whole / "run")
