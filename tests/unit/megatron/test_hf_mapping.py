"""Hugging Face tensors to shards and back, and what a damaged folder says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mdapo.config.model_facts import require_facts
from mdapo.errors import UserError
from mdapo.megatron import hf_mapping


@pytest.mark.parametrize("kind", ["llama", "untied", "qwen2", "qwen3"])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_tensor_survives_the_way_to_shards_and_back(models: dict[str, Path], kind: str, tp: int) -> None:
    hf = require_facts(models[kind])
    folder = hf_mapping.HfFolder(models[kind], hf)
    seen = {}
    for slot in hf_mapping.slots(hf):
        parts = [folder.tensor(name) for name in slot.hf_names]
        shards = [hf_mapping.to_shard(slot, parts, hf, tp=tp, tp_rank=rank) for rank in range(tp)]
        assert len({shard.shape for shard in shards}) == 1
        seen |= dict(zip(slot.hf_names, hf_mapping.from_shards(slot, shards, hf), strict=True))
    original = load_file(models[kind] / "model.safetensors")
    assert seen.keys() == original.keys()
    assert all(torch.equal(seen[name], original[name]) for name in original)


def test_each_rank_holds_whole_heads(models: dict[str, Path]) -> None:
    """The fused matrix keeps a kv head with its queries, so cutting it never separates them."""
    hf = require_facts(models["llama"])
    slot = next(s for s in hf_mapping.slots(hf) if s.kind == "qkv")
    parts = [torch.full((heads * hf.head_dim, 1), 0.0) for heads in (4, 2, 2)]
    for part, base in zip(parts, (0, 100, 200), strict=True):
        part[:, 0] = base + torch.arange(len(part)) // hf.head_dim
    shard = hf_mapping.to_shard(slot, parts, hf, tp=2, tp_rank=1)
    assert shard[:: hf.head_dim, 0].tolist() == [2, 3, 101, 201]


@pytest.mark.parametrize(("pp", "vpp", "stages"), [(1, 1, "0000"), (2, 1, "0011"), (2, 2, "0101"), (4, 1, "0123")])
def test_layers_go_to_megatrons_stages(models: dict[str, Path], pp: int, vpp: int, stages: str) -> None:
    from dataclasses import replace

    hf = replace(require_facts(models["llama"]), layers=4)
    found = {
        s.layer: hf_mapping.stage_of(s, hf, pp=pp, vpp=vpp)[0] for s in hf_mapping.slots(hf) if s.layer is not None
    }
    assert "".join(str(found[layer]) for layer in range(4)) == stages


def damaged(models: dict[str, Path], folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    shutil.copytree(models["llama"], folder)
    return folder / "model.safetensors", load_file(folder / "model.safetensors")


def test_missing_tensor_is_named(models: dict[str, Path], tmp_path: Path) -> None:
    path, tensors = damaged(models, tmp_path / "m")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(UserError, match=r"tensors missing .*model\.layers\.1\.mlp\.up_proj\.weight"):
        hf_mapping.HfFolder(path.parent, require_facts(path.parent))


def test_wrong_shape_is_named_with_both_shapes(models: dict[str, Path], tmp_path: Path) -> None:
    path, tensors = damaged(models, tmp_path / "m")
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, path)
    with pytest.raises(UserError, match=r"model\.norm\.weight has shape \[65\], config.json means \[64\]"):
        hf_mapping.HfFolder(path.parent, require_facts(path.parent))


def test_the_key_that_names_the_folder_is_told(models: dict[str, Path], tmp_path: Path) -> None:
    path, tensors = damaged(models, tmp_path / "m")
    del tensors["model.norm.weight"]
    save_file(tensors, path)
    with pytest.raises(UserError, match=r"^model\.ref_path: .*model\.norm\.weight"):
        hf_mapping.HfFolder(path.parent, require_facts(path.parent), key="model.ref_path")


@pytest.mark.parametrize("content", [b"", b"\x00" * 40, b"not safetensors at all"])
def test_unreadable_weights(models: dict[str, Path], tmp_path: Path, content: bytes) -> None:
    path, _ = damaged(models, tmp_path / "m")
    path.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read"):
        hf_mapping.HfFolder(path.parent, require_facts(path.parent))


def test_no_weights_at_all(models: dict[str, Path], tmp_path: Path) -> None:
    path, _ = damaged(models, tmp_path / "m")
    path.unlink()
    with pytest.raises(UserError, match=r"no weights in .*\*\.safetensors"):
        hf_mapping.HfFolder(path.parent, require_facts(path.parent))


def test_weights_in_several_files(models: dict[str, Path], tmp_path: Path) -> None:
    path, tensors = damaged(models, tmp_path / "m")
    path.unlink()
    names = sorted(tensors)
    for part in (0, 1):
        save_file({name: tensors[name] for name in names[part::2]}, path.parent / f"part-{part}.safetensors")
    hf = require_facts(path.parent)
    folder = hf_mapping.HfFolder(path.parent, hf)
    assert all(torch.equal(folder.tensor(name), tensors[name]) for name in names)
    (path.parent / "part-1.safetensors").unlink()
    with pytest.raises(UserError, match=rf"tensors missing from \*\.safetensors: .*{names[1]}|and \d+ more"):
        hf_mapping.HfFolder(path.parent, hf)
