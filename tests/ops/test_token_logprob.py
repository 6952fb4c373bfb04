"""Log-prob and entropy from hidden states: against float64 log-softmax, in shards and chunks, gradients included."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from mdapo.ops import token_logprob as op


def case(rows: int, vocab: int, hidden: int = 16, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + vocab)
    hidden_RH = torch.randn(rows, hidden, generator=generator).to(dtype)
    weight_VH = torch.randn(vocab, hidden, generator=generator).to(dtype)
    return hidden_RH, weight_VH, torch.randint(0, vocab, (rows,), generator=generator)


def exact(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """float64 reference by log-softmax."""
    logp = (hidden.double() @ weight.double().t() / temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def combined(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, cuts: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The op over vocabulary shards ``cuts``, reduced as ranks would: log-prob, entropy, lse, mean."""
    bounds = [0, *cuts, weight.shape[0]]
    parts = [
        op.forward_partials(hidden, weight[a:b], targets, vocab_start=a, temperature=temperature)
        for a, b in pairwise(bounds)
    ]
    largest = torch.stack([m for m, _ in parts]).amax(0)
    sums = sum(torch.cat([s[:2] * (m - largest).exp(), s[2:]]) for m, s in parts)
    lse, mean = largest + sums[0].log(), sums[1] / sums[0]
    return sums[2] - lse, lse - mean, lse, mean


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("cuts", [[], [20], [1, 50, 96]])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_matches_float64_over_any_vocabulary_shards(rows: int, cuts: list[int], temperature: float) -> None:
    hidden, weight, targets = case(rows, 97)
    logp, entropy, _, _ = combined(hidden, weight, targets, temperature, cuts)
    want_logp, want_entropy = exact(hidden, weight, targets, temperature)
    torch.testing.assert_close(logp.double(), want_logp, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cuts", [[], [40]])
@pytest.mark.parametrize("use", ["logp", "entropy", "both"])
def test_gradients_match_float64_autograd(cuts: list[int], use: str) -> None:
    hidden, weight, targets = case(23, 61)
    temperature = 0.8
    hidden64, weight64 = hidden.double().requires_grad_(), weight.double().requires_grad_()
    generator = torch.Generator().manual_seed(3)
    grad_logp, grad_entropy = torch.randn(2, 23, generator=generator)
    logp, entropy = exact(hidden64, weight64, targets, temperature)
    chosen = {"logp": (grad_logp * logp).sum(), "entropy": (grad_entropy * entropy).sum()}
    (sum(chosen.values()) if use == "both" else chosen[use]).backward()
    _, _, lse, mean = combined(hidden, weight, targets, temperature, cuts)
    bounds = [0, *cuts, 61]
    grad_hidden, grad_weight = torch.zeros_like(hidden), torch.ones_like(weight)  # ones: it must add, not overwrite
    for a, b in pairwise(bounds):
        grad_hidden += op.backward_partials(
            hidden,
            weight[a:b],
            targets,
            lse_R=lse,
            mean_R=mean,
            grad_logp_R=grad_logp if use != "entropy" else None,
            grad_entropy_R=grad_entropy if use != "logp" else None,
            grad_weight_VH=grad_weight[a:b],
            vocab_start=a,
            temperature=temperature,
        )
    torch.testing.assert_close(grad_hidden.double(), hidden64.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad_weight.double() - 1, weight64.grad, rtol=1e-4, atol=1e-5)


def test_chunks_of_the_forward_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = case(64, 128)
    whole = op.forward_partials(hidden, weight, targets)
    monkeypatch.setattr(op, "CHUNK_BYTES", 4 * 128 * 16)
    for a, b in zip(whole, op.forward_partials(hidden, weight, targets), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_blocks_of_the_backward_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = case(50, 40)
    _, _, lse, mean = combined(hidden, weight, targets, 1.0, [])
    grads = torch.linspace(-1, 1, 50)

    def backward() -> tuple[Tensor, Tensor]:
        into = torch.zeros_like(weight)
        out = op.backward_partials(
            hidden,
            weight,
            targets,
            lse_R=lse,
            mean_R=mean,
            grad_logp_R=grads,
            grad_entropy_R=grads,
            grad_weight_VH=into,
        )
        return out, into

    whole = backward()
    monkeypatch.setattr(op, "CHUNK_BYTES", 4 * 40 * 3)
    monkeypatch.setattr(op, "GRAD_BYTES", 4 * 40 * 7)
    for a, b in zip(whole, backward(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_bf16_error_is_at_most_twice_that_of_plain_torch() -> None:
    hidden, weight, targets = case(200, 300, hidden=64, dtype=torch.bfloat16)
    want, _ = exact(hidden, weight, targets, 1.0)
    plain = (hidden @ weight.t()).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    ours, _, _, _ = combined(hidden, weight, targets, 1.0, [])
    assert (ours - want).abs().max() <= 2 * (plain - want).abs().max()


def test_huge_logits_stay_finite() -> None:
    hidden, weight, targets = case(8, 30)
    logp, entropy, _, _ = combined(hidden * 1e4, weight, targets, 1.0, [10])
    assert torch.isfinite(logp).all() and torch.isfinite(entropy).all()


def test_repeats_bitwise() -> None:
    hidden, weight, targets = case(40, 500)
    for a, b in zip(
        op.forward_partials(hidden, weight, targets), op.forward_partials(hidden, weight, targets), strict=True
    ):
        assert torch.equal(a, b)
