"""Core attention of ours: rotary embedding and causal attention over packed segments, one implementation per device.

The packed batch is one long sequence [T, 1, H] to megatron-core; only this module knows where segments begin. It gets
that, and the cosines and sines of the explicit positions, in a ``SegmentLayout`` that rides through core in the place
of its ``packed_seq_params`` (core looks at the format's name only, and leaves one that isn't "thd" alone). The layout
is thus bound to its micro-batch also when recomputation or a pipeline has several in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from mdapo import device


@dataclass(frozen=True, eq=False)
class SegmentLayout:
    """Where segments begin in a packed row, or, with ``cu_seqlens`` None, B rows of equal length (the padded path).

    ``cos_SBD`` and ``sin_SBD`` are [S, B, 1, D] in the model's dtype (B = 1 when packed), sine with rotate-half's sign.
    """

    cu_seqlens: tuple[int, ...] | None
    cos_SBD: Tensor
    sin_SBD: Tensor
    parents: tuple[int, ...] = ()  # of segments that continue others (a prefix tree)
    qkv_format: str = "segments"
    made: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # masks and offsets, once for all layers

    @cached_property
    def lengths(self) -> list[int]:
        assert self.cu_seqlens is not None
        return [b - a for a, b in zip(self.cu_seqlens, self.cu_seqlens[1:], strict=False)]

    @cached_property
    def paths(self) -> list[list[int]]:
        """For each segment, its ancestors from the root, and itself."""
        paths: list[list[int]] = []
        for segment, parent in enumerate(self.parents or [-1] * len(self.lengths)):
            paths.append([*(paths[parent] if parent >= 0 else []), segment])
        return paths

    def with_ancestors(self, keys: Tensor) -> Tensor:
        """[T, ...] to each segment's path, end to end (slices and one concatenation: its gradient is deterministic)."""
        parts = keys.split(self.lengths)
        return torch.cat([parts[segment] for path in self.paths for segment in path]) if self.parents else keys

    @cached_property
    def key_lengths(self) -> list[int]:
        """Tokens that the last query of each segment sees."""
        return [sum(self.lengths[segment] for segment in path) for path in self.paths]

    def mask(self, queries: int, keys: int, like: Tensor) -> Tensor:
        """Additive causal mask [queries, keys], aligned to the lower right: the last query sees every key."""
        if (queries, keys) not in self.made:
            hidden = torch.full((queries, keys), -torch.inf, dtype=like.dtype, device=like.device)
            self.made[queries, keys] = hidden.triu(keys - queries + 1)
        return self.made[queries, keys]

    def on_device(self, lengths: list[int], where: torch.device) -> Tensor:
        """int32 [N + 1]: where segments of these lengths begin and end."""
        ends = tuple(accumulate(lengths, initial=0))
        if ends not in self.made:
            self.made[ends] = torch.tensor(ends, dtype=torch.int32).to(where, non_blocking=True)
        return self.made[ends]


def rotary_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine [..., 1, D] of the positions (RoPE, arXiv 2104.09864, in the rotate-half form).

    Angles in float32, as transformers does, then cast to ``dtype``.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float()[..., None] * (1.0 / theta**exponent)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat([cos, cos], dim=-1)[..., None, :], torch.cat([-sin, sin], dim=-1)[..., None, :]


