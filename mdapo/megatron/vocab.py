"""Log-prob and entropy over a vocabulary split among tensor-parallel ranks: the op of one shard plus the reductions."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from mdapo.ops import token_logprob


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
    The gradient of ``hidden_RH`` is this rank's share: sum it over ``group``. Forward has one all-reduce (max) of [R]
    and one (sum) of [3, R]; backward has none.
    """
    start = group.rank() * weight_VH.shape[0]
    rows = max(0, min(weight_VH.shape[0], vocab - start))  # 0: this rank holds nothing but padding

    def over_ranks(stats_4R: Tensor) -> Tensor:
        largest_R = stats_4R[token_logprob.LARGEST].clone()
        dist.all_reduce(largest_R, op=dist.ReduceOp.MAX, group=group)
        stats_4R = token_logprob.rebased(stats_4R, largest_R)
        dist.all_reduce(stats_4R[token_logprob.SUM :], group=group)
        return stats_4R

    return token_logprob.logprob_and_entropy(
        hidden_RH,
        weight_VH[:rows],
        targets_R,
        temperature=temperature,
        vocab_start=start,
        reduce=over_ranks if group.size() > 1 else None,
        main_grad_VH=None if main_grad is None else main_grad[:rows],
    )
