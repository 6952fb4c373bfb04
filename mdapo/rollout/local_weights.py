"""Hugging Face folders of dense Llama, Qwen2 and Qwen3: shape, weight names, and how weights fuse for inference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mdapo.errors import UserError

FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a config.json that the forward needs."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    rope_theta: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool

    @property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(f"model.layers.{i}." for i in range(self.layers))

    def inverse_frequencies(self) -> torch.Tensor:
        """float32 [D / 2] (RoFormer, section 3.2.2)."""
        return self.rope_theta ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the model: Hugging Face name -> shape."""
        q, kv, hidden, mlp = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden, self.intermediate
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (mlp, hidden),
            "mlp.up_proj.weight": (mlp, hidden),
            "mlp.down_proj.weight": (hidden, mlp),
        }
        if self.qkv_bias:
            layer |= {f"self_attn.{p}_proj.bias": (q if p == "q" else kv,) for p in "qkv"}
        if self.qk_norm:
            layer |= {f"self_attn.{p}_norm.weight": (self.head_dim,) for p in "qk"}
        names: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, hidden)}
        names |= {prefix + name: size for prefix in self.layer_names for name, size in layer.items()}
        names["model.norm.weight"] = (hidden,)
        if not self.tied:
            names["lm_head.weight"] = (self.vocab, hidden)
        return names


def read_shape(folder: Path) -> ModelShape:
    """Shape from ``folder/config.json``. ``UserError``: missing, or a family or option that we do not run."""
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"{file}: no such file; model.path must be a Hugging Face model folder")
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    family, rope_type = config.get("model_type"), rope.get("rope_type", rope.get("type", "default"))
    problems = []
    if family not in FAMILIES:
        problems.append(f"{file}: model_type is {family!r}; the local engine runs {', '.join(FAMILIES)}")
    if rope_type != "default":
        problems.append(f"{file}: rope_type is {rope_type!r}; the local engine runs the default rotary embedding only")
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"{file}: hidden_act is {config['hidden_act']!r}; the local engine runs silu only")
    problems += [
        f"{file}: {key} is true; the local engine does not run it"
        for key in ("attention_bias", "mlp_bias", "use_sliding_window")
        if config.get(key)
    ]
    if problems:
        raise UserError(problems)
    heads = config["num_attention_heads"]
    return ModelShape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta", 10000.0)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


def read_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream the weights of all safetensors files of a folder. ``UserError`` when there are none, or one is damaged."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{folder}: no *.safetensors; save the model with save_pretrained(..., safe_serialization=True)"
        )
    for file in files:
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 - not a mapping
                    yield name, weights.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: cannot be read: {error}") from error


class WeightAssembler:
    """Collects streamed weights and hands out each fused one as soon as its parts are there: little is held twice."""

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.missing = shape.expected()
        self.waiting: dict[str, dict[str, torch.Tensor]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor, torch.Tensor | None]]:
        """``(target, weight, bias)`` of each module that this weight completes. ``ValueError``: unknown, misshapen."""
        if name == "lm_head.weight" and self.shape.tied:  # some folders store the tied head a second time
            return []
        if name not in self.missing:
            raise ValueError(f"weight {name!r} is unknown to this model, or came twice")
        expected = self.missing.pop(name)
        if tuple(tensor.shape) != expected:
            raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}, this model needs {expected}")
        # A copy always: the sender may reuse its buffer.
        tensor = tensor.detach().to(device=self.device, dtype=self.dtype, copy=True)
        if name == "model.embed_tokens.weight":
            heads = [("head", tensor, None)] if self.shape.tied else []
            return [("embed", tensor, None), *heads]
        if name in ("model.norm.weight", "lm_head.weight"):
            return [("norm" if name == "model.norm.weight" else "head", tensor, None)]
        return self._add_to_layer(name, tensor)

    def _add_to_layer(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor, torch.Tensor | None]]:
        prefix, index, rest = name.split(".layers.")[0], *name.split(".layers.")[1].split(".", 1)
        layer, module = f"{prefix}.layers.{index}.", rest.rsplit(".", 1)[0].split(".")[-1]
        if module not in ("q_proj", "k_proj", "v_proj"):
            return [(layer + SHORT_NAMES[module], tensor, None)]
        parts = self.waiting.setdefault(layer, {})
        parts[rest.removeprefix("self_attn.")] = tensor
        if len(parts) < (6 if self.shape.qkv_bias else 3):
            return []
        del self.waiting[layer]
        weight = torch.cat([parts[f"{p}_proj.weight"] for p in "qkv"])
        bias = torch.cat([parts[f"{p}_proj.bias"] for p in "qkv"]) if self.shape.qkv_bias else None
        return [(layer + "qkv", weight, bias)]

    def finish(self) -> None:
        """``ValueError`` when a weight never came."""
        if self.missing:
            some = ", ".join(list(self.missing)[:3])
            raise ValueError(f"{len(self.missing)} weights are missing: {some}{', …' if len(self.missing) > 3 else ''}")


SHORT_NAMES = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_norm",
    "q_norm": "q_norm",
    "k_norm": "k_norm",
    "o_proj": "o",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
