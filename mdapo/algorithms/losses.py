"""Policy losses over flat response tokens, in fp32, and the weights that hold their global denominator.

Every loss here is ``sum over R of weight_R * token_loss_R`` (plus KL and entropy with the same weights). The weights carry
the denominator of the *whole* optimizer step (`token_weights`), so the step's loss is the plain sum over micro-batches and
data-parallel ranks, and neither the loss nor its gradient depends on how the batch was cut.

A token of weight 0 takes no part: its inputs are replaced before any arithmetic, so a NaN there reaches neither value nor
gradient. Log-ratios are bounded before ``exp`` (`kl.bound`).

Metrics are 0-d tensors to be added over micro-batches and ranks, except names ending in ``_max``, which are to be
maximised. `means` turns the totals into what is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from mdapo.algorithms.corrections import tis_weights
from mdapo.algorithms.kl import bound, kl_estimate, kl_to_go

if TYPE_CHECKING:
    from mdapo.config.schema import AggMode, Algorithm, Config
    from mdapo.types import MicroBatch

Metrics = dict[str, torch.Tensor]
LossFn = Callable[[torch.Tensor, torch.Tensor, "MicroBatch"], tuple[torch.Tensor, Metrics]]

MAXIMUM = "_max"
# Already in final units once added up: the loss and its terms (their weights hold the denominator), and the counts.
FINAL = frozenset({"loss", "pg_loss", "kl_loss", "entropy_loss", "tokens", "rollout_tokens"})
# Metrics over the tokens whose rollout log-prob is known; all others are over the tokens with weight.
OVER_ROLLOUT_TOKENS = frozenset({"rollout_logp_gap", "rollout_kl", "tis_weight", "tis_capped"})


def token_weights(
    tokens_N: Sequence[int] | np.ndarray, group_N: Sequence[int] | np.ndarray, *, mode: AggMode, max_response_len: int
) -> np.ndarray:
    """Loss weight of each model token of each sample, float64 [N], for the samples of one optimizer step.

    ``tokens_N`` model tokens that carry loss (0 for a masked sample), ``group_N`` the group of each sample. With ``T`` the sum
    of ``tokens_N``, ``T_g`` that of a group, ``N`` and ``G`` the numbers of samples and of groups that carry loss:

    * ``token-mean``               ``1 / T``: DAPO as released, the mean over the tokens of the global batch (the default)
    * ``group-token-mean``         ``1 / (G * T_g)``: DAPO as written (arXiv 2503.14476, eq. 8), the mean over a group's tokens,
      then over groups. Equal to the former when all groups have as many tokens.
    * ``seq-mean-token-mean``      ``1 / (N * tokens)``: GRPO (2402.03300, eq. 3), GSPO (2507.18071, eq. 5), GMPO (2507.20673)
    * ``seq-mean-token-sum-norm``  ``1 / (N * max_response_len)``: Dr. GRPO (2503.20783), a constant in place of the length
    """
    tokens = np.asarray(tokens_N, np.float64)
    carries = tokens > 0
    count = max(int(carries.sum()), 1)
    if mode == "token-mean":
        denominators = np.full(len(tokens), tokens.sum())
    elif mode == "group-token-mean":
        groups, group_index = np.unique(np.asarray(group_N), return_inverse=True)
        tokens_G = np.bincount(group_index, weights=tokens, minlength=len(groups))
        denominators = tokens_G[group_index] * np.count_nonzero(tokens_G)
    elif mode == "seq-mean-token-mean":
        denominators = tokens * count
    else:
        assert mode == "seq-mean-token-sum-norm", mode
        denominators = np.full(len(tokens), float(max_response_len * count))
    return np.divide(1.0, denominators, out=np.zeros(len(tokens)), where=carries)


def policy_loss(
    logps_R: torch.Tensor,
    old_logps_R: torch.Tensor,
    advantages_R: torch.Tensor,
    weights_R: torch.Tensor,
    segment_R: torch.Tensor,
    num_segments: int,
    cfg: Algorithm,
) -> tuple[torch.Tensor, Metrics]:
    """``sum(weights * token_loss)`` and its metrics; which token loss is ``cfg.policy_loss``.

    ``segment_R`` is ascending, as packing leaves it. With ``r = exp(logp - old_logp)`` and ``A`` the advantage:

    * ``token_clip``  ``-min(r A, clip(r, 1 - low, 1 + high) A)``, clip-higher when high > low (DAPO, arXiv 2503.14476,
      eq. 8 and 10). With ``clip_ratio_c``, where ``A < 0`` the loss is at most ``-c A`` (dual clip, 1912.09729).
    * ``gspo``        the same with ``r`` replaced by the sequence's ``s = exp(mean of logp - old_logp)``, whose gradient goes
      to each token by a stop-gradient: ``sg(s) * p / sg(p)`` (2507.18071). Clip ratios there are some 1e-4.
    * ``gmpo``        ``-A exp(mean of clipped logp - old_logp)``; tokens are clipped one by one, in log space, to
      ``[-low, high]``, on the side that the sign of ``A`` makes pessimistic (2507.20673).

    A sequence's mean is over its tokens of non-zero weight. Metrics (sums over tokens of non-zero weight): ``ratio``,
    ``ratio_max``, ``approx_kl`` (k3 of old and new policy), ``clip_low`` (A < 0, ratio under ``1 - low``: the clipped branch
    rules), ``clip_high`` (A > 0, over ``1 + high``), ``clip_dual``, ``advantage``, ``pg_loss``, ``tokens``.
    """
    assert cfg.clip_ratio_low is not None and cfg.clip_ratio_high is not None
    active = weights_R > 0
    weights = torch.where(active, weights_R.float(), 0.0)
    advantages = torch.where(active, advantages_R.float(), 0.0)
    log_ratio = torch.where(active, logps_R.float(), 0.0) - torch.where(active, old_logps_R.float(), 0.0)
    low, high = cfg.clip_ratio_low, cfg.clip_ratio_high
    if cfg.policy_loss == "gmpo":
        log_clipped = log_ratio.clamp(-low, high)
        pessimistic = torch.where(
            advantages > 0, torch.minimum(log_ratio, log_clipped), torch.maximum(log_ratio, log_clipped)
        )
        ratio = bound(_segment_mean(pessimistic, active, segment_R, num_segments)).exp()
        token_loss = -advantages * ratio
        below, above = log_ratio < -low, log_ratio > high
        dual = torch.zeros_like(active)
    else:
        if cfg.policy_loss == "gspo":
            sequence = _segment_mean(log_ratio.detach(), active, segment_R, num_segments)
            log_ratio = log_ratio - log_ratio.detach() + sequence
        ratio = bound(log_ratio).exp()
        token_loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high))
        below, above = ratio < 1.0 - low, ratio > 1.0 + high
        dual = torch.zeros_like(active)
        if cfg.clip_ratio_c is not None:
            dual = (advantages < 0) & (ratio > cfg.clip_ratio_c)
            ceiling = torch.where(advantages < 0, -advantages * cfg.clip_ratio_c, float("inf"))
            token_loss = torch.minimum(token_loss, ceiling)
    loss = (weights * token_loss).sum()
    with torch.no_grad():
        old_to_new = bound(log_ratio)
        metrics = {
            "tokens": active.sum(),
            "pg_loss": loss.detach(),
            "ratio": torch.where(active, ratio, 0.0).sum(),
            "ratio_max": torch.where(active, ratio, 0.0).max(),
            "approx_kl": (old_to_new.exp() - 1.0 - old_to_new).sum(),
            "clip_low": (below & (advantages < 0)).sum(),
            "clip_high": (above & (advantages > 0)).sum(),
            "clip_dual": dual.sum(),
            "advantage": advantages.sum(),
        }
    return loss, {name: value.float() for name, value in metrics.items()}


def make_loss_fn(cfg: Config) -> LossFn:
    """The loss of a micro-batch as the actor calls it: ``loss_fn(logps_R, entropies_R, micro_batch)``.

    Policy loss, minus ``entropy_coef`` times the entropy, plus ``kl.coef`` times the KL to the reference model, all with the
    micro-batch's weights. ``old_logps_R`` None means that the step is on-policy: the forward pass's own log-probs, detached,
    stand in (the ratio is exactly 1, the gradient the same). With ``kl.where == "reward"`` the discounted KL to go of the
    policy before the update is taken from the advantages instead. With ``tis_cap`` each token's weight is multiplied
    by `tis_weights`. Further metrics: ``loss``, ``entropy``, ``kl`` (sum of estimates), ``rollout_logp_gap``
    (``|old - rollout|``), ``rollout_logp_gap_max``, ``rollout_kl`` (k3, engine to actor), ``rollout_tokens``.
    """
    algorithm = cfg.algorithm

    def loss_fn(
        logps_R: torch.Tensor, entropies_R: torch.Tensor, micro_batch: MicroBatch
    ) -> tuple[torch.Tensor, Metrics]:
        logps = logps_R.float()
        old_logps = logps.detach() if micro_batch.old_logps_R is None else micro_batch.old_logps_R
        active = micro_batch.loss_weights_R > 0
        weights, advantages = micro_batch.loss_weights_R, micro_batch.advantages_R
        gap_metrics = _gap_metrics(
            old_logps, micro_batch.rollout_logps_R, active, cap=algorithm.rollout_correction.tis_cap
        )
        if algorithm.rollout_correction.tis_cap > 0:
            weights = weights * tis_weights(
                old_logps, micro_batch.rollout_logps_R, cap=algorithm.rollout_correction.tis_cap
            )
        kl_metrics: Metrics = {}
        kl_loss = None
        if algorithm.kl.enable:
            assert micro_batch.ref_logps_R is not None, "a KL term needs the reference model's log-probs"
            in_loss = algorithm.kl.where == "loss"
            kl = kl_estimate(
                torch.where(active, logps if in_loss else old_logps, 0.0),
                torch.where(active, micro_batch.ref_logps_R, 0.0),
                estimator=algorithm.kl.estimator,
            )
            kl_metrics["kl"] = kl.detach().sum()
            if in_loss:
                kl_loss = algorithm.kl.coef * (torch.where(active, weights, 0.0) * kl).sum()
                kl_metrics["kl_loss"] = kl_loss.detach()
            else:
                to_go = kl_to_go(kl, micro_batch.segment_R, gamma=algorithm.gamma)
                advantages = advantages - algorithm.kl.coef * to_go
        loss, metrics = policy_loss(
            logps, old_logps, advantages, weights, micro_batch.segment_R, micro_batch.num_segments, algorithm
        )
        entropies = torch.where(active, entropies_R.float(), 0.0)
        metrics["entropy"] = entropies.detach().sum()
        if algorithm.entropy_coef != 0.0:
            entropy_loss = -algorithm.entropy_coef * (torch.where(active, weights, 0.0) * entropies).sum()
            metrics["entropy_loss"] = entropy_loss.detach()
            loss = loss + entropy_loss
        if kl_loss is not None:
            loss = loss + kl_loss
        return loss, {"loss": loss.detach(), **metrics, **kl_metrics, **gap_metrics}

    return loss_fn


def means(totals: Mapping[str, float]) -> dict[str, float]:
    """What is logged, from metrics added up (``_max``: maximised) over all micro-batches and ranks of an optimizer step.

    Loss terms, counts and maxima stay as they are; the rest becomes a mean over ``tokens``, or over ``rollout_tokens`` for
    the engine comparisons. No tokens: the means are 0.
    """
    result = {}
    for name, total in totals.items():
        if name in FINAL or name.endswith(MAXIMUM):
            result[name] = float(total)
        else:
            count = totals["rollout_tokens" if name in OVER_ROLLOUT_TOKENS else "tokens"]
            result[name] = float(total) / count if count else 0.0
    return result


def _segment_mean(
    values_R: torch.Tensor, active_R: torch.Tensor, segment_R: torch.Tensor, num_segments: int
) -> torch.Tensor:
    """Mean over the active tokens of each token's segment, [R]. A segmented reduction has a fixed order; scatter-add has none."""
    lengths = torch.bincount(segment_R, minlength=num_segments)
    count = torch.segment_reduce(active_R.to(values_R.dtype), "sum", lengths=lengths, initial=0.0)
    total = torch.segment_reduce(torch.where(active_R, values_R, 0.0), "sum", lengths=lengths, initial=0.0)
    return (total / count.clamp(min=1.0))[segment_R]


@torch.no_grad()
def _gap_metrics(
    old_logps_R: torch.Tensor, rollout_logps_R: torch.Tensor, active_R: torch.Tensor, *, cap: float
) -> Metrics:
    known = active_R & rollout_logps_R.isfinite()
    gap = torch.where(known, old_logps_R, 0.0) - torch.where(known, rollout_logps_R, 0.0)
    bounded = bound(gap)
    metrics = {
        "rollout_tokens": known.sum().float(),
        "rollout_logp_gap": gap.abs().sum(),
        "rollout_logp_gap_max": gap.abs().max(),
        "rollout_kl": (bounded.exp() - 1.0 - bounded).sum(),
    }
    if cap > 0:
        metrics["tis_weight"] = torch.where(known, bounded.exp().clamp(max=cap), 0.0).sum()
        metrics["tis_capped"] = (known & (bounded.exp() > cap)).sum().float()
    return metrics
