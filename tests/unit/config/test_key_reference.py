"""configs/README.md describes every key, with the schema's own types and defaults."""

from __future__ import annotations

import re
from pathlib import Path

from mdapo.config.presets import PRESETS
from mdapo.config.schema import Algorithm

from .key_table import rows

README = (Path(__file__).resolve().parents[3] / "configs" / "README.md").read_text(encoding="utf-8")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def test_every_key_is_described_with_its_type_and_default() -> None:
    described = [cells(line) for line in README.split("\n") if re.match(r"\| `[a-z_]+\.", line)]
    assert [(row[0].strip("`"), row[1], row[2]) for row in described] == list(rows())
    assert all(len(row[3]) > 3 for row in described), "each has a meaning"


def test_the_table_of_algorithms_is_that_of_the_presets() -> None:
    lines = README.split("## `algorithm.name`")[1].split("\n")
    table = {row[0].strip("`"): row[1:5] for row in map(cells, lines) if row[0].strip("`") in PRESETS}
    assert set(table) == set(PRESETS)
    for name, preset in PRESETS.items():
        estimator, loss, mode, clips = table[name]
        assert (estimator.strip("`"), loss.strip("`"), mode.strip("`")) == tuple(list(preset.values())[:3])
        assert clips == f"{preset['clip_ratio_low']:g}, {preset['clip_ratio_high']:g}"
    assert set(PRESETS["dapo"]) <= set(Algorithm.model_fields)


def test_files_that_are_named_exist() -> None:
    folder = Path(__file__).resolve().parents[3] / "configs"
    intro = README.split("## run")[0]
    for name in re.findall(r"`([\w*]+\.yaml)`", intro):
        assert list(folder.glob(name)), name
