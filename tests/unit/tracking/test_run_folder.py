from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mdapo.errors import StorageError, UserError
from mdapo.tracking.environment import describe_environment, git_revision
from mdapo.tracking.run_folder import FILES, FOLDERS, RunFolder, differences, open_eval_folder, open_run_folder, redact

HOLD = """
import sys
from pathlib import Path
from mdapo.tracking.run_folder import open_run_folder
folder = open_run_folder(Path(sys.argv[1]), {})
print("open", flush=True)
sys.stdin.read()
"""


def config(**changes: Any) -> dict[str, Any]:
    run = {"seed": 0, "total_steps": 10}
    return {"run": run | changes, "model": {"path": "m"}, "data": {"train_files": ["a.jsonl"]}}


def claimed(path: Path, settings: dict[str, Any], **how: Any) -> RunFolder:
    folder = open_run_folder(path, settings, **how)
    folder.claim()
    return folder


def hold(path: Path) -> subprocess.Popen[str]:
    """A process that holds the folder until its stdin closes."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    return process


def test_a_second_run_on_the_same_folder_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    first = hold(tmp_path / "run")
    try:
        with pytest.raises(UserError, match=rf"in use by process {first.pid} on \S+ since \d{{4}}-"):
            claimed(tmp_path / "run", {})
    finally:
        first.communicate()
    claimed(tmp_path / "run", {}).close()


def test_a_lock_left_by_a_killed_process_is_reclaimed(tmp_path: Path) -> None:
    first = hold(tmp_path / "run")
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert (tmp_path / "run" / ".lock").exists()
    claimed(tmp_path / "run", {}).close()
    assert f"process {os.getpid()} " in (tmp_path / "run" / ".lock").read_text()


def test_the_same_run_goes_on_in_its_folder(tmp_path: Path) -> None:
    said: list[str] = []
    claimed(tmp_path / "run", config(), notify=said.append).close()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}")
    folder = claimed(tmp_path / "run", config(), notify=said.append)
    folder.close()
    assert folder.path == tmp_path / "run" and (folder.path / "metrics.jsonl").exists()
    assert said == []
    assert yaml.safe_load((folder.path / "config.yaml").read_text()) == config()


def test_changed_settings_are_named_and_the_former_configuration_is_kept(tmp_path: Path) -> None:
    said: list[str] = []
    claimed(tmp_path / "run", config()).close()
    claimed(tmp_path / "run", config(total_steps=20), notify=said.append).close()
    assert len(said) == 1 and "run.total_steps: 10 -> 20" in said[0]
    assert yaml.safe_load((tmp_path / "run" / "config.1.yaml").read_text()) == config()
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()) == config(total_steps=20)


def test_another_run_is_moved_aside_never_overwritten(tmp_path: Path) -> None:
    said: list[str] = []
    for seed in (0, 1, 2):
        folder = claimed(tmp_path / "run", config(seed=seed), notify=said.append)
        assert not (folder.path / "summary.json").exists()
        (folder.path / "summary.json").write_text(str(seed))
        folder.close()
    contents = {f.name: (f / "summary.json").read_text() for f in tmp_path.iterdir()}
    assert contents == {"run": "2", "run.1": "0", "run.2": "1"}
    assert len(said) == 2 and "run.seed: 0 -> 1" in said[0] and "run.1" in said[0]


def test_a_fresh_run_moves_even_the_same_run_aside(tmp_path: Path) -> None:
    claimed(tmp_path / "run", config()).close()
    claimed(tmp_path / "run", config(), fresh=True).close()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["run", "run.1"]


def test_a_folder_that_is_opened_and_not_claimed_keeps_what_it_holds(tmp_path: Path) -> None:
    claimed(tmp_path / "run", config()).close()
    before = {file: file.read_bytes() for file in (tmp_path / "run").glob("[!.]*")}
    for changed, fresh in ((config(seed=1), False), (config(total_steps=20), False), (config(), True)):
        open_run_folder(tmp_path / "run", changed, fresh=fresh).close()
    assert [f.name for f in tmp_path.iterdir()] == ["run"]
    assert {file: file.read_bytes() for file in (tmp_path / "run").glob("[!.]*")} == before


def test_a_run_that_cannot_go_on_is_moved_aside_with_the_reason(tmp_path: Path) -> None:
    said: list[str] = []
    claimed(tmp_path / "run", config()).close()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}")
    folder = open_run_folder(tmp_path / "run", config(total_steps=20), notify=said.append)
    folder.claim(lost="has no checkpoint")
    folder.close()
    assert (tmp_path / "run.1" / "metrics.jsonl").exists() and not (folder.path / "metrics.jsonl").exists()
    assert said == [f"{tmp_path}/run: has no checkpoint; it is kept as {tmp_path}/run.1"]


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("make", [lambda p: p.write_text("precious"), lambda p: p.symlink_to("/nowhere")])
def test_a_file_where_a_folder_must_be_is_refused_before_anything_changes(
    tmp_path: Path, name: str, make: Callable[[Path], object]
) -> None:
    claimed(tmp_path / "run", config()).close()
    make(tmp_path / "run" / name)
    for _ in range(2):  # the lock is not kept
        with pytest.raises(UserError, match=rf"{name}: is no folder"):
            open_run_folder(tmp_path / "run", config(total_steps=20))
    if name in ("checkpoints", "eval"):
        with pytest.raises(UserError, match=rf"{name}: is no folder"):
            open_eval_folder(tmp_path / "run")
    assert os.path.lexists(tmp_path / "run" / name)
    claimed(tmp_path / "run", config(seed=1)).close()  # another run: all of it is moved aside
    assert os.path.lexists(tmp_path / "run.1" / name)


def test_an_export_that_is_a_link_is_refused(tmp_path: Path) -> None:
    claimed(tmp_path / "run", config()).close()
    (tmp_path / "run" / "hf").symlink_to(tmp_path)
    with pytest.raises(UserError, match="hf: is a link"):
        open_run_folder(tmp_path / "run", config())


@pytest.mark.parametrize("name", FILES)
def test_a_folder_where_a_file_must_be_is_refused(tmp_path: Path, name: str) -> None:
    claimed(tmp_path / "run", config()).close()
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).mkdir()
    with pytest.raises(UserError, match=rf"{name}: is no file"):
        open_run_folder(tmp_path / "run", config())


def test_an_environment_that_is_not_utf8_hinders_nothing_and_is_kept(tmp_path: Path) -> None:
    claimed(tmp_path, config(), environment={"torch": 1}).close()
    (tmp_path / "env.json").write_bytes(b"\xff\xfe")
    claimed(tmp_path, config(), environment={"torch": 1}).close()
    assert json.loads((tmp_path / "env.json").read_text()) == {"torch": 1}
    assert (tmp_path / "env.1.json").read_bytes() == b"\xff\xfe"


@pytest.mark.parametrize("text", [b"\xff", b"a: [", b"a: 2020-99-99"])
def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.yaml").write_bytes(text)
    with pytest.raises(UserError, match=r"config\.yaml: not readable as YAML"):
        claimed(tmp_path, config())


def test_a_folder_in_use_is_not_moved_aside(tmp_path: Path) -> None:
    first = hold(tmp_path / "run")
    try:
        with pytest.raises(UserError, match="in use"):
            claimed(tmp_path / "run", config(seed=1), fresh=True)
    finally:
        first.communicate()
    assert [f.name for f in tmp_path.iterdir()] == ["run"]


def test_a_run_killed_while_its_folder_was_made_goes_on(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("process 1 on nowhere since never")
    (tmp_path / ".config.yaml.partial").write_text("run:")
    claimed(tmp_path, config()).close()
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == config()


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not a run's folder"):
        claimed(tmp_path, config())
    assert [f.name for f in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("make", [lambda p: p.write_text(""), lambda p: p.symlink_to("/dev/null/nowhere")])
def test_a_path_that_can_not_be_a_folder_is_the_users_error(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "run")
    with pytest.raises(UserError, match="cannot be used as run folder"):
        claimed(tmp_path / "run", config())


def test_secrets_reach_no_file(tmp_path: Path) -> None:
    secret = {"rollout": {"engine_args": {"api_key": "s3cret", "nested": [{"hf-access-token": "s3cret"}]}}}
    claimed(tmp_path / "run", secret | {"actor": {"ppo_max_token_len": 8}}).close()
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert "s3cret" not in text and "ppo_max_token_len: 8" in text
    assert redact({"password": None}) == {"password": None}


def test_differences_name_added_and_removed_keys() -> None:
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "d": 3}}) == ["a.c: 2 -> None", "a.d: None -> 3"]
    assert differences({"betas": [0.9, 0.95]}, {"betas": (0.9, 0.95)}) == []


def test_environment_names_versions_and_hardware_and_no_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MDAPO_TEST_TOKEN", "s3cret-value")
    claimed(tmp_path / "run", config(), environment=describe_environment(["NVIDIA H200"])).close()
    text = (tmp_path / "run" / "env.json").read_text()
    found = json.loads(text)
    assert found["packages"]["pydantic"] and found["hardware"]["cores"] >= 1
    assert found["hardware"]["accelerators"] == ["NVIDIA H200"]
    assert "s3cret-value" not in text


def test_no_revision_outside_a_repository_that_holds_the_package(tmp_path: Path) -> None:
    assert git_revision(tmp_path) is None
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "module.py").write_text("")
    assert git_revision(tmp_path / "site-packages") is None


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_storage_that_fails_is_no_fault_of_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, "refused")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match="cannot be used as run folder: refused"):
        open_run_folder(tmp_path / "run", {})
    with pytest.raises(StorageError, match="cannot be used as run folder: refused"):
        open_eval_folder(tmp_path / "run")
