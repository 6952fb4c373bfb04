"""A model folder whose weights are not those of its config.json is refused before anything is loaded."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mdapo.config.model_facts import ModelFacts
from mdapo.config.weight_files import require_weights, weight_problems
from mdapo.errors import UserError

FACTS = ModelFacts(
    architecture="LlamaForCausalLM", layers=2, hidden=8, ffn=12, heads=2, kv_heads=1, head_dim=4, vocab=11,
    max_positions=32, tied=True, dtype="float32", qkv_bias=False, qk_norm=False,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    weights = {name: torch.zeros(shape) for name, shape in FACTS.weight_shapes().items()}
    names = sorted(weights)
    for part, own in (("model-1.safetensors", names[:7]), ("model-2.safetensors", names[7:])):
        save_file({name: weights[name] for name in own}, tmp_path / part, metadata={"format": "pt"})
    return tmp_path


def test_weights_in_several_files_that_fit_are_accepted(folder: Path) -> None:
    assert weight_problems(folder, FACTS) == []
    require_weights(folder, FACTS)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": 3}, "tensors missing from .*model.layers.2.input_layernorm.weight.*, and 6 more"),
        ({"tied": False}, "tensors missing from .*lm_head.weight"),
        ({"hidden": 16}, "weights that do not fit config.json: model.embed_tokens.weight has shape .11, 8., .*more"),
        ({"vocab": 12}, r"shape \[11, 8\], config.json means \[12, 8\]"),
        ({"layers": 10**9}, "means 1000000000 layers, but the files hold 20 tensors"),
    ],
)
def test_what_is_missing_or_misshapen_is_named(folder: Path, changes: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        require_weights(folder, replace(FACTS, **changes))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_no_numbers_to_train_are_refused(folder: Path, dtype: torch.dtype) -> None:
    shapes = FACTS.weight_shapes()
    save_file({name: torch.zeros(s, dtype=dtype) for name, s in shapes.items()}, folder / "model-1.safetensors")
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(UserError, match="weights that are none of F64, F32, F16, BF16: model"):
        require_weights(folder, FACTS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_weights_of_any_float_type_are_accepted(folder: Path, dtype: torch.dtype) -> None:
    shapes = FACTS.weight_shapes()
    save_file({name: torch.zeros(s, dtype=dtype) for name, s in shapes.items()}, folder / "model-1.safetensors")
    (folder / "model-2.safetensors").unlink()
    require_weights(folder, FACTS)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "header cannot be read"),
        (b"\0" * 100, "header cannot be read"),
        ((2).to_bytes(8, "little") + b"[]", "header cannot be read"),
        ((10**6).to_bytes(8, "little") + b"{}", "header cannot be read"),
        ((2**62).to_bytes(8, "little") + b"{}", "header cannot be read"),
    ],
)
def test_a_file_of_another_kind_is_named(folder: Path, content: bytes, says: str) -> None:
    (folder / "model-2.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=f"model-2.safetensors: .*{says}"):
        require_weights(folder, FACTS)


def test_a_file_that_was_cut_short_is_named(folder: Path) -> None:
    file = folder / "model-1.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    assert json.loads(whole[8 : 8 + length])
    file.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=r"model-1.safetensors: cut short: it holds .* of .* bytes"):
        require_weights(folder, FACTS)


def with_index(folder: Path, listed: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}), encoding="utf-8")


def test_where_there_is_an_index_other_files_do_not_count(folder: Path) -> None:
    files = require_weights(folder, FACTS)
    with_index(folder, {name: file.name for name, file in files.items()})
    save_file({name: torch.ones(3) for name in files}, folder / "stale.safetensors")
    assert require_weights(folder, FACTS) == files


def test_without_an_index_a_weight_that_comes_twice_is_named(folder: Path) -> None:
    save_file({"model.norm.weight": torch.ones(8)}, folder / "other.safetensors")
    with pytest.raises(UserError, match=r"other.safetensors: model.norm.weight is in model-2.safetensors too"):
        require_weights(folder, FACTS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "index.json: "),
        ("[]", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"model.norm.weight": "../m.safetensors"}}', "'../m.safetensors' must be a plain file name"),
        ('{"weight_map": {"model.norm.weight": 3}}', "3 must be a plain file name"),
        ('{"weight_map": {"model.norm.weight": "gone.safetensors"}}', "gone.safetensors: missing, named by the index"),
    ],
)
def test_an_index_that_cannot_be_followed_is_named(folder: Path, text: str, says: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(says)):
        require_weights(folder, FACTS)


def test_weights_that_the_model_has_no_place_for_are_named_but_for_harmless_ones(folder: Path) -> None:
    harmless = {"lm_head.weight": torch.ones(1), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file(harmless, folder / "more.safetensors")
    assert not require_weights(folder, FACTS).keys() & harmless.keys()
    save_file({"model.layers.0.self_attn.q_proj.bias": torch.ones(8)}, folder / "bias.safetensors")
    with pytest.raises(UserError, match=r"such a model does not have: model.layers.0.self_attn.q_proj.bias"):
        require_weights(folder, FACTS)
