"""Log-prob and entropy of scored tokens straight from hidden states, over one shard of the vocabulary.

Plain-torch reference. Works in chunks of rows, so that logits ``[R, V]`` never exist as a whole, and computes the
logits of a chunk again in backward. Over several vocabulary shards the caller reduces the partial sums in between.

With logits z = h W^T, temperature t, x = z / t, p = softmax(x), m = sum_j p_j x_j, lse = log sum_j exp(x_j):
    logp = x_y - lse          d logp / d x_j = [j = y] - p_j
    entropy = lse - m         d entropy / d x_j = -p_j (x_j - m)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_BYTES = 28 << 20  # of fp32 logits: larger blocks are handed back to the system, and miss the cache
GRAD_BYTES = 128 << 20  # of logit gradients in the model's dtype, for one weight-gradient product


def _chunks(rows: int, row_bytes: int, budget: int, start: int = 0) -> Iterator[slice]:
    step = max(1, budget // max(1, row_bytes))
    for first in range(start, rows, step):
        yield slice(first, min(first + step, rows))


def _scaled_logits(hidden_RH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    """float32 [r, V]; the product itself is in the model's dtype, as the engine's is."""
    logits = (hidden_RH @ weight_VH.t()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def forward_partials(
    hidden_RH: Tensor, weight_VH: Tensor, targets_R: Tensor, *, vocab_start: int = 0, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """What one vocabulary shard adds to log-prob and entropy.

    Args:
        hidden_RH: [R, H] in the model's dtype.
        weight_VH: [V, H], the shard's rows of the output matrix, without padding rows.
        targets_R: int64 [R], ids in the whole vocabulary.
        vocab_start: id of the shard's first row.

    Returns:
        float32 [R]: the shard's largest x, and float32 [3, R]: sum exp(x - max), sum exp(x - max) x, and x of the
        target (0 where the target lies in another shard). Rows of several shards combine by rescaling to the common
        maximum and adding.
    """
    rows, size = hidden_RH.shape[0], weight_VH.shape[0]
    largest_R = hidden_RH.new_empty(rows, dtype=torch.float32)
    sums_3R = hidden_RH.new_empty(3, rows, dtype=torch.float32)
    local_R = targets_R - vocab_start
    mine_R = (local_R >= 0) & (local_R < size)
    for part in _chunks(rows, 4 * size, CHUNK_BYTES):
        x = _scaled_logits(hidden_RH[part], weight_VH, temperature)
        largest = largest_R[part].copy_(x.amax(dim=1))
        target = x.gather(1, local_R[part].clamp(0, size - 1)[:, None])[:, 0]
        exp = (x - largest[:, None]).exp_()
        sums_3R[0, part] = exp.sum(dim=1)
        sums_3R[1, part] = torch.linalg.vecdot(exp, x)
        sums_3R[2, part] = torch.where(mine_R[part], target, 0.0)
    return largest_R, sums_3R


def backward_partials(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    targets_R: Tensor,
    *,
    lse_R: Tensor,
    mean_R: Tensor,
    grad_logp_R: Tensor | None,
    grad_entropy_R: Tensor | None,
    grad_weight_VH: Tensor,
    vocab_start: int = 0,
    temperature: float = 1.0,
) -> Tensor:
    """Gradients of one shard: returns d hidden [R, H] in its dtype (to be summed over shards).

    ``lse_R`` and ``mean_R`` are lse and m over the whole vocabulary. A gradient of None counts as zero.
    d weight is added to the float32 buffer ``grad_weight_VH`` in place.
    """
    rows, size = hidden_RH.shape[0], weight_VH.shape[0]
    grad_hidden_RH = torch.empty_like(hidden_RH)
    local_R = targets_R - vocab_start
    mine_R = (local_R >= 0) & (local_R < size)
    for block in _chunks(rows, hidden_RH.element_size() * size, GRAD_BYTES):
        grad_BV = hidden_RH.new_empty(block.stop - block.start, size)
        for part in _chunks(block.stop, 4 * size, CHUNK_BYTES, block.start):
            x = _scaled_logits(hidden_RH[part], weight_VH, temperature)
            prob = torch.sub(x, lse_R[part, None]).exp_()
            if grad_entropy_R is None:
                assert grad_logp_R is not None, "backward without a gradient"
                grad = prob.mul_(-grad_logp_R[part, None])
            else:
                factor = x.sub_(mean_R[part, None]).mul_(grad_entropy_R[part, None])
                if grad_logp_R is not None:
                    factor.add_(grad_logp_R[part, None])
                grad = prob.mul_(factor).neg_()
            if grad_logp_R is not None:
                at_target = torch.where(mine_R[part], grad_logp_R[part], 0.0)
                grad.scatter_add_(1, local_R[part].clamp(0, size - 1)[:, None], at_target[:, None])
            if temperature != 1.0:
                grad.div_(temperature)
            grad_BV[part.start - block.start : part.stop - block.start] = grad
        torch.mm(grad_BV, weight_VH, out=grad_hidden_RH[block])
        if grad_BV.dtype == torch.float32:
            grad_weight_VH.addmm_(grad_BV.t(), hidden_RH[block])
        else:
            grad_weight_VH.add_(grad_BV.t() @ hidden_RH[block])
    return grad_hidden_RH
