"""Our layers against plain torch, values and gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mdapo.megatron.attention import SegmentLayout, _attend_cpu, _Rotate, rotary_tables
from mdapo.megatron.layers import RMSNorm, _RmsNorm, _SwiGlu


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, grad: bool = True) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_(grad)


def grads(out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, randn(*out.shape, seed=9, grad=False).to(out.dtype))


def test_rms_norm_matches_plain_torch() -> None:
    x, weight = randn(7, 2, 24), randn(24, seed=1)
    plain = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    ours = _RmsNorm.apply(x, weight, 1e-5)
    torch.testing.assert_close(ours, plain)
    for a, b in zip(grads(ours, x, weight), grads(plain, x, weight), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_rms_norm_in_bf16_is_at_most_twice_as_far_from_exact_as_plain_torch() -> None:
    x, weight = randn(64, 1, 96, dtype=torch.bfloat16), randn(96, dtype=torch.bfloat16, seed=1)
    x64, weight64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = grads(F.rms_norm(x64, (96,), weight64, 1e-5), x64, weight64)
    plain = grads(weight * F.rms_norm(x.float(), (96,), None, 1e-5).to(x.dtype), x, weight)
    for ours, low, best in zip(grads(_RmsNorm.apply(x, weight, 1e-5), x, weight), plain, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - best).abs().max() <= 2 * (low - best).abs().max()


@pytest.mark.parametrize("sequence", [True, False])
def test_norm_weight_tells_megatron_about_sequence_parallelism(sequence: bool) -> None:
    """Without it, each tensor-parallel rank would train its norms on a part of the sequence."""
    config = SimpleNamespace(use_cpu_initialization=True, params_dtype=torch.float32, sequence_parallel=sequence)
    assert RMSNorm(config, 8).weight.sequence_parallel is sequence


def test_swiglu_matches_plain_torch() -> None:
    x = randn(5, 1, 12)
    gate, up = x.chunk(2, dim=-1)
    plain, ours = F.silu(gate) * up, _SwiGlu.apply(x)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(grads(ours, x)[0], grads(plain, x)[0])


def test_rotary_matches_the_rotate_half_form() -> None:
    x, positions = randn(6, 1, 3, 8), torch.tensor([0, 1, 2, 0, 1, 500])
    cos, sin = rotary_tables(positions[:, None], 8, 10000.0, torch.float32)
    angles = (positions[:, None] / 10000.0 ** (torch.arange(0, 8, 2) / 8)).repeat(1, 2)[:, None, None, :]
    half = torch.cat([-x[..., 4:], x[..., :4]], dim=-1)
    plain, ours = x * angles.cos() + half * angles.sin(), _Rotate.apply(x, cos, sin)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(grads(ours, x)[0], grads(plain, x)[0])


def test_segments_do_not_see_each_other_nor_the_future() -> None:
    lengths = [1, 5, 3]
    cu = (0, 1, 6, 9)
    query, key, value = randn(9, 1, 4, 8), randn(9, 1, 2, 8, seed=1), randn(9, 1, 2, 8, seed=2)
    segment = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    order = torch.arange(9)
    allowed = (segment[:, None] == segment[None]) & (order[:, None] >= order[None])
    q, k, v = (x[:, 0].transpose(0, 1) for x in (query, key, value))
    k, v = k.repeat_interleave(2, dim=0), v.repeat_interleave(2, dim=0)
    scores = (q @ k.transpose(1, 2) * 0.3).masked_fill(~allowed, -torch.inf)
    plain = (scores.softmax(-1) @ v).transpose(0, 1)[:, None]
    ours = _attend_cpu(query, key, value, SegmentLayout(cu, torch.empty(0), torch.empty(0)), 0.3)
    torch.testing.assert_close(ours, plain)
    for a, b in zip(grads(ours, query, key, value), grads(plain, query, key, value), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_padded_rows_give_what_packed_segments_give() -> None:
    query, key, value = (randn(6, 1, 2, 4, seed=s, grad=False) for s in range(3))
    packed = _attend_cpu(query, key, value, SegmentLayout((0, 4, 6), torch.empty(0), torch.empty(0)), 0.5)
    rows = [torch.nn.utils.rnn.pad_sequence([x[:4, 0], x[4:, 0]]) for x in (query, key, value)]
    padded = _attend_cpu(*rows, SegmentLayout(None, torch.empty(0), torch.empty(0)), 0.5)
    torch.testing.assert_close(padded[:, 0], packed[:4, 0])
    torch.testing.assert_close(padded[:2, 1], packed[4:, 0])


def test_bf16_attention_on_the_cpu_is_exact_up_to_its_own_rounding() -> None:
    query, key, value = (randn(16, 1, 2, 8, dtype=torch.bfloat16, seed=s, grad=False) for s in range(3))
    layout = SegmentLayout((0, 16), torch.empty(0), torch.empty(0))
    best = _attend_cpu(query.float(), key.float(), value.float(), layout, 0.3)
    ours = _attend_cpu(query, key, value, layout, 0.3)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, best.to(torch.bfloat16))
