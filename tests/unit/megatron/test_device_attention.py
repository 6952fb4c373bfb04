"""The attention of devices that are not here: which arguments reach their kernels (the kernels don't run)."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from mdapo.megatron.attention import SegmentLayout, _attend_cpu, _attend_cuda, _attend_npu


@pytest.mark.parametrize("parents", [(), (-1, 0)], ids=["alone", "shared prefix"])
def test_cuda_kernel_accepts_our_arguments(parents: tuple[int, ...]) -> None:
    """Shapes only, on fake tensors: torch checks the signature and infers the output."""
    with FakeTensorMode():
        query = torch.empty(20, 1, 8, 64, dtype=torch.bfloat16, device="cuda")
        key = torch.empty(20, 1, 2, 64, dtype=torch.bfloat16, device="cuda")
        out = _attend_cuda(query, key, key, SegmentLayout((0, 8, 20), query, query, parents), 0.125)
    assert out.shape == (20, 1, 8, 64)
    assert out.dtype == torch.bfloat16


def test_cuda_attention_does_without_the_word_that_older_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen_attn(q: Any, k: Any, v: Any, *sizes: Any, scale: float, window_size: Any) -> torch.Tensor:
        assert (q.shape[1], k.shape[1]) == (8, 2)
        return q

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    query, key = torch.ones(20, 1, 8, 64, dtype=torch.bfloat16), torch.ones(20, 1, 2, 64, dtype=torch.bfloat16)
    assert _attend_cuda(query, key, key, SegmentLayout((0, 8, 20), query, query), 0.125).shape == query.shape


@pytest.mark.parametrize("parents", [(), (-1, 0)], ids=["alone", "shared prefix"])
def test_npu_kernel_gets_host_ends_and_a_compressed_mask(
    parents: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in computes what Ascend's documentation says of these arguments; the result is that of the CPU."""
    seen: dict[str, Any] = {}

    def npu_fusion_attention(q: Any, k: Any, v: Any, heads: int, **options: Any) -> tuple[torch.Tensor]:
        seen.update(options, heads=heads)
        out, q_start, kv_start = [], 0, 0
        for q_end, kv_end in zip(options["actual_seq_qlen"], options["actual_seq_kvlen"], strict=True):
            queries, keys, values = q[q_start:q_end], k[kv_start:kv_end], v[kv_start:kv_end]
            sees = torch.ones(len(queries), len(keys), dtype=torch.bool).tril(len(keys) - len(queries))
            by_head = (x.transpose(0, 1)[None] for x in (queries, keys, values))
            seen_by = F.scaled_dot_product_attention(*by_head, sees, scale=options["scale"], enable_gqa=True)
            out.append(seen_by[0].transpose(0, 1))
            q_start, kv_start = q_end, kv_end
        return (torch.cat(out),)

    module = ModuleType("torch_npu")
    module.npu_fusion_attention = npu_fusion_attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    torch.manual_seed(0)
    query, key, value = torch.randn(9, 1, 4, 8), torch.randn(9, 1, 2, 8), torch.randn(9, 1, 2, 8)
    layout = SegmentLayout((0, 4, 9), query, query, parents)
    out = _attend_npu(query, key, value, layout, 0.3)
    torch.testing.assert_close(out, _attend_cpu(query, key, value, layout, 0.3))
    assert (seen["input_layout"], seen["sparse_mode"], seen["heads"]) == ("TND", 3, 4)
    assert seen["actual_seq_qlen"] == [4, 9] and seen["actual_seq_kvlen"] == [4, 13 if parents else 9]
    assert all(isinstance(end, int) for end in seen["actual_seq_qlen"])
    mask = seen["atten_mask"]
    assert mask.shape == (2048, 2048) and bool(mask[0, 1]) and not bool(mask[1, 0]) and not bool(mask[5, 5])
