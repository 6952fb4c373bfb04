"""Hugging Face weights to megatron's shards and back, for any TP x PP x VPP, one tensor at a time.

A *slot* is one parameter of the whole model, by megatron's name with the global layer index. It maps to one or a few
Hugging Face tensors (``linear_qkv``: q, k, v; ``linear_fc1``: gate, up), and is split over tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mdapo.config.model_facts import ModelFacts
from mdapo.config.weight_files import require_weights
from mdapo.errors import UserError

Kind = Literal["vocab", "replicated", "qkv", "rows", "columns", "gate_up"]


@dataclass(frozen=True)
class Slot:
    """``layer`` None: embedding (``first``) or final norm and output layer (last stage)."""

    name: str  # megatron's, without the layer prefix
    layer: int | None
    kind: Kind
    hf_names: tuple[str, ...]
    first: bool = False


def slots(hf: ModelFacts) -> list[Slot]:
    """All parameters of the model, in Hugging Face's usual order."""
    out = [Slot("embedding.word_embeddings.weight", None, "vocab", ("model.embed_tokens.weight",), first=True)]
    for layer in range(hf.layers):
        p = f"model.layers.{layer}."
        qkv = tuple(f"{p}self_attn.{x}_proj" for x in "qkv")
        table: list[tuple[str, Kind, tuple[str, ...]]] = [
            ("input_layernorm.weight", "replicated", (p + "input_layernorm.weight",)),
            ("self_attention.linear_qkv.weight", "qkv", tuple(n + ".weight" for n in qkv)),
            ("self_attention.linear_proj.weight", "columns", (p + "self_attn.o_proj.weight",)),
            ("pre_mlp_layernorm.weight", "replicated", (p + "post_attention_layernorm.weight",)),
            ("mlp.linear_fc1.weight", "gate_up", (p + "mlp.gate_proj.weight", p + "mlp.up_proj.weight")),
            ("mlp.linear_fc2.weight", "columns", (p + "mlp.down_proj.weight",)),
        ]
        if hf.qkv_bias:
            table.insert(2, ("self_attention.linear_qkv.bias", "qkv", tuple(n + ".bias" for n in qkv)))
        if hf.qk_norm:
            table.insert(2, ("self_attention.q_layernorm.weight", "replicated", (p + "self_attn.q_norm.weight",)))
            table.insert(3, ("self_attention.k_layernorm.weight", "replicated", (p + "self_attn.k_norm.weight",)))
        out += [Slot(name, layer, kind, names) for name, kind, names in table]
    out.append(Slot("decoder.final_layernorm.weight", None, "replicated", ("model.norm.weight",)))
    if not hf.tied:
        out.append(Slot("output_layer.weight", None, "vocab", ("lm_head.weight",)))
    return out


def _pad_rows(weight: Tensor, multiple: int) -> Tensor:
    missing = -weight.shape[0] % multiple
    return torch.cat([weight, weight.new_zeros(missing, *weight.shape[1:])]) if missing else weight


def _fuse_qkv(parts: Sequence[Tensor], hf: ModelFacts) -> Tensor:
    """Megatron keeps, for each kv head, its query heads, then the key, then the value."""
    grouped = [x.unflatten(0, (hf.kv_heads, -1)) for x in parts]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def _split_qkv(weight: Tensor, hf: ModelFacts) -> tuple[Tensor, ...]:
    queries = hf.heads // hf.kv_heads * hf.head_dim
    grouped = weight.unflatten(0, (hf.kv_heads, -1))
    return tuple(x.flatten(0, 1) for x in grouped.split([queries, hf.head_dim, hf.head_dim], dim=1))


