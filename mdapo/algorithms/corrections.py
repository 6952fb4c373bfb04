"""Correcting for tokens that were drawn from a distribution other than the actor's: another engine, older weights.

The actor computes ``old_logps`` with its own kernels, its precision and the weights of the step's start; the engine
drew the tokens with others, and those of a conversation begun in an earlier step with older weights too. With
``rho = exp(old_logp - rollout_logp)`` at a token, a *ratio* has one of three levels:

* ``token``: ``rho`` itself;
* ``sequence``: the product of ``rho`` over the sequence's tokens, the ratio of the two policies at the whole response;
* ``geometric``: its root, the mean in log space over the sequence's tokens (GSPO, arXiv 2507.18071, eq. 7).

and is used in two ways, which may be combined (`Correction`):

* **truncated** (``rollout_is``, TIS): a token's loss is multiplied with ``min(ratio, threshold)`` (token level: IMPALA,
  arXiv 1802.01561, eq. 1, and Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
  2025; sequence level: Liu et al., "When Speed Kills Stability", 2025). The weight makes the expectation the actor's
  again; the threshold bounds its variance.
* **masked** (``rollout_rs``): what has a ratio outside ``[lower, upper]`` has no loss, a token or its whole sequence
  (sequence and geometric level: Liu et al., 2025).

Both together are MIS, masked importance sampling: ``ratio * 1[lower <= ratio <= upper]``, once the threshold is not
below ``upper`` (at token level: IcePop, Ling team, arXiv 2510.18855). The loss's denominator stays that of all tokens:
it is known before any log-prob is. A masked token is to the loss as one of weight 0.

A token without a rollout log-prob (NaN) has a ratio of 1, takes no part in its sequence's, and is counted; with its
sequence it is masked. Log-ratios are summed first and bounded before ``exp`` (`kl.bound`). Equal policies have ratios
of exactly 1: every weight is exactly 1, and the loss the same in every bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from mdapo.algorithms.kl import bound

if TYPE_CHECKING:
    from mdapo.config.schema import RolloutCorrection

Level = Literal["token", "sequence", "geometric"]
Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Segments:
    """Which sequence each token is of: ``segment_R`` int64, ascending, values below ``count``."""

    segment_R: torch.Tensor
    count: int


@dataclass(frozen=True)
class Correction:
    """``weights_R`` float [R], without gradient, multiplies a token's loss: 0 where it is masked. ``metrics``: sums to
    be added up over micro-batches and ranks, over the tokens whose rollout log-prob is known."""

    weights_R: torch.Tensor
    metrics: Metrics


@torch.no_grad()
def ratios(
    old_logps_R: torch.Tensor,
    rollout_logps_R: torch.Tensor,
    active_R: torch.Tensor,
    segments: Segments,
    *,
    level: Level,
) -> torch.Tensor:
    """The ratio of actor to engine that each token has at this level, [R], within ``exp(+-MAX_LOG_RATIO)``.

    ``active_R`` bool: tokens with loss; others have no say in their sequence's ratio.
    """
    gap = old_logps_R - rollout_logps_R
    known = gap.isfinite()
    gap = torch.where(known, gap, torch.zeros_like(gap))
    if level == "token":
        return bound(gap).exp()
    counted = known & active_R
    total = segment_sum(torch.where(counted, gap, torch.zeros_like(gap)), segments)
    if level == "geometric":
        total = total / segment_sum(counted.to(gap.dtype), segments).clamp(min=1.0)
    else:
        assert level == "sequence", level
    return bound(total).exp()[segments.segment_R]


@torch.no_grad()
def correct(
    old_logps_R: torch.Tensor,
    rollout_logps_R: torch.Tensor,
    active_R: torch.Tensor,
    segments: Segments,
    cfg: RolloutCorrection,
) -> Correction:
    """What ``algorithm.rollout_correction`` makes of these tokens. Metrics: ``rollout_is_weight`` and
    ``rollout_is_capped`` (share at the threshold), ``rollout_rs_masked`` (share without loss), each where it is on.
    """
    known = active_R & (old_logps_R - rollout_logps_R).isfinite()
    weights, metrics = torch.ones_like(old_logps_R), {}
    if cfg.rollout_is is not None:
        ratio = ratios(old_logps_R, rollout_logps_R, active_R, segments, level=cfg.rollout_is)
        weights = ratio.clamp(max=cfg.rollout_is_threshold)
        metrics["rollout_is_weight"] = torch.where(known, weights, 0.0).sum()
        metrics["rollout_is_capped"] = (known & (ratio > cfg.rollout_is_threshold)).sum()
    if cfg.rollout_rs is not None:
        lowest, highest = rs_range(cfg)
        ratio = ratios(old_logps_R, rollout_logps_R, active_R, segments, level=cfg.rollout_rs)
        masked = (ratio < lowest) | (ratio > highest)
        weights = torch.where(masked, 0.0, weights)
        metrics["rollout_rs_masked"] = (known & masked).sum()
    return Correction(weights, {name: value.float() for name, value in metrics.items()})


def rs_range(cfg: RolloutCorrection) -> tuple[float, float]:
    """The ratios that ``rollout_rs`` lets pass; without a lower threshold, down to the upper one's reciprocal."""
    assert cfg.rollout_rs_threshold is not None, "config/rules.py asks for it where rollout_rs is set"
    lower = cfg.rollout_rs_threshold_lower
    return (1.0 / cfg.rollout_rs_threshold if lower is None else lower), cfg.rollout_rs_threshold


@torch.no_grad()
def mismatch(old_logps_R: torch.Tensor, rollout_logps_R: torch.Tensor, active_R: torch.Tensor) -> Metrics:
    """How far the policy that wrote the tokens is from the actor: sums over the tokens whose rollout log-prob is known.

    ``rollout_tokens`` (how many those are), ``rollout_unknown`` (active ones that have none), ``rollout_logp_gap``
    (``|old - rollout|``) and its ``_max``, ``rollout_kl_k1`` and ``rollout_kl`` (estimates k1 and k3 of the KL from
    engine to actor: the tokens are the engine's).
    """
    known = active_R & rollout_logps_R.isfinite()
    gap = torch.where(known, old_logps_R, 0.0) - torch.where(known, rollout_logps_R, 0.0)
    bounded = bound(gap)
    metrics = {
        "rollout_tokens": known.sum(),
        "rollout_unknown": (active_R & ~known).sum(),
        "rollout_logp_gap": gap.abs().sum(),
        "rollout_logp_gap_max": gap.abs().max(),
        "rollout_kl_k1": -gap.sum(),
        "rollout_kl": (bounded.exp() - 1.0 - bounded).sum(),
    }
    return {name: value.float() for name, value in metrics.items()}


def segment_sum(values_R: torch.Tensor, segments: Segments) -> torch.Tensor:
    """The sum over each segment, [count]. A segmented reduction has a fixed order; scatter-add has none."""
    lengths = torch.bincount(segments.segment_R, minlength=segments.count)
    return torch.segment_reduce(values_R, "sum", lengths=lengths, initial=0.0)
