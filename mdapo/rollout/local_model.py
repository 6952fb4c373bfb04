"""Inference forward of a dense Llama, Qwen2 or Qwen3 with a KV cache: the model inside the local engine.

One ``forward`` serves prefill and decode together. Linear weights are packed once for oneDNN on a CPU that has it: at a
few dozen rows, ``F.linear`` spends a third to a half of its time on packing them anew.
Shapes: T tokens of a step, B decoded dialogues, H heads, K key-value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mdapo.config.model_facts import ModelFacts
from mdapo.rollout.local_weights import WeightAssembler

PACK_ROWS = 64  # row count the packed layout is chosen for; others work, a little slower
CACHE_STEP = 256  # the cache grows by so many positions a slot, as dialogues need them


class Linear:
    """``x @ weight.T + bias`` and the few forms of it that fuse an elementwise operation."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.packed = packing_available(weight.dtype, weight.device)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS) if self.packed else weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "swish", [], "")
        return F.silu(F.linear(x, self.weight, self.bias))

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, "mul")
        return F.linear(x, self.weight, self.bias) * other

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        return residual + F.linear(x, self.weight, self.bias)


def packing_available(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``device`` is a CPU that multiplies ``dtype`` with oneDNN's packed weights."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one dialogue: ``length`` of them from position ``start``, into cache ``slot``."""

    slot: int
    start: int
    length: int


@dataclass(frozen=True)
class StepPlan:
    """What one forward computes: B single tokens (decode), then chunks (prefill). Made by ``LocalModel.plan``.

    Decoded slots lie in the range that starts at ``first_slot``. ``slot_rows``: for each slot of the range its row, 0
    where a slot rests; None when the rows are the whole range.
    """

    ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64
    slots_T: torch.Tensor  # int64
    last_rows: torch.Tensor  # int64 [B + chunks]: the rows whose next token is asked for
    decode: int  # B
    first_slot: int
    slot_rows: torch.Tensor | None  # int64
    decode_mask: torch.Tensor  # [slots, 1, 1, longest], 0 or -inf
    chunks: tuple[Chunk, ...]
    chunk_masks: tuple[torch.Tensor, ...]  # each [H/K * length, start + length], 0 or -inf


class LocalModel:
    """Weights, KV cache ``[layers, slots, 2 K, positions, D]`` (keys, then values) and the forward over them.

    ``weights`` of the constructor and of ``load`` are Hugging Face names with full tensors, streamed.
    """

    def __init__(
        self,
        shape: ModelFacts,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        slots: int,
        max_context: int,
    ) -> None:
        self.shape, self.dtype, self.device, self.max_context = shape, dtype, device, max_context
        self.tensors: dict[str, torch.Tensor] = {}  # embedding and norms, by name
        self.linears: dict[str, Linear] = {}
        size = (shape.layers, slots, 2 * shape.kv_heads, min(CACHE_STEP, max_context), shape.head_dim)
        self.cache = torch.zeros(size, dtype=dtype, device=device)
        exponent = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        angles = torch.outer(torch.arange(max_context).float(), shape.rope_theta**-exponent)
        self.cos = angles.cos().repeat(1, 2).to(dtype).to(device)  # [positions, D]
        self.sin = torch.cat([-angles.sin(), angles.sin()], -1).to(dtype).to(device)  # sign of rotate_half included
        self.load(weights)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights. ``ValueError`` names what is unknown, misshapen or missing; the model is unusable."""
        assembler = WeightAssembler(self.shape, dtype=self.dtype, device=self.device)
        for name, tensor in weights:
            for target, weight, bias in assembler.add(name, tensor):
                if weight.dim() == 1 or target == "embed":
                    self.tensors[target] = weight
                else:
                    self.linears[target] = Linear(weight, bias)
        assembler.finish()
        self.cache.zero_()  # what the old weights left is never read, but a NaN in it would spread through the masks

    def reserve(self, positions: int) -> None:
        """Make room for so many positions a slot."""
        have = self.cache.shape[3]
        if positions > have:
            size = min(-(-positions // CACHE_STEP) * CACHE_STEP, self.max_context)
            bigger = self.cache.new_zeros((*self.cache.shape[:3], size, self.cache.shape[4]))
            bigger[:, :, :, :have] = self.cache
            self.cache = bigger

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self.cache[:, target, :, :length] = self.cache[:, source, :, :length]

    def plan(self, chunks: Sequence[tuple[int, int, Sequence[int]]]) -> tuple[StepPlan, list[int]]:
        """Order ``(slot, start, ids)`` chunks for one forward: the plan, and for each row of its logits which chunk."""
        order = sorted((i for i, c in enumerate(chunks) if len(c[2]) == 1), key=lambda i: chunks[i][0])
        decode = len(order)
        order += [i for i, c in enumerate(chunks) if len(c[2]) > 1]
        ids, positions, slots, last = [], [], [], []
        for i in order:
            slot, start, tokens = chunks[i]
            ids += tokens
            positions += range(start, start + len(tokens))
            slots += [slot] * len(tokens)
            last.append(len(ids) - 1)
        self.reserve(max(positions) + 1)
        longer = tuple(Chunk(chunks[i][0], chunks[i][1], len(chunks[i][2])) for i in order[decode:])
        first, rows, mask = self._decode_layout(slots[:decode], positions[:decode])
        tensor = lambda values: torch.tensor(values, dtype=torch.int64, device=self.device)  # noqa: E731
        plan = StepPlan(
            ids_T=tensor(ids),
            positions_T=tensor(positions),
            slots_T=tensor(slots),
            last_rows=tensor(last),
            decode=decode,
            first_slot=first,
            slot_rows=rows,
            decode_mask=mask,
            chunks=longer,
            chunk_masks=tuple(self._chunk_mask(c) for c in longer),
        )
        return plan, order

    def _decode_layout(self, slots: list[int], positions: list[int]) -> tuple[int, torch.Tensor | None, torch.Tensor]:
        if not slots:
            return 0, None, torch.empty(0)
        first, count = slots[0], slots[-1] - slots[0] + 1
        lengths = [1] * count  # a resting slot attends to its first key, so that its row stays finite
        rows = [0] * count
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            lengths[slot - first], rows[slot - first] = position + 1, row
        beyond = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
        mask = torch.zeros(beyond.shape, dtype=self.dtype).masked_fill_(beyond, float("-inf"))
        index = None if count == len(slots) else torch.tensor(rows, device=self.device)
        return first, index, mask[:, None, None].to(self.device)

    def _chunk_mask(self, chunk: Chunk) -> torch.Tensor:
        end = chunk.start + chunk.length
        future = torch.arange(end)[None] > torch.arange(chunk.start, end)[:, None]
        mask = torch.zeros(future.shape, dtype=self.dtype).masked_fill_(future, float("-inf"))
        return mask.repeat(self.shape.heads // self.shape.kv_heads, 1).to(self.device)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """float32 logits [B + chunks, V] of ``plan.last_rows``; writes the keys and values of all T tokens."""
        shape, tensors, linears = self.shape, self.tensors, self.linears
        cos_T, sin_T = self.cos[plan.positions_T][:, None], self.sin[plan.positions_T][:, None]
        heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
        x = tensors["embed"][plan.ids_T]
        for layer in range(shape.layers):
            name = f"model.layers.{layer}."
            normed = self._norm(x, name + "input_norm")
            qkv = linears[name + "qkv"](normed).view(-1, heads + 2 * kv_heads, head_dim)
            if shape.qk_norm:
                qkv[:, :heads] = self._norm(qkv[:, :heads], name + "q_norm")
                qkv[:, heads:-kv_heads] = self._norm(qkv[:, heads:-kv_heads], name + "k_norm")
            rotate_(qkv[:, :-kv_heads], cos_T, sin_T)
            self.cache[layer][plan.slots_T, :, plan.positions_T] = qkv[:, heads:]
            attended = self._attend(self.cache[layer], qkv[:, :heads], plan)
            x = linears[name + "o"].plus(attended, x)
            normed = self._norm(x, name + "post_norm")
            x = linears[name + "down"].plus(linears[name + "up"].times(normed, linears[name + "gate"].silu(normed)), x)
        return linears["head"](self._norm(x[plan.last_rows], "norm")).float()

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.tensors[name]
        return F.rms_norm(x, weight.shape, weight, self.shape.eps)

    def _attend(self, cache: torch.Tensor, q_THD: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """Attention of every token over its own slot [T, H * D]. The heads that share a key stand in the query
        dimension, so that no key is repeated."""
        parts = []
        if plan.decode:
            parts.append(self._attend_decode(cache, q_THD[: plan.decode], plan))
        row = plan.decode
        for chunk, mask in zip(plan.chunks, plan.chunk_masks, strict=True):
            parts.append(self._attend_chunk(cache, q_THD[row : row + chunk.length], chunk, mask))
            row += chunk.length
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_decode(self, cache: torch.Tensor, q_BHD: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        kv_heads, longest, slots = self.shape.kv_heads, plan.decode_mask.shape[-1], plan.decode_mask.shape[0]
        q = q_BHD if plan.slot_rows is None else q_BHD[plan.slot_rows]
        kv = cache[plan.first_slot : plan.first_slot + slots, :, :longest]
        q = q.reshape(slots, kv_heads, -1, self.shape.head_dim)
        out = F.scaled_dot_product_attention(q, kv[:, :kv_heads], kv[:, kv_heads:], attn_mask=plan.decode_mask).reshape(
            slots, -1
        )
        return out if plan.slot_rows is None else out[plan.slots_T[: plan.decode] - plan.first_slot]

    def _attend_chunk(self, cache: torch.Tensor, q_SHD: torch.Tensor, chunk: Chunk, mask: torch.Tensor) -> torch.Tensor:
        kv_heads, head_dim = self.shape.kv_heads, self.shape.head_dim
        kv = cache[chunk.slot, :, : chunk.start + chunk.length]
        q = q_SHD.transpose(0, 1).reshape(1, kv_heads, -1, head_dim)  # [1, K, H/K * S, D]
        out = F.scaled_dot_product_attention(q, kv[None, :kv_heads], kv[None, kv_heads:], attn_mask=mask)
        return out.view(-1, chunk.length, head_dim).transpose(0, 1).reshape(chunk.length, -1)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotary embedding of ``x`` [T, heads, D] in place, half-split layout (RoFormer, eq. 34)."""
    half = x.shape[-1] // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], -1)
    x.mul_(cos).addcmul_(swapped, sin)