def to_shard(slot: Slot, parts: Sequence[Tensor], hf: ModelFacts, *, tp: int, tp_rank: int) -> Tensor:
    """The shard of one tensor-parallel rank, from the slot's Hugging Face tensors."""
    if slot.kind == "qkv":
        return _fuse_qkv(parts, hf).chunk(tp, 0)[tp_rank]
    if slot.kind == "gate_up":
        return torch.cat([x.chunk(tp, 0)[tp_rank] for x in parts])
    (weight,) = parts
    if slot.kind == "vocab":
        return _pad_rows(weight, tp).chunk(tp, 0)[tp_rank]
    return weight.chunk(tp, 1)[tp_rank] if slot.kind == "columns" else weight


def from_shards(slot: Slot, shards: Sequence[Tensor], hf: ModelFacts) -> tuple[Tensor, ...]:
    """The slot's full Hugging Face tensors, from all tensor-parallel ranks' shards; of one rank's, mostly views."""
    if slot.kind == "replicated":
        return (shards[0],)
    if slot.kind == "columns":
        return (_joined(shards, dim=1),)
    if slot.kind == "gate_up":
        gates, ups = zip(*(x.chunk(2, 0) for x in shards), strict=True)
        return _joined(gates), _joined(ups)
    whole = _joined(shards)
    return _split_qkv(whole, hf) if slot.kind == "qkv" else (whole[: hf.vocab],)


def _joined(shards: Sequence[Tensor], *, dim: int = 0) -> Tensor:
    """End to end; a single one as it is."""
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=dim)


def stage_of(slot: Slot, hf: ModelFacts, *, pp: int, vpp: int) -> tuple[int, int]:
    """Pipeline stage and chunk (even, interleaved split) that hold a slot."""
    if slot.layer is None:
        return (0, 0) if slot.first else (pp - 1, vpp - 1)
    block = slot.layer // (hf.layers // (pp * vpp))
    return block % pp, block // pp


def local_parameters(chunks: Sequence[torch.nn.Module]) -> dict[tuple[str, int | None], Any]:
    """This rank's parameters by (name, global layer), DDP wrapping removed."""
    found: dict[tuple[str, int | None], Any] = {}
    for chunk in chunks:
        inner: Any = getattr(chunk, "module", chunk)
        for name, parameter in inner.named_parameters():
            if name.startswith("decoder.layers."):
                index, rest = name.removeprefix("decoder.layers.").split(".", 1)
                found[rest, inner.decoder.layers[int(index)].layer_number - 1] = parameter
            else:
                found[name, None] = parameter
    return found


class HfFolder:
    """The safetensors of a model folder, read one tensor at a time."""

    def __init__(self, folder: str | Path, hf: ModelFacts, *, key: str = "model.path") -> None:
        """``UserError``: the weights are not those that ``config.json`` speaks of; ``key`` named the folder."""
        self.hf, self._key = hf, key
        self._file_of = require_weights(folder, hf, key=key)
        self._open: dict[Path, Any] = {}

    def tensor(self, name: str) -> Tensor:
        """One full tensor. ``UserError``: its file cannot be read."""
        path = self._file_of[name]
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, "pt")
            return self._open[path].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self._key}: {path}: {name} cannot be read: {error}") from error


@torch.no_grad()
def load(chunks: Sequence[torch.nn.Module], folder: HfFolder, *, tp: int, tp_rank: int) -> None:
    """Fill this rank's parameters from the folder; a tied output layer of a last stage gets the embedding too."""
    hf = folder.hf
    parameters = local_parameters(chunks)
    every = slots(hf)
    if hf.tied:
        every.append(Slot("output_layer.weight", None, "vocab", ("model.embed_tokens.weight",)))
    for slot in every:
        parameter = parameters.pop((slot.name, slot.layer), None)
        if parameter is not None:
            shard = to_shard(slot, [folder.tensor(name) for name in slot.hf_names], hf, tp=tp, tp_rank=tp_rank)
            assert parameter.shape == shard.shape, f"{slot.name}: {parameter.shape} and {shard.shape}"
            parameter.copy_(shard)
    assert not parameters, f"parameters without a source: {sorted(parameters)[:3]}"