class _Rotate(torch.autograd.Function):
    """x cos + swap(x) sin, where swap exchanges the two halves of a head; its gradient is g cos + swap(g sin)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return torch.addcmul(x * cos, _swap(x), sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        # swap(g sin) = swap(g) swap(sin), and swap(sin) = -sin by its sign pattern
        return torch.addcmul(grads[0] * cos, _swap(grads[0]), sin, value=-1), None, None


def _swap(x: Tensor) -> Tensor:
    return torch.roll(x, x.shape[-1] // 2, dims=-1)


def _attend_cpu(query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float) -> Tensor:
    """torch's fused attention, segment by segment: no kernel for packed sequences exists on the CPU.

    In float32 also of a bf16 model: the CPU's bf16 kernel is slower (its backward, 2.3 times at 64 tokens).
    """
    dtype = query.dtype
    query, key, value = query.float(), key.float(), value.float()

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[2] != k.shape[2]
        mask = layout.mask(len(q), len(k), q) if len(q) != len(k) else None
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [B, heads, L, D]
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)
        return out.permute(2, 0, 1, 3)

    if layout.cu_seqlens is None:
        return one(query, key, value).to(dtype)
    q, k, v = (x.split(layout.lengths) for x in (query, key, value))

    def along(parts: tuple[Tensor, ...], path: list[int]) -> Tensor:
        return parts[path[0]] if len(path) == 1 else torch.cat([parts[segment] for segment in path])

    return torch.cat([one(q[path[-1]], along(k, path), along(v, path)) for path in layout.paths]).to(dtype)


def _attend_cuda(query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float) -> Tensor:
    """torch's variable-length flash attention: all segments in one kernel, in half precision; float32 as on the CPU."""
    if query.dtype == torch.float32 or layout.cu_seqlens is None:
        return _attend_cpu(query, key, value, layout, scale)
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x.squeeze(1) for x in (query, key, value))
    sizes = (layout.lengths, layout.key_lengths)
    cu_q, cu_k = (layout.on_device(lengths, query.device) for lengths in sizes)
    k, v = layout.with_ancestors(k), layout.with_ancestors(v)
    # Its kernel takes fewer heads of keys; torch before 2.12 neither asks for that nor has a word for it.
    has_word = "enable_gqa" in signature(varlen_attn).parameters
    grouped: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]} if has_word else {}
    causal = (-1, 0)  # keys to the left without limit, none to the right; aligned to the last of both
    longest = [max(lengths) for lengths in sizes]
    out = varlen_attn(q, k, v, cu_q, cu_k, *longest, scale=scale, window_size=causal, **grouped)
    assert isinstance(out, Tensor)  # a tuple only where more was asked for
    return out.unsqueeze(1)


def _attend_npu(query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float) -> Tensor:
    """Ascend's fused attention in TND layout. Written from its documentation; not run on hardware.

    It takes the segments' cumulative *ends* as host integers, without the leading 0, and with ``sparse_mode=3``
    (causal, aligned to the lower right) a compressed 2048 x 2048 mask of the positions that are hidden.
    """
    if layout.cu_seqlens is None:
        return _attend_cpu(query, key, value, layout, scale)
    import torch_npu

    q, k, v = (x.squeeze(1).contiguous() for x in (query, key, value))
    hidden = torch.triu(torch.ones(2048, 2048, dtype=torch.bool, device=q.device), diagonal=1)
    out = torch_npu.npu_fusion_attention(
        q,
        layout.with_ancestors(k),
        layout.with_ancestors(v),
        q.shape[1],
        input_layout="TND",
        atten_mask=hidden,
        scale=scale,
        sparse_mode=3,
        actual_seq_qlen=list(accumulate(layout.lengths)),
        actual_seq_kvlen=list(accumulate(layout.key_lengths)),
    )
    return out[0].unsqueeze(1)


ATTEND: dict[str, Callable[[Tensor, Tensor, Tensor, SegmentLayout, float], Tensor]] = {
    "cpu": _attend_cpu, "cuda": _attend_cuda, "npu": _attend_npu,
}  # fmt: skip


class SegmentAttention(DotProductAttention):
    """[S, B, heads, D] queries, keys and values to [S, B, heads * D]; ``packed_seq_params`` is a ``SegmentLayout``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.config.attention_dropout == 0.0, "packed attention has no dropout"
        self.attend = ATTEND[device.current().kind]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: SegmentLayout | None = None,
    ) -> Tensor:
        layout = packed_seq_params
        assert isinstance(layout, SegmentLayout), "the model's forward passes a SegmentLayout"
        query = _Rotate.apply(query, layout.cos_SBD, layout.sin_SBD)
        key = _Rotate.apply(key, layout.cos_SBD, layout.sin_SBD)
        return self.attend(query, key, value, layout, self.softmax_scale).flatten(2)
