"""What cannot be used ends in one clear message and exit code 2, from the command line, with nothing lost."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
from tiny_run import Material, mdapo

from mdapo.tracking.run_folder import open_run_folder

pytestmark = pytest.mark.e2e


def refused(*arguments: str, says: tuple[str, ...], **environment: str) -> None:
    done = mdapo(*arguments, **environment)
    assert done.code == 2, (done.out, done.err)
    assert "Traceback" not in done.out + done.err
    told = done.err if arguments[0] != "check" else done.out
    for text in says:
        assert text in told, told


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("actor.leaning_rate=1",), ("actor.leaning_rate", "unknown key")),
        (("run.total_stepz=1",), ("run.total_stepz", "run.total_steps")),
        (("actor.lr=fast",), ("actor.lr", "fast")),
        (("parallel.tensor=3",), ("4 attention heads", "parallel.tensor")),
        (("parallel.pipeline=3",), ("4 layers", "parallel.pipeline")),
        (("parallel.pipeline=2", "parallel.virtual_pipeline=4"), ("4 layers", "parallel.virtual_pipeline")),
        (("parallel.data=3",), ("8 samples do not divide by 3",)),
        (("model.path=no/such/folder",), ("model.path", "no/such/folder")),
        (("model.max_context=400",), ("model.max_context", "256 positions")),
        (("data.max_prompt_len=60",), ("model.max_context", "60")),
        (("data.train_files=[no_such.jsonl]",), ("no_such.jsonl",)),
        (("debug.mode=train",), ("debug.replay",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) and "=" in value[0] else "",
)
def test_a_configuration_that_cannot_run_is_refused_before_anything_starts(
    material: Material, tmp_path: Path, overrides: tuple[str, ...], says: tuple[str, ...]
) -> None:
    refused("train", str(material.config), f"run.dir={tmp_path}/runs", *overrides, says=says)
    assert not (tmp_path / "runs").exists()


def test_all_problems_are_told_at_once(material: Material, tmp_path: Path) -> None:
    wrong = ("actor.lr=fast", "parallel.tensor=0", "run.nam=x")
    refused("train", str(material.config), *wrong, says=("actor.lr", "parallel.tensor", "run.nam", "command line"))


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    refused("train", str(tmp_path / "none.yaml"), says=("none.yaml",))


def test_a_port_in_use_is_named(material: Material, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused("train", str(material.config), f"run.dir={tmp_path}", says=(port, "in use"), MASTER_PORT=port)
    refused("train", str(material.config), f"run.dir={tmp_path}", says=("MASTER_PORT=http",), MASTER_PORT="http")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"prompt": [{"role": "user", "content": "a?"}]}\n{"prompt": [{"role"\n', ("rows.jsonl:2",)),
        ("", ("rows.jsonl", "empty")),
        (
            json.dumps({"prompt": [{"role": "user", "content": "so long" * 20}], "uid": "long-one"}) + "\n",
            ("long-one", "tokens", "data.max_prompt_len=48"),
        ),
    ],
    ids=["broken line", "empty", "longer than the context"],
)
def test_data_that_cannot_be_used_is_named(
    material: Material, tmp_path: Path, text: str, says: tuple[str, ...]
) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    overrides = (f"data.train_files=[{tmp_path}/rows.jsonl]", "data.overlong_prompts=error", f"run.dir={tmp_path}")
    refused("train", str(material.config), *overrides, says=says)


def test_a_run_folder_in_use_is_refused_and_left_alone(material: Material, tmp_path: Path) -> None:
    holder = open_run_folder(tmp_path / "run", {"run": {"seed": 1}})
    holder.claim()
    before = {file: file.read_bytes() for file in (tmp_path / "run").glob("[!.]*")}
    try:
        refused("train", str(material.config), f"run.dir={tmp_path}", says=(f"{tmp_path}/run", "in use by process"))
    finally:
        holder.close()
    assert {file: file.read_bytes() for file in (tmp_path / "run").glob("[!.]*")} == before


def test_a_start_that_fails_leaves_an_earlier_run_in_its_place(material: Material, tmp_path: Path) -> None:
    earlier = open_run_folder(tmp_path / "run", {"run": {"seed": 1}})
    earlier.claim()
    earlier.close()
    before = {file: file.read_bytes() for file in (tmp_path / "run").glob("[!.]*")}
    (tmp_path / "mine.py").write_text("import no_such_module\n")
    name = f"environment.name={tmp_path}/mine.py:Mine"
    refused("train", str(material.config), f"run.dir={tmp_path}", name, says=("mine.py", "line 1", "no_such_module"))
    assert {file: file.read_bytes() for file in (tmp_path / "run").glob("[!.]*")} == before
    assert not (tmp_path / "run.1").exists()


def test_a_model_with_a_damaged_file_is_named(material: Material, tmp_path: Path) -> None:
    shutil.copytree(material.model, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\0" * 100)
    overrides = (f"model.path={tmp_path}/model", f"run.dir={tmp_path}")
    refused("train", str(material.config), *overrides, says=("model.safetensors",))


def test_check_tells_the_same_problems_with_the_same_code(material: Material) -> None:
    refused("check", str(material.config), "actor.lr=fast", "run.nam=x", says=("actor.lr", "run.nam"))
    refused("check", str(material.config), "parallel.tensor=3", says=("4 attention heads",))


def test_check_shows_the_plan_and_ends_with_0(material: Material) -> None:
    done = mdapo("check", str(material.config))
    assert done.code == 0, done.out + done.err
    assert "2 groups x 4 episodes = 8 samples" in done.out


def test_doctor_needs_no_configuration() -> None:
    done = mdapo("doctor")
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    for text in ("megatron-core 0.16", "device", "attention", "unpack", "cpu library", "MDAPO_DEVICE", "environment"):
        assert text in done.out
    refused("doctor", says=("MDAPO_DEVICE=tpu",), MDAPO_DEVICE="tpu")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise ValueError('x')", "3 x mine: raised ValueError"),
        ("return float('nan')", "3 x mine: returned NaN"),
        ("import os; os._exit(0)", "3 x mine: died"),
    ],
)
def test_a_reward_that_always_fails_is_explained(material: Material, tmp_path: Path, body: str, says: str) -> None:
    (tmp_path / "mine.py").write_text(f"def mine(messages, prompt, end):\n    {body}\n")
    reward = f"reward.functions=[{{name: '{tmp_path}/mine.py:mine'}}]"
    refused("train", str(material.config), f"run.dir={tmp_path}", reward, says=("not one of 3 conversations", says))


ENVIRONMENT = """
import os, sys
class Mine:
    def __init__(self, prompt, *, seed):
        self.prompt = prompt
    def opening(self):
        return self.prompt.messages
    def observe(self, messages):
        {body}
"""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("sys.exit(0)", "mine.py:Mine: observe() called sys.exit(0)"),
        ("sys.exit(3)", "mine.py:Mine: observe() called sys.exit(3)"),
        ("return None", "mine.py:Mine: observe() returned None"),
    ],
)
def test_an_environment_that_exits_or_breaks_its_contract_is_named(
    material: Material, tmp_path: Path, body: str, says: str
) -> None:
    (tmp_path / "mine.py").write_text(ENVIRONMENT.format(body=body))
    name = f"environment.name={tmp_path}/mine.py:Mine"
    refused("train", str(material.config), f"run.dir={tmp_path}", name, says=(says,))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_something_ends_with_0_is_no_success(material: Material, tmp_path: Path, ranks: int) -> None:
    (tmp_path / "mine.py").write_text(ENVIRONMENT.format(body="os._exit(0)"))
    name = f"environment.name={tmp_path}/mine.py:Mine"
    done = mdapo("train", str(material.config), f"run.dir={tmp_path}", name, f"parallel.data={ranks}")
    assert done.code == 70, (done.out, done.err)
    assert "rank 0 (exit code 0) ended by itself" in done.err
