"""Weights by way of the disk, as far as it goes without a server; with one: tests/sglang, tests/faults."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mdapo.errors import UserError
from mdapo.rollout.engine import EngineError
from mdapo.rollout.sglang_disk import DiskWeights


def weights(scale: float = 1.0) -> Iterator[tuple[str, torch.Tensor]]:
    """From one buffer that is used again, as a sender may."""
    buffer = torch.empty(4, 3)
    for i in range(5):
        yield f"w{i}", buffer.fill_(scale * i).t()


def files(disk: DiskWeights, version: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(disk.folder(version).iterdir()):
        part = load_file(file)
        assert not found.keys() & part.keys()
        found |= part
    return found


def test_all_weights_are_there_in_files_of_bounded_size(tmp_path: Path) -> None:
    disk = DiskWeights(tmp_path, file_bytes=100)  # two tensors of 48 bytes
    assert asyncio.run(disk.send([], weights(), 3)) == {}
    assert len(list(disk.folder(3).iterdir())) == 3
    found = files(disk, 3)
    assert sorted(found) == [f"w{i}" for i in range(5)]
    assert all(torch.equal(found[f"w{i}"], torch.full((3, 4), float(i))) for i in range(5))


def test_only_the_newest_whole_version_stays(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights()
        raise RuntimeError("a rank died")

    disk = DiskWeights(tmp_path)
    asyncio.run(disk.send([], weights(), 1))
    with pytest.raises(RuntimeError):
        asyncio.run(disk.send([], broken(), 2))
    assert not disk.folder(2).exists()
    assert len(files(disk, 1)) == 5
    asyncio.run(disk.send([], weights(2.0), 2))
    assert [folder.name for folder in disk.root.iterdir()] == ["version-2"]
    assert stat.S_IMODE(disk.root.stat().st_mode) == 0o700
    disk.close()
    assert not disk.root.exists()


def test_what_cannot_be_brought_again_or_written_is_an_error(tmp_path: Path) -> None:
    disk = DiskWeights(tmp_path)
    with pytest.raises(EngineError, match="version 4 have not been written"):
        asyncio.run(disk.again(None, 4))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"a folder for weights in .*nowhere"):
        DiskWeights(tmp_path / "nowhere")
