"""The shell scripts parse, say how they are used, start what they say; a stand-in for Python prints its arguments."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = sorted([*(ROOT / "scripts").glob("*.sh"), *(ROOT / "scripts").glob("*.sbatch"), ROOT / ".ci" / "run"])


def run(script: str, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = ["bash", str(ROOT / "scripts" / script), *arguments]
    return subprocess.run(command, cwd=cwd, env=kept | environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return tmp_path / "venv"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_parses(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], timeout=60).returncode == 0


def test_train_is_the_torchrun_line_from_anywhere(venv: Path, tmp_path: Path) -> None:
    places = {"NNODES": "4", "NODE_RANK": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234", "NPROC_PER_NODE": "8"}
    found = run("train.sh", "a b.yaml", "run.name=x y", cwd=tmp_path, VENV=str(venv), **places)
    expected = ["-m", "torch.distributed.run", "--nnodes", "4", "--node-rank", "2", "--nproc-per-node", "8"]
    expected += [
        "--master-addr",
        "10.0.0.1",
        "--master-port",
        "1234",
        "-m",
        "mdapo.trainer",
        "a b.yaml",
        "run.name=x y",
    ]
    assert found.stdout.splitlines() == expected


def test_train_on_one_machine_needs_no_variables(venv: Path, tmp_path: Path) -> None:
    found = run("train.sh", "a.yaml", cwd=tmp_path, VENV=str(venv))
    assert found.returncode == 0
    said = found.stdout.splitlines()
    assert said[:3] == ["-m", "mdapo.trainer.launch", "29500"], "whether the port is free"
    assert said[3:9] == ["-m", "torch.distributed.run", "--nnodes", "1", "--node-rank", "0"]


@pytest.mark.parametrize("name", ["NPROC_PER_NODE", "NNODES", "NODE_RANK"])
def test_train_refuses_what_is_no_number(venv: Path, tmp_path: Path, name: str) -> None:
    found = run("train.sh", "a.yaml", cwd=tmp_path, VENV=str(venv), **{"MASTER_ADDR": "10.0.0.1", name: "two"})
    assert found.returncode == 2 and f"{name}=two" in found.stderr and not found.stdout


def test_train_refuses_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        found = run("train.sh", "a.yaml", cwd=tmp_path, VENV=sys.prefix, MASTER_PORT=port)
    assert found.returncode == 2 and f"MASTER_PORT={port}: the port cannot be used" in found.stderr


def test_train_says_what_is_missing(venv: Path, tmp_path: Path) -> None:
    assert run("train.sh", cwd=tmp_path).returncode == 2
    alone = run("train.sh", "a.yaml", cwd=tmp_path, VENV=str(venv), NNODES="2")
    assert alone.returncode == 2 and "MASTER_ADDR" in alone.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the scripts without a .venv beside it, and a folder bin/ with a Python that lacks everything."""
    (tmp_path / "bin").mkdir()
    bare = tmp_path / "bin" / "python3"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    shutil.copytree(ROOT / "scripts", tmp_path / "copy" / "scripts")
    return tmp_path / "copy"


def without_venv(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{checkout.parent / 'bin'}:{os.environ['PATH']}"
    command = ["bash", str(checkout / "scripts" / "train.sh"), "a.yaml"]
    return subprocess.run(
        command, cwd=checkout, env={"PATH": path} | environment, capture_output=True, text=True, timeout=60
    )


def test_train_without_a_venv_says_how_to_get_one(checkout: Path) -> None:
    found = without_venv(checkout)
    assert found.returncode == 2 and not found.stdout
    assert "scripts/install.sh" in found.stderr and len(found.stderr.splitlines()) == 1


def test_train_names_a_venv_that_is_not_there(checkout: Path) -> None:
    found = without_venv(checkout, VENV="/no/such")
    assert found.returncode == 2 and found.stderr.startswith("train: VENV=/no/such: no bin/python there")


def test_train_takes_a_python_that_has_everything(checkout: Path) -> None:
    whole = checkout.parent / "bin" / "python3"
    whole.write_text('#!/bin/sh\n[ "$1" = -c ] || printf "%s\\n" "$@"\n')
    found = without_venv(checkout)
    assert found.returncode == 0 and found.stdout.splitlines()[0] == "-m", found.stderr


def test_install_refuses_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho Python 3.9.1\nexit 1\n")
    old.chmod(0o755)
    found = run("install.sh", cwd=tmp_path, PYTHON=str(old), VENV=str(tmp_path / "new"))
    assert found.returncode == 2 and "3.11" in found.stderr and "Python 3.9.1" in found.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("python", ["/bin/true", "/bin/false", "/usr/bin/yes", "/bin/cat", "/etc/passwd", "no-such"])
def test_install_refuses_what_is_no_python(tmp_path: Path, python: str) -> None:
    found = run("install.sh", cwd=tmp_path, PYTHON=python, VENV=str(tmp_path / "new"))
    assert found.returncode == 2 and f"PYTHON={python} is not a Python 3.11 or newer" in found.stderr
    assert len(found.stderr.splitlines()) == 2 and not (tmp_path / "new").exists()


@pytest.mark.parametrize("threads", ["abc", "0", "-1", "1.5"])
def test_train_refuses_a_number_of_threads_that_is_none(venv: Path, tmp_path: Path, threads: str) -> None:
    found = run("train.sh", "a.yaml", cwd=tmp_path, VENV=str(venv), OMP_NUM_THREADS=threads)
    assert found.returncode == 2 and f"OMP_NUM_THREADS={threads}" in found.stderr and not found.stdout
