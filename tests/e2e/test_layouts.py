"""Training from a replay, in the recorded layout and in others; checkpoints that are read under another layout."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import ROOT, TWO_RANKS, Material, mdapo, metrics, rank_environment, weights

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
LIMIT = 1e-5


def from_replay(material: Material, whole: Path, folder: Path, *more: str, code: int = 0) -> Path:
    command = (
        "train",
        str(material.config),
        f"run.dir={folder}",
        "debug.mode=train",
        f"debug.replay={whole}/replay",
    )
    done = mdapo(*command, "data.val_files=[]", "run.eval_every=0", *more)
    assert done.code == code and "Traceback" not in done.err, done.err
    return folder / "run"


def actor(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k == "step" or k.startswith(("actor/", "batch/"))} for row in rows]


@pytest.fixture(scope="module")
def replayed(material: Material, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same steps from the recording: more are asked for, but it ends there."""
    return from_replay(material, whole, tmp_path_factory.mktemp("replayed"), "parallel.data=2", "run.total_steps=9")


def test_training_from_a_replay_is_bit_equal_to_the_recorded_run(whole: Path, replayed: Path) -> None:
    assert actor(metrics(replayed)) == actor(metrics(whole))
    assert weights(replayed) == weights(whole)


def test_a_checkpoint_goes_on_under_every_other_layout(
    material: Material, whole: Path, replayed: Path, tmp_path: Path
) -> None:
    """Saved by two data-parallel ranks, read by one; saved by one, read by two tensor-parallel ranks with sequence
    parallelism; saved by those, read by a pipeline of two with two virtual stages each; a step in each."""
    run = tmp_path / "run"
    shutil.copytree(replayed, run)
    for folder in sorted((run / "checkpoints").iterdir())[3:]:
        shutil.rmtree(folder)
    layouts = {
        4: ("parallel.data=1",),
        5: ("parallel.data=1", "parallel.tensor=2", "parallel.sequence=true"),
        6: ("parallel.data=1", "parallel.pipeline=2", "parallel.virtual_pipeline=2"),
    }
    from_replay(material, whole, tmp_path, "parallel.distributed_optimizer=false", code=2)  # another format
    for step, layout in layouts.items():
        from_replay(material, whole, tmp_path, f"run.total_steps={step}", *layout)
    found, expected = actor(metrics(run)), actor(metrics(whole))
    assert len(found) == len(expected) == 6
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("actor/loss", "actor/grad_norm", "actor/entropy", "actor/rollout_logp_gap"):
            assert ours[name] == pytest.approx(theirs[name], rel=LIMIT, abs=LIMIT), (ours["step"], name)
    ours, theirs = (load_file(path / "hf" / "model.safetensors") for path in (run, whole))
    largest = max(float((ours[name] - tensor).abs().max()) for name, tensor in theirs.items())
    assert largest <= LIMIT


PROGRAM = """
import json, sys
import torch
import torch.distributed as dist
from mdapo.config.load import load
from mdapo.megatron.checkpoint import optimizer_steps
from mdapo.trainer.flow import Trainer
with Trainer(load(sys.argv[1], sys.argv[2:])) as trainer:
    trainer.resume()
    steps = sorted(optimizer_steps(trainer.actor))
    groups = [trainer.patient, dist.group.WORLD]
    waits = [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]
    if trainer.layout.rank == 0:
        print(json.dumps(["found", steps, *waits]), flush=True)
"""


def test_every_parameter_resumes_with_its_own_step_count(material: Material, whole: Path, tmp_path: Path) -> None:
    """Megatron's distributed optimizer as shipped loses it, or counts once for each parameter.

    Also: ranks wait longer for rank 0, which may collect for hours, than for each other.
    """
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(tmp_path / "program.py"), str(material.config), f"run.dir={tmp_path}", *TWO_RANKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=rank_environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (line,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["found"')]
    _, steps, for_rank_0, for_others = line
    assert steps == [6.0]
    assert for_rank_0 >= 3600 > for_others == 60


def test_exported_weights_are_the_models_own_names_and_shapes(material: Material, whole: Path) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (material.model, whole / "hf"))
    assert before.keys() == after.keys()
    assert all(before[name].shape == after[name].shape for name in before)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    others = {file.name for file in material.model.iterdir()}
    assert {file.name for file in (whole / "hf").iterdir()} == others
