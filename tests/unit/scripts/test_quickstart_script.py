"""scripts/quickstart.sh: which servers' Python it passes on. Stand-ins for the programs that it calls say what came."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TRAIN = ["train", "configs/quickstart.yaml"]


class Checkout:
    """A copy of the script beside stand-ins. ``beside``: SGLang is in mdapo's own environment; ``device``: what mdapo
    runs on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.beside, self.device = folder, False, "cpu"
        (folder / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "quickstart.sh", folder / "scripts")
        self.program(folder / "scripts" / "install.sh", "exit 0")
        self.made = self.program(folder / "made" / "bin" / "python", "exit 1")
        self.program(folder / "scripts" / "install_sglang_cpu.sh", f'touch "$MADE"\necho working\necho {self.made}')
        self.program(folder / ".venv" / "bin" / "mdapo", 'printf "%s\\n" "$@"')
        own = 'case "$*" in *find_spec*) exit "$BESIDE" ;; *device*) echo "$DEVICE" ;; esac'
        self.program(folder / ".venv" / "bin" / "python", own)

    @staticmethod
    def program(path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    @property
    def installed(self) -> bool:
        return (self.folder / "installed").exists()

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        own = {"BESIDE": str(int(not self.beside)), "DEVICE": self.device, "MADE": str(self.folder / "installed")}
        return subprocess.run(
            ["bash", str(self.folder / "scripts" / "quickstart.sh"), *arguments],
            env={"PATH": os.environ["PATH"], **own, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "a copy")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run.seed=1"],
        ["rollout.engine=local"],
        ["rollout.engine=sglang", "rollout.engine=local"],
        ["rollout.engine=sglang", "rollout.urls=['http://h:1']"],
        ["rollout.engine=sglang", "rollout.server_python=/env/bin/python"],
    ],
)
def test_where_no_server_is_started_or_its_python_is_named_nothing_is_added(
    checkout: Checkout, arguments: list[str]
) -> None:
    done = checkout.run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [*TRAIN, *arguments]
    assert not checkout.installed


@pytest.mark.parametrize("engine", ["rollout.engine=sglang", 'rollout.engine="sglang"', "rollout.engine='sglang'"])
def test_an_environment_with_sglang_is_made_and_passed_on(checkout: Checkout, engine: str) -> None:
    done = checkout.run("run.seed=1", engine)
    assert (done.returncode, done.stderr) == (0, f"working\n{checkout.made}\n"), "told, and no argument"
    expected = [*TRAIN, "run.seed=1", engine, f"rollout.server_python={checkout.made}"]
    assert done.stdout.splitlines() == expected
    assert checkout.installed


def test_sglang_beside_mdapo_comes_first(checkout: Checkout) -> None:
    checkout.beside = True
    checkout.device = "cuda"
    done = checkout.run("rollout.engine=sglang", MDAPO_SGLANG_ENV="/nowhere")
    assert done.stdout.splitlines() == [*TRAIN, "rollout.engine=sglang"], done.stderr
    assert not checkout.installed


def test_an_environment_of_the_users_is_taken_as_it_is(checkout: Checkout) -> None:
    """Also on a GPU, and never written to: it is not ours."""
    checkout.device = "cuda"
    python = checkout.program(checkout.folder.parent / "own" / "bin" / "python", "exit 0")
    done = checkout.run("rollout.engine=sglang", MDAPO_SGLANG_ENV=str(python.parents[1]))
    assert done.stdout.splitlines() == [*TRAIN, "rollout.engine=sglang", f"rollout.server_python={python}"]
    assert not checkout.installed


def test_on_a_gpu_no_server_for_a_cpu_is_made(checkout: Checkout) -> None:
    checkout.device = "cuda"
    done = checkout.run("rollout.engine=sglang")
    assert (done.returncode, done.stdout) == (2, "")
    assert "install SGLang for cuda" in done.stderr and "rollout.server_python=" in done.stderr
    assert not checkout.installed


def test_an_installation_that_fails_ends_it(checkout: Checkout) -> None:
    checkout.program(checkout.folder / "scripts" / "install_sglang_cpu.sh", "echo no disk >&2; exit 2")
    done = checkout.run("rollout.engine=sglang")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "no disk\n")
