"""``sync.check`` in whole runs: every rank scores what the engine writes with the weights that it was brought."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import TWO_RANKS, Material, mdapo, metrics, weights

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
SHORT = ("run.total_steps=2", "run.eval_before=false", "run.eval_after=false", "run.eval_every=0")
GAP = "sync/logprob_gap"


def gaps(run: Path) -> list[float]:
    return [row[GAP] for row in metrics(run)]


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.data=1", "parallel.tensor=2", "parallel.sequence=true"),
        ("parallel.data=1", "parallel.pipeline=2", "parallel.virtual_pipeline=2"),
    ],
    ids=["tensor", "pipeline"],
)
def test_every_layout_finds_its_weights_at_the_engine(
    material: Material, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    done = mdapo("train", str(material.config), f"run.dir={tmp_path}", "sync.check=true", *SHORT, *layout)
    assert done.code == 0, done.err
    assert "sync.check: the local engine: log-probs within" in done.out
    assert done.out.count("sync_gap=") == 2
    assert len(gaps(tmp_path / "run")) == 2 and max(gaps(tmp_path / "run")) <= 1e-4


def test_a_check_changes_no_bit_of_a_run(material: Material, whole: Path, tmp_path: Path) -> None:
    done = mdapo("train", str(material.config), f"run.dir={tmp_path}", "sync.check=true", *TWO_RANKS)
    assert done.code == 0, done.err
    run = tmp_path / "run"
    assert max(gaps(run)) <= 1e-4
    assert [{k: v for k, v in row.items() if k != GAP} for row in metrics(run)] == metrics(whole)
    assert weights(run) == weights(whole)


def test_an_engine_with_other_weights_ends_the_run_with_a_whole_step(
    material: Material, whole: Path, tmp_path: Path
) -> None:
    """The first sync is the start's, so the third is that of step 2, which is trained and saved; then it goes on."""
    command = ("train", str(material.config), f"run.dir={tmp_path}", "sync.check=true", *TWO_RANKS)
    done = mdapo(*command, SABOTAGE="other-weights:3")
    assert done.code == 2 and "Traceback" not in done.err, done.err
    assert "after the sync to version 2 log-probs are more than 0.0001 off the actor's:" in done.err
    assert "the local engine: " in done.err and "sync.check=false" in done.err
    run = tmp_path / "run"
    newest = max((run / "checkpoints").glob("step_*"))
    assert json.loads((newest / "state.json").read_text())["train"]["step"] == 2
    done = mdapo(*command)
    assert done.code == 0, done.err
    rows = metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [{k: v for k, v in row.items() if k != GAP} for row in rows] == metrics(whole)
    assert weights(run) == weights(whole)


def test_what_leaves_the_device_between_steps_changes_no_bit(material: Material, whole: Path, tmp_path: Path) -> None:
    """With a check after each sync, a checkpoint each step, and a resumption from one."""
    keys = ("sync.check=true", "actor.offload=optimizer", *TWO_RANKS)
    done = mdapo("train", str(material.config), f"run.dir={tmp_path}", *keys, SABOTAGE="killed-before-commit:4")
    assert done.code == 75, done.err
    done = mdapo("train", str(material.config), f"run.dir={tmp_path}", *keys)
    assert done.code == 0, done.err
    run = tmp_path / "run"
    assert [{k: v for k, v in row.items() if k != GAP} for row in metrics(run)] == metrics(whole)
    assert weights(run) == weights(whole)
