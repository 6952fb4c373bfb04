"""Whether what was trained can still be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from mdapo.megatron.actor import Actor


@torch.no_grad()
def weights_are_finite(actor: Actor) -> bool:
    """Whether all weights on all ranks are finite; collective, the same answer everywhere. One read of the weights.

    A sum in float32 is finite only when every term is: infinities stay, or meet and become NaN.
    """
    sums = [parameter.sum(dtype=torch.float32) for chunk in actor.chunks for parameter in chunk.parameters()]
    unusable = (~torch.stack(sums).isfinite()).any().int().cpu()
    dist.all_reduce(unusable, op=dist.ReduceOp.MAX)
    return not bool(unusable)
