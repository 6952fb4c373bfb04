"""Lets the files of this folder import each other, and makes the one tiny model and data set that all runs use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny_run import TWO_RANKS, Material, make_material, mdapo


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="session")
def whole(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of two ranks with the distributed optimizer, in one go, with everything they were trained on."""
    folder = tmp_path_factory.mktemp("whole")
    done = mdapo("train", str(material.config), f"run.dir={folder}", *TWO_RANKS)
    assert done.code == 0 and done.err == "", done.err
    (folder / "said.txt").write_text(done.out)
    return folder / "run"
