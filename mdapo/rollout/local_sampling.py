"""Next tokens from logits by inverse CDF: with the uniform of a counter, a turn depends on its seed and logits only.

B rows, V vocabulary. Probabilities are summed in fp64 over blocks of the vocabulary, then inside the block that is hit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from mdapo.rollout.engine import SamplingParams

BLOCK = 256


@torch.inference_mode()
def sample(
    logits_BV: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """One token id and its log-prob for each row of float32 logits, which are overwritten.

    The log-prob is that of the distribution at the row's temperature (1 where greedy) before top-k and top-p cuts. Cuts
    are applied in that order, top-p to what top-k leaves renormalised. ``FloatingPointError`` on non-finite logits.
    """
    temperatures = torch.tensor([p.temperature or 1.0 for p in params], device=logits_BV.device)
    scaled = logits_BV.sub_(logits_BV.amax(-1, keepdim=True)).div_(temperatures[:, None])
    weights = scaled.exp()
    blocks, cdf = _block_cdf(weights)
    if not bool(torch.isfinite(cdf[:, -1]).all()):
        raise FloatingPointError("logits are not finite: the weights are broken")
    tokens = _inverse_cdf(blocks, cdf, torch.tensor(uniforms, dtype=torch.float64, device=logits_BV.device))
    for row, p in enumerate(params):
        if p.temperature == 0:
            tokens[row] = scaled[row].argmax()
        elif p.top_k or p.top_p < 1.0:
            tokens[row] = _sample_cut(weights[row], p, uniforms[row])
    logps = scaled.gather(-1, tokens[:, None])[:, 0].double() - cdf[:, -1].log()
    return tokens.tolist(), logps.tolist()


def _block_cdf(weights_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights in blocks of ``BLOCK`` (the last filled with 0), and the fp64 running sum of the blocks' totals."""
    vocab = weights_BV.shape[-1]
    padded = F.pad(weights_BV, (0, -vocab % BLOCK)) if vocab % BLOCK else weights_BV
    blocks = padded.view(padded.shape[0], -1, BLOCK)
    return blocks, blocks.sum(-1).double().cumsum(-1)


def _inverse_cdf(blocks: torch.Tensor, cdf: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """int64 [B]: the first index whose cumulative weight exceeds ``uniform * total``; never one of weight 0."""
    target = uniforms_B[:, None] * cdf[:, -1:]
    block = _first_above(cdf, target)
    before = torch.where(block > 0, cdf.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    inner = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0].double().cumsum(-1)
    return (block * BLOCK + _first_above(inner, target - before))[:, 0]


def _first_above(cdf: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first index with ``cdf > target``; a target rounded up to the last value finds the last step up."""
    below_total = torch.nextafter(cdf[:, -1:], torch.zeros_like(cdf[:, -1:]))
    return torch.searchsorted(cdf, torch.minimum(target, below_total), right=True)


def _sample_cut(weights_V: torch.Tensor, params: SamplingParams, uniform: float) -> torch.Tensor:
    ordered, ids = torch.sort(weights_V, descending=True, stable=True)
    if params.top_k:
        ordered, ids = ordered[: params.top_k], ids[: params.top_k]
    cdf = ordered.double().cumsum(-1)
    if params.top_p < 1.0:
        kept = int((cdf < params.top_p * cdf[-1]).sum()) + 1
        cdf = cdf[:kept]
    target = torch.tensor([[uniform]], dtype=torch.float64, device=cdf.device) * cdf[-1]
    return ids[_first_above(cdf[None], target)[0, 0]]
