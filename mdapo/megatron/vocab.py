"""Log-prob and entropy over a vocabulary split among tensor-parallel ranks: the op of one shard plus the reductions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mdapo.ops import token_logprob


@dataclass(frozen=True)
class Shard:
    """This rank's rows of the output matrix: ``start`` is the id of the first, ``rows`` how many are no padding.

    ``main_grad`` is the float32 gradient buffer to add to directly; None: the gradient goes through autograd.
    """

    start: int
    rows: int
    main_grad: Tensor | None


class _VocabParallelLogProb(torch.autograd.Function):
    """Forward: one all-reduce (max) of [R] and one (sum) of [3, R]. Backward: none (``hidden`` carries its own)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        targets_R: Tensor,
        shard: Shard,
        temperature: float,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        where = {"vocab_start": shard.start, "temperature": temperature}
        largest_R, sums_3R = token_logprob.forward_partials(hidden_RH, weight_VH[: shard.rows], targets_R, **where)
        if group.size() > 1:
            own_R = largest_R.clone()
            dist.all_reduce(largest_R, op=dist.ReduceOp.MAX, group=group)
            sums_3R[:2] *= (own_R - largest_R).exp()
            dist.all_reduce(sums_3R, group=group)
        lse_R = largest_R + sums_3R[0].log()
        mean_R = sums_3R[1] / sums_3R[0]
        ctx.save_for_backward(hidden_RH, weight_VH, targets_R, lse_R, mean_R)
        ctx.shard, ctx.where = shard, where
        ctx.set_materialize_grads(False)
        return sums_3R[2] - lse_R, lse_R - mean_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_RH, weight_VH, targets_R, lse_R, mean_R = ctx.saved_tensors
        shard: Shard = ctx.shard
        if grads[0] is None and grads[1] is None:
            return (None,) * 6
        into = shard.main_grad
        if into is None:
            into = torch.zeros(weight_VH.shape, dtype=torch.float32, device=weight_VH.device)
        grad_hidden = token_logprob.backward_partials(
            hidden_RH,
            weight_VH[: shard.rows],
            targets_R,
            lse_R=lse_R,
            mean_R=mean_R,
            grad_logp_R=grads[0],
            grad_entropy_R=grads[1],
            grad_weight_VH=into[: shard.rows],
            **ctx.where,
        )
        grad_weight = into.to(weight_VH.dtype) if shard.main_grad is None else None
        return grad_hidden, grad_weight, None, None, None, None


def logprob_and_entropy(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    targets_R: Tensor,
    *,
    vocab: int,
    temperature: float,
    group: dist.ProcessGroup,
    main_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """float32 [R] log-probs of the targets and entropies, at ``temperature``, in nats.

    ``weight_VH`` is this rank's equal share of the padded output matrix; rows past ``vocab`` don't take part. With
    ``main_grad`` (float32 [V, H]) its gradient is added there, not rounded to the model's dtype and not copied.
    The gradient of ``hidden_RH`` is this rank's share: sum it over ``group``.
    """
    start = group.rank() * weight_VH.shape[0]
    rows = min(weight_VH.shape[0], vocab - start)
    assert rows > 0, "a vocabulary shard without a single token"
    shard = Shard(start, rows, main_grad)
    return _VocabParallelLogProb.apply(hidden_RH, weight_VH, targets_R, shard, temperature, group)
