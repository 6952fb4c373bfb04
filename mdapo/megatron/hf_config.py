"""What a Hugging Face ``config.json`` says, as far as mdapo trains it: dense Llama, Qwen2 and Qwen3."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdapo.errors import UserError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True)
class HfConfig:
    """The shape of the model; ``vocab`` unpadded, ``head_dim`` explicit."""

    architecture: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    rope_theta: float
    eps: float
    qkv_bias: bool
    qk_norm: bool


def _rope(raw: dict[str, Any], where: str, problems: list[str]) -> float:
    """theta stands at the top level (transformers 4) or in ``rope_parameters`` (5); scaled variants are refused."""
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    for key, part in (("rope_parameters", rope), ("rope_scaling", scaling)):
        kind = part.get("rope_type", part.get("type", "default"))
        if kind != "default":
            problems.append(f"{where}: {key} of type {kind!r} is not supported: scaled rotary embedding")
    return float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))


def _refused(raw: dict[str, Any], architecture: str, where: str) -> list[str]:
    problems = []
    if architecture not in ARCHITECTURES:
        problems.append(
            f"{where}: architecture {architecture!r} is not supported, use one of {', '.join(ARCHITECTURES)}"
        )
    if raw.get("hidden_act", "silu") != "silu":
        problems.append(f"{where}: hidden_act {raw['hidden_act']!r} is not supported, only silu")
    sliding = raw.get("use_sliding_window") or any(t != "full_attention" for t in raw.get("layer_types") or ())
    if sliding or (architecture == "LlamaForCausalLM" and raw.get("sliding_window")):
        problems.append(f"{where}: sliding-window attention is not supported")
    if any(raw.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        problems.append(f"{where}: mixture-of-experts models are not supported")
    if architecture != "Qwen2ForCausalLM" and raw.get("attention_bias"):
        problems.append(f"{where}: attention_bias is not supported for {architecture}")
    if raw.get("mlp_bias"):
        problems.append(f"{where}: mlp_bias is not supported")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"{where}: partial_rotary_factor is not supported")
    return problems


def read(folder: str | Path) -> HfConfig:
    """Read ``config.json`` of a model folder.

    Raises:
        UserError: no folder, no such file, no JSON, a key missing, or a model mdapo does not train; all at once.
    """
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise UserError(f"model.path {folder}: no such folder; download the model first (config.json, *.safetensors)")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: missing; model.path must be a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: must hold a JSON object")
    names = raw.get("architectures") or ["none named"]
    problems = _refused(raw, str(names[0]), str(path))
    theta = _rope(raw, str(path), problems)
    needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    problems += [
        f"{path}: {key} must be a positive whole number, found {raw.get(key)!r}"
        for key in needed
        if not (isinstance(raw.get(key), int) and raw[key] > 0)
    ]
    if problems:
        raise UserError(problems)
    heads = raw["num_attention_heads"]
    return HfConfig(
        architecture=names[0],
        layers=raw["num_hidden_layers"],
        hidden=raw["hidden_size"],
        ffn=raw["intermediate_size"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        vocab=raw["vocab_size"],
        tied=bool(raw.get("tie_word_embeddings", False)),
        rope_theta=theta,
        eps=float(raw.get("rms_norm_eps", 1e-6)),
        qkv_bias=names[0] == "Qwen2ForCausalLM",
        qk_norm=names[0] == "Qwen3ForCausalLM",
    )
