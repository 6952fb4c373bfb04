"""The weights of Hugging Face folders, and how they fuse for inference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from mdapo.config.model_facts import ModelFacts
from mdapo.errors import UserError


def read_weights(files: Mapping[str, Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream the weights from the files that hold them, file by file. ``UserError``: a damaged file."""
    for file in sorted(set(files.values())):
        try:
            with safe_open(file, framework="pt") as weights:
                for name in sorted(name for name in files if files[name] == file):
                    yield name, weights.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: cannot be read: {error}") from error


class WeightAssembler:
    """Collects streamed weights and hands out each fused one as soon as its parts are there: little is held twice."""

    def __init__(self, shape: ModelFacts, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.missing = shape.weight_shapes()
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
