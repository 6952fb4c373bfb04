"""One process, one rank: megatron's groups for the tests of this folder, and tiny models made on the fly."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "distributed"))

import tiny_models

from mdapo.megatron import layout as layouts


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by kind; ``untied`` is a Llama with an output matrix of its own."""
    root = tmp_path_factory.mktemp("models")
    made = {kind: tiny_models.save_model(root / kind, kind, layers=2) for kind in ("llama", "qwen2", "qwen3")}
    return made | {"untied": tiny_models.save_model(root / "untied", "llama", tied=False, layers=2)}


@pytest.fixture
def layout(models: dict[str, Path]) -> Iterator[layouts.Layout]:
    yield layouts.init_distributed(tiny_models.config(models["llama"]), 60.0)
    layouts.destroy()
