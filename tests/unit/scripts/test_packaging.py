"""The lock names one version of everything that setup.py asks for, and no place to get it from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
LOCKS = ("requirements.lock", "requirements-data.lock")


def lines(lock: str) -> list[str]:
    text = (ROOT / lock).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.fixture
def setup_arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py tells setuptools; it needs nothing but the standard library and setuptools for that."""
    setuptools = pytest.importorskip("setuptools")
    told: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: told.update(arguments))
    monkeypatch.setitem(__import__("sys").modules, "torch", None)  # an import of torch would fail
    monkeypatch.chdir(ROOT)
    source = (ROOT / "setup.py").read_text(encoding="utf-8")
    exec(compile(source, str(ROOT / "setup.py"), "exec"), {"__name__": "__main__", "__file__": str(ROOT / "setup.py")})
    return told


@pytest.mark.parametrize("lock", LOCKS)
def test_every_line_is_a_name_and_one_version(lock: str) -> None:
    wrong = [line for line in lines(lock) if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)]
    assert not wrong


def test_the_lock_satisfies_what_setup_asks_for(setup_arguments: dict[str, Any]) -> None:
    locked = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines(LOCKS[0]))}
    extras = [text for texts in setup_arguments["extras_require"].values() for text in texts]
    for text in [*setup_arguments["install_requires"], *extras]:
        wanted = Requirement(text)
        name = canonicalize_name(wanted.name)
        assert name in locked, f"{text} is not in the lock"
        assert wanted.specifier.contains(locked[name]), f"{text}, but the lock has {locked[name]}"


def test_torch_is_locked_for_every_device() -> None:
    (torch,) = (line for line in lines(LOCKS[0]) if line.startswith("torch=="))
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+", torch), (
        "a local version (+cpu, +cu130) would exclude the other devices"
    )


def test_all_packages_and_data_are_in_the_distribution(setup_arguments: dict[str, Any]) -> None:
    on_disk = {".".join(f.parent.relative_to(ROOT).parts) for f in (ROOT / "mdapo").rglob("__init__.py")}
    assert set(setup_arguments["packages"]) == on_disk
    patterns = setup_arguments["package_data"]["mdapo.environments"]
    folder = ROOT / "mdapo" / "environments"
    shipped = {f for pattern in patterns for f in folder.glob(pattern)}
    assert shipped >= {f for f in (folder / "scenarios").iterdir() if f.is_file()}
