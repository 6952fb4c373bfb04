"""Steps without anything to learn, losses that are not finite, disks that are full, checkpoints that are damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import Material, mdapo, metrics, weights

from mdapo.trainer.commit import newest_commit

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
QUIET = ("data.val_files=[]", "run.eval_every=0")


def checkpoints(run: Path) -> list[str]:
    return sorted(folder.name for folder in (run / "checkpoints").iterdir())


def exported(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "hf" / "model.safetensors")


def test_what_happens_when_too_few_groups_teach(material: Material, tmp_path: Path) -> None:
    """``stop`` ends with code 4 and a checkpoint; the run goes on with ``skip`` (no update at all) and then with
    ``train_partial``, which trains on what there is."""
    reward = {"name": f"{Path(__file__).with_name('plugin.py')}:vowels"}

    def run(*more: str, same_for: list[str]) -> tuple[int, str]:
        functions = json.dumps([{**reward, "args": {"same_for": same_for}}])
        limits = ("data.gen_batch_size=2", "algorithm.filter_groups.max_num_gen_batches=1", "data.shuffle=false")
        done = mdapo(
            "train",
            str(material.config),
            f"run.dir={tmp_path}",
            f"reward.functions={functions}",
            *limits,
            *QUIET,
            *more,
        )
        return done.code, done.err

    code, err = run("algorithm.filter_groups.on_limit=stop", same_for=["Wh"])
    assert code == 4 and "0 of 2 groups after 1 rounds" in err and "Traceback" not in err
    assert checkpoints(tmp_path / "run") == ["step_000000"]

    code, err = run("algorithm.filter_groups.on_limit=skip", "run.total_steps=2", same_for=["Wh"])
    assert code == 0, err
    assert all(torch.equal(a, b) for a, b in zip(exported(tmp_path / "run").values(), original(material), strict=True))
    rows = metrics(tmp_path / "run")
    assert [row["rollout/groups_trained"] for row in rows] == [0, 0]
    assert all(row["actor/updates"] == 0 and row["version"] == 0 for row in rows)

    code, err = run("run.total_steps=3", same_for=["Where", "Why"])  # the third step asks Where and When
    assert code == 0, err
    last = metrics(tmp_path / "run")[-1]
    assert (last["rollout/groups_trained"], last["rollout/groups_dropped"], last["version"]) == (1, 1, 1)
    assert last["actor/grad_norm"] > 0


def original(material: Material) -> list[torch.Tensor]:
    return list(load_file(material.model / "model.safetensors").values())


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_all(material: Material, tmp_path: Path) -> None:
    command = ("train", str(material.config), f"run.dir={tmp_path}", "parallel.data=2", *QUIET)
    done = mdapo(*command, "run.total_steps=1", SABOTAGE="nan-loss:1")
    assert done.code == 0, done.err
    (row,) = metrics(tmp_path / "run")
    assert row["actor/skipped"] == 1
    assert "not finite; prompts: train-" in done.out
    assert all(torch.equal(a, b) for a, b in zip(exported(tmp_path / "run").values(), original(material), strict=True))

    done = mdapo(*command, "run.total_steps=6", SABOTAGE="nan-loss:99")
    assert done.code == 3 and "3 steps in a row" in done.err and "Traceback" not in done.err
    assert checkpoints(tmp_path / "run") == ["step_000001", "step_000002"]

    done = mdapo(*command, "run.total_steps=3")
    assert done.code == 0, done.err
    assert all(tensor.isfinite().all() for tensor in exported(tmp_path / "run").values())
    assert metrics(tmp_path / "run")[-1]["actor/skipped"] == 0


def test_weights_that_are_not_finite_are_never_saved(material: Material, tmp_path: Path) -> None:
    done = mdapo("train", str(material.config), f"run.dir={tmp_path}", *QUIET, SABOTAGE="inf-weight:1")
    assert done.code == 3 and "weights that are not finite" in done.err and "Traceback" not in done.err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_disk_that_is_full_ends_with_74_and_the_last_checkpoint(material: Material, tmp_path: Path) -> None:
    command = ("train", str(material.config), f"run.dir={tmp_path}", *QUIET)
    done = mdapo(*command, "run.total_steps=1", "run.export_hf=false")
    assert done.code == 0, done.err
    done = mdapo(*command, "run.total_steps=2", file_limit_bytes=50_000)
    assert done.code == 74 and "checkpoint not written" in done.err and "Traceback" not in done.err, done.err
    found = newest_commit(tmp_path / "run" / "checkpoints")
    assert found.path is not None and found.path.name == "step_000001" and not found.problems


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(material: Material, tmp_path: Path) -> None:
    command = ("train", str(material.config), f"run.dir={tmp_path}", "run.total_steps=3", "tracking.replay=true")
    done = mdapo(*command)
    assert done.code == 0, done.err
    run, first = tmp_path / "run", weights(tmp_path / "run")
    rows, asked = metrics(run), run / "checkpoints" / "step_000003"
    shard = max((file for file in (asked / "model").iterdir()), key=lambda file: file.stat().st_size)
    flip(shard)
    done = mdapo(*command)
    assert done.code == 0, done.err
    assert f"passed over: {asked}: model/{shard.name} is damaged" in done.out
    assert f"weights of step 2, from {run}/checkpoints/step_000002" in done.out
    assert (metrics(run), weights(run)) == (rows, first)

    evaluated = mdapo("eval", *command[1:])
    assert evaluated.code == 0, evaluated.err
    summary = json.loads((run / "summary.json").read_text())
    found = json.loads((run / "eval" / "step_000003.json").read_text())
    assert found["eval/reward"] == summary["reward_after"] and found["eval/success"] == summary["success_after"]
    assert "reward" in evaluated.out and (run / "eval" / "episodes" / "eval_000003.txt").exists()

    for folder in (run / "checkpoints").iterdir():
        flip(folder / "state.json")
    before = (run / "metrics.jsonl").read_bytes()
    done = mdapo(*command)
    assert done.code == 2 and "no checkpoint is usable" in done.err and "Traceback" not in done.err
    assert all(name in done.err for name in ("step_000001", "step_000002", "step_000003"))
    assert (run / "metrics.jsonl").read_bytes() == before


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_a_rollout_without_training_records_what_can_be_trained_on(material: Material, tmp_path: Path) -> None:
    command = ("train", str(material.config), f"run.dir={tmp_path}", "run.total_steps=2", "run.name=talk", *QUIET)
    done = mdapo(*command, "debug.mode=rollout")
    assert done.code == 0, done.err
    rows = metrics(tmp_path / "talk")
    assert all(row["actor/updates"] == 0 and row["version"] == 0 for row in rows)
    assert not (tmp_path / "talk" / "hf").exists()
    replay = f"debug.replay={tmp_path}/talk/replay"
    done = mdapo(*command, "debug.mode=train", replay, "run.name=learn")
    assert done.code == 0, done.err
    assert [row["actor/updates"] for row in metrics(tmp_path / "learn")] == [1, 1]
    refused = mdapo(*command, "debug.mode=train", replay)
    assert refused.code == 2 and "run.name" in refused.err


def test_eval_of_a_run_that_has_not_begun_evaluates_the_model_and_leaves_the_folder_free(
    material: Material, tmp_path: Path
) -> None:
    done = mdapo("eval", str(material.config), f"run.dir={tmp_path}")
    assert done.code == 0, done.err
    assert "the model itself" in done.out
    assert json.loads((tmp_path / "run" / "eval" / "step_000000.json").read_text())["step"] == 0
    done = mdapo("train", str(material.config), f"run.dir={tmp_path}", "run.total_steps=1", "run.eval_after=false")
    assert done.code == 0, done.err
    missing = mdapo("eval", str(material.config), f"run.dir={tmp_path}", *QUIET)
    assert missing.code == 2 and "data.val_files" in missing.err
