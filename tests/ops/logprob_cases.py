"""What the tests of token_logprob share: cases, the float64 reference by log-softmax, shards reduced as ranks would."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from mdapo.ops import token_logprob as op


@dataclass(frozen=True)
class Case:
    """Inputs and the gradients of the two outputs; either gradient may be None."""

    hidden_RH: Tensor
    weight_VH: Tensor
    targets_R: Tensor
    grad_logp_R: Tensor | None
    grad_entropy_R: Tensor | None


@dataclass(frozen=True)
class Result:
    logp_R: Tensor
    entropy_R: Tensor
    grad_hidden_RH: Tensor
    grad_weight_VH: Tensor


def case(
    rows: int,
    vocab: int,
    hidden: int = 16,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    size: float = 1.0,
    use: str = "both",
) -> Case:
    """Logits of standard deviation ``size``; ``use`` logp, entropy or both in the loss."""
    generator = torch.Generator().manual_seed(rows * 1000 + vocab)
    hidden_RH = torch.randn(rows, hidden, generator=generator) * size
    weight_VH = torch.randn(vocab, hidden, generator=generator) / hidden**0.5
    targets_R = torch.randint(0, vocab, (rows,), generator=generator)
    grads_2R = torch.randn(2, rows, generator=generator)
    if dtype == torch.float64:
        grads_2R = grads_2R.double()
    return Case(
        hidden_RH.to(device, dtype),
        weight_VH.to(device, dtype),
        targets_R.to(device),
        grads_2R[0].to(device) if use != "entropy" else None,
        grads_2R[1].to(device) if use != "logp" else None,
    )


def plain(case: Case, temperature: float, dtype: torch.dtype | None = None) -> Result:
    """By full logits, log-softmax and autograd, the products in ``dtype`` (the case's own), the rest in >= float32."""
    dtype = dtype or case.hidden_RH.dtype
    hidden_RH, weight_VH = (x.detach().to(dtype).requires_grad_() for x in (case.hidden_RH, case.weight_VH))
    logits_RV = hidden_RH @ weight_VH.t()
    if dtype != torch.float64:
        logits_RV = logits_RV.float()
    log_p_RV = (logits_RV / temperature).log_softmax(-1)
    logp_R = log_p_RV.gather(1, case.targets_R[:, None])[:, 0]
    entropy_R = -(log_p_RV.exp() * log_p_RV).sum(-1)
    return backward(case, hidden_RH, weight_VH, logp_R, entropy_R)


def exact(case: Case, temperature: float = 1.0) -> Result:
    return plain(case, temperature, torch.float64)


def ours(case: Case, temperature: float = 1.0, cuts: list[int] | None = None) -> Result:
    """The op over the vocabulary shards that ``cuts`` make, each with a weight of its own."""
    if not cuts:
        hidden_RH, weight_VH = (x.detach().requires_grad_() for x in (case.hidden_RH, case.weight_VH))
        logp_R, entropy_R = op.logprob_and_entropy(hidden_RH, weight_VH, case.targets_R, temperature=temperature)
        return backward(case, hidden_RH, weight_VH, logp_R, entropy_R)
    bounds = [*pairwise([0, *cuts, len(case.weight_VH)])]
    stats = [
        op.forward_partials(case.hidden_RH, case.weight_VH[a:b], case.targets_R, vocab_start=a, temperature=temperature)
        for a, b in bounds
    ]
    total_4R = over_shards(stats)
    parts = []
    for a, b in bounds:
        hidden_RH, weight_VH = (x.detach().requires_grad_() for x in (case.hidden_RH, case.weight_VH[a:b]))
        outputs = op.logprob_and_entropy(
            hidden_RH,
            weight_VH,
            case.targets_R,
            temperature=temperature,
            vocab_start=a,
            reduce=lambda own_4R: total_4R,
        )
        parts.append(backward(case, hidden_RH, weight_VH, *outputs))
    grad_hidden_RH = torch.stack([part.grad_hidden_RH for part in parts]).sum(0)
    grad_weight_VH = torch.cat([part.grad_weight_VH for part in parts])
    return Result(parts[0].logp_R, parts[0].entropy_R, grad_hidden_RH, grad_weight_VH)


def over_shards(stats: list[Tensor]) -> Tensor:
    """What the all-reduces of tensor-parallel ranks make of each shard's stats."""
    largest_R = torch.stack([own_4R[op.LARGEST] for own_4R in stats]).amax(0)
    total_4R = torch.stack([op.rebased(own_4R, largest_R) for own_4R in stats]).sum(0)
    total_4R[op.LARGEST] = largest_R
    return total_4R


def backward(case: Case, hidden_RH: Tensor, weight_VH: Tensor, logp_R: Tensor, entropy_R: Tensor) -> Result:
    pairs = [(logp_R, case.grad_logp_R), (entropy_R, case.grad_entropy_R)]
    used = [(output, grad.to(output.dtype)) for output, grad in pairs if grad is not None]
    torch.autograd.backward([output for output, _ in used], [grad for _, grad in used])
    assert hidden_RH.grad is not None and weight_VH.grad is not None
    return Result(logp_R.detach(), entropy_R.detach(), hidden_RH.grad, weight_VH.grad)


def close(found: Result, expected: Result, *, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    """On failure: which quantity, the worst index, both values."""
    for name, want in vars(expected).items():
        have = getattr(found, name)
        assert have.shape == want.shape, f"{name}: {tuple(have.shape)}, expected {tuple(want.shape)}"
        have, want = have.double().cpu(), want.double().cpu()
        scale = want.abs().max() if name.startswith("grad") and want.numel() else 1.0
        off = (have - want).abs() - rtol * want.abs()
        off = torch.where(have.isnan() & want.isnan(), 0.0, off).nan_to_num(nan=torch.inf)
        if off.numel() and off.max() > atol * scale:
            at = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
            pytest.fail(f"{name} at {at}: {have[at].item():.9g}, expected {want[at].item():.9g}")
