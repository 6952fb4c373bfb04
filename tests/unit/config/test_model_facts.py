"""Model folders that mdapo does not train are refused with one line for each reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mdapo.config.model_facts import require_facts
from mdapo.errors import UserError

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 131, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
}  # fmt: skip


def write(folder: Path, **changes: Any) -> Path:
    raw = {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_reads_a_llama(tmp_path: Path) -> None:
    hf = require_facts(write(tmp_path))
    assert (hf.layers, hf.heads, hf.kv_heads, hf.head_dim, hf.rope_theta, hf.tied) == (2, 4, 2, 16, 5e5, False)
    assert not hf.qkv_bias and not hf.qk_norm


def test_reads_theta_from_rope_parameters_too(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    assert require_facts(write(tmp_path, rope_theta=..., rope_parameters=rope)).rope_theta == 1e6


def test_head_size_may_differ_from_hidden_over_heads(tmp_path: Path) -> None:
    hf = require_facts(write(tmp_path, architectures=["Qwen3ForCausalLM"], head_dim=128))
    assert hf.head_dim == 128 and hf.qk_norm


def test_qwen2_has_biases_and_its_unused_window_is_no_hindrance(tmp_path: Path) -> None:
    hf = require_facts(
        write(tmp_path, architectures=["Qwen2ForCausalLM"], sliding_window=4096, use_sliding_window=False)
    )
    assert hf.qkv_bias


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architecture MixtralForCausalLM"),
        ({"architectures": None}, "architecture none"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling of type 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of type 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters of type 'yarn'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"num_experts": 8}, "mixture-of-experts"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": "64"}, "hidden_size must be a positive whole number, not '64'"),
        ({"vocab_size": ...}, "vocab_size must be"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive whole number, not 0"),
        ({"head_dim": 0}, "head_dim must be a positive whole number, not 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be a positive whole number, not 0"),
        ({"max_position_embeddings": "2k"}, "max_position_embeddings must be a positive whole number, not '2k'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized weights are not supported"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, not nan"),
        ({"rope_theta": -1}, "rope_theta must be a positive number, not -1"),
        ({"rope_theta": "1e4"}, "rope_theta must be a positive number, not '1e4'"),
    ],
)
def test_refuses_what_it_would_compute_wrongly(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        require_facts(write(tmp_path, **changes))


def test_what_may_be_left_out_may_be_null(tmp_path: Path) -> None:
    hf = require_facts(write(tmp_path, num_key_value_heads=None, head_dim=None, max_position_embeddings=None))
    assert (hf.kv_heads, hf.head_dim, hf.max_positions) == (4, 16, 2048)


def test_all_reasons_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        require_facts(write(tmp_path, mlp_bias=True, hidden_act="gelu", hidden_size=0))
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("content", [None, "{", "[]", "\udcff"])
def test_missing_or_broken_config(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UserError, match=r"config\.json"):
        require_facts(tmp_path)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        require_facts(tmp_path / "absent")
