"""Policy losses over flat response tokens, in fp32, and the weights that hold their global denominator.

Every loss here is ``sum over R of weight_R * token_loss_R`` (plus KL and entropy with the same weights). The weights
carry the denominator of the *whole* optimizer step (`token_weights`), so the step's loss is the plain sum over
micro-batches and data-parallel ranks, and neither the loss nor its gradient depends on how the batch was cut.

A token of weight 0 takes no part: its inputs are replaced before any arithmetic, so a NaN there reaches neither value
nor gradient. Log-ratios are bounded before ``exp`` (`kl.bound`).

Metrics are 0-d tensors to be added over micro-batches and ranks, except names ending in ``_max``, which are to be
maximised. `means` turns the totals into what is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mdapo.algorithms.corrections import Segments, correct, mismatch, segment_sum
from mdapo.algorithms.kl import bound, kl_estimate, kl_to_go

if TYPE_CHECKING:
    from mdapo.config.schema import AggMode, Algorithm, Config
    from mdapo.types import MicroBatch

Metrics = dict[str, torch.Tensor]
LossFn = Callable[[torch.Tensor, torch.Tensor, "MicroBatch"], tuple[torch.Tensor, Metrics]]

MAXIMUM = "_max"
# Already in final units once added up: the terms of the loss (their weights hold the denominator), and the counts.
COUNTS = frozenset({"tokens", "rollout_tokens", "rollout_unknown"})
FINAL = frozenset({"pg_loss", "kl_loss", "entropy_loss"}) | COUNTS
# Metrics over the tokens whose rollout log-prob is known; all others are over the tokens with weight.
OVER_ROLLOUT_TOKENS = frozenset(
    {"rollout_logp_gap", "rollout_kl", "rollout_kl_k1", "rollout_is_weight", "rollout_is_capped", "rollout_rs_masked"}
)


def token_weights(
    tokens_N: Sequence[int] | np.ndarray, group_N: Sequence[int] | np.ndarray, *, mode: AggMode, max_response_len: int
) -> np.ndarray:
    """Loss weight of each model token of each sample, float64 [N], for the samples of one optimizer step.

    ``tokens_N`` model tokens that carry loss (0 for a masked sample), ``group_N`` the group of each sample. With
    ``T`` the sum of ``tokens_N``, ``T_g`` that of a group, ``N`` and ``G`` the numbers of samples and of groups that
    carry loss:

    * ``token-mean``: ``1 / T``. DAPO as released, the mean over the tokens of the global batch; the default.
    * ``group-token-mean``: ``1 / (G * T_g)``. DAPO as written (arXiv 2503.14476, eq. 8), the mean over a group's
      tokens, then over groups. The same as the former when all groups have as many tokens.
    * ``seq-mean-token-mean``: ``1 / (N * tokens)``. GRPO (2402.03300), GSPO (2507.18071, eq. 5), GMPO (2507.20673).
    * ``seq-mean-token-sum-norm``: ``1 / (N * max_response_len)``. Dr. GRPO (2503.20783), a constant for the length.
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

    * ``token_clip``: ``-min(r A, clip(r, 1 - low, 1 + high) A)``; clip-higher when high > low (DAPO, arXiv 2503.14476,
      eq. 8 and 10). With ``clip_ratio_c``, where ``A < 0`` the loss is at most ``-c A`` (dual clip, 1912.09729).
    * ``gspo``: the same with ``r`` replaced by the sequence's ``s = exp(mean of logp - old_logp)``, whose gradient
      goes to each token by a stop-gradient, ``sg(s) * p / sg(p)`` (GSPO-token, 2507.18071). Clip ratios near 3e-4.
    * ``gmpo``: ``-A exp(mean of the clipped logp - old_logp)``. Tokens are clipped one by one, in log space, to
      ``[-low, high]``, on the side that the sign of ``A`` makes pessimistic (2507.20673). Clip ratios near 0.4.

    A sequence's mean is over its tokens of non-zero weight. Metrics (sums over tokens of non-zero weight): ``ratio``,
    ``ratio_max``, ``approx_kl`` (k3 of old and new policy), ``clip_low`` (A < 0, ratio under ``1 - low``: the clipped
    branch rules), ``clip_high`` (A > 0, over ``1 + high``), ``clip_dual``, ``advantage``, ``pg_loss``, ``tokens``.
    """
    active = weights_R > 0
    dtype = torch.promote_types(logps_R.dtype, torch.float32)
    weights, advantages, logps, old_logps = (
        torch.where(active, x.to(dtype), 0.0) for x in (weights_R, advantages_R, logps_R, old_logps_R)
    )
    log_ratio = logps - old_logps
    if cfg.policy_loss == "gmpo":
        terms = _geometric_mean(log_ratio, advantages, active, segment_R, num_segments, cfg)
    elif cfg.policy_loss == "gspo":
        sequence = _segment_mean(log_ratio.detach(), active, segment_R, num_segments)
        terms = _clipped(log_ratio - log_ratio.detach() + sequence, advantages, cfg)
    else:
        assert cfg.policy_loss == "token_clip", cfg.policy_loss
        terms = _clipped(log_ratio, advantages, cfg)
    loss = (weights * terms.loss).sum()
    with torch.no_grad():
        ratio = torch.where(active, terms.ratio, 0.0)
        old_to_new = bound(log_ratio)
        metrics = {
            "tokens": active.sum(),
            "pg_loss": loss,
            "ratio": ratio.sum(),
            "ratio_max": ratio.max(),
            "approx_kl": (old_to_new.exp() - 1.0 - old_to_new).sum(),
            "clip_low": (terms.below & (advantages < 0)).sum(),
            "clip_high": (terms.above & (advantages > 0)).sum(),
            "clip_dual": terms.dual.sum(),
            "advantage": advantages.sum(),
        }
    return loss, {name: value.detach().float() for name, value in metrics.items()}


def make_loss_fn(cfg: Config) -> LossFn:
    """The loss of a micro-batch as the actor calls it: ``loss_fn(logps_R, entropies_R, micro_batch)``.

    Policy loss, minus ``entropy_coef`` times the entropy, plus ``kl.coef`` times the KL to the reference model, all
    with the micro-batch's weights. Old log-probs are those of the policy at the step's start, whoever wrote the tokens:
    ``old_logps_R`` None means the first update of a step, where the forward pass's own log-probs, detached, are those
    (the ratio is exactly 1, the gradient the same). That tokens of a carried group come from an older policy is not in
    this ratio but in `corrections.correct`, which multiplies each token's weight, or masks it, as
    ``algorithm.rollout_correction`` says; by default it is not corrected. A masked token is one of weight 0. With
    ``kl.where == "reward"``, ``kl.coef`` times the discounted KL to go of the policy at the step's start is taken from
    the advantages instead; these are normalised already (see `kl_to_go`). Further metrics: ``entropy``, ``kl``,
    ``kl_loss``, ``entropy_loss``, and those of `corrections.mismatch` and `corrections.correct`. The loss itself is not
    among them.
    """
    algorithm, correction = cfg.algorithm, cfg.algorithm.rollout_correction

    def loss_fn(logps_R: torch.Tensor, entropies_R: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Metrics]:
        logps = logps_R.float()
        old_logps = logps.detach() if batch.old_logps_R is None else batch.old_logps_R
        active = batch.loss_weights_R > 0
        weights, advantages = torch.where(active, batch.loss_weights_R, 0.0), batch.advantages_R
        metrics = mismatch(old_logps, batch.rollout_logps_R, active)
        if correction.rollout_is is not None or correction.rollout_rs is not None:
            segments = Segments(batch.segment_R, batch.num_segments)
            corrected = correct(old_logps, batch.rollout_logps_R, active, segments, correction)
            weights = weights * corrected.weights_R
            active = weights > 0  # what is masked takes no part from here on
            metrics |= corrected.metrics
        extra_loss = torch.zeros((), device=logps.device)
        if algorithm.kl.enable:
            in_loss = algorithm.kl.where == "loss"
            kl = _kl_to_reference(logps if in_loss else old_logps, batch, active, algorithm)
            metrics["kl"] = kl.detach().sum()
            if in_loss:
                extra_loss = algorithm.kl.coef * (weights * kl).sum()
                metrics["kl_loss"] = extra_loss.detach()
            else:
                advantages = advantages - algorithm.kl.coef * kl_to_go(kl, batch.segment_R, gamma=algorithm.gamma)
        entropies = torch.where(active, entropies_R.float(), 0.0)
        metrics["entropy"] = entropies.detach().sum()
        if algorithm.entropy_coef != 0.0:
            entropy_loss = -algorithm.entropy_coef * (weights * entropies).sum()
            metrics["entropy_loss"] = entropy_loss.detach()
            extra_loss = extra_loss + entropy_loss
        pg_loss, pg_metrics = policy_loss(
            logps, old_logps, advantages, weights, batch.segment_R, batch.num_segments, algorithm
        )
        return pg_loss + extra_loss, {**pg_metrics, **metrics}

    return loss_fn


def means(totals: Mapping[str, float]) -> dict[str, float]:
    """What is logged, from metrics added up (``_max``: maximised) over all micro-batches and ranks of an optimizer
    step.

    Loss terms, counts and maxima stay as they are; the rest becomes a mean over ``tokens``, or over
    ``rollout_tokens`` for the engine comparisons. No tokens: the means are 0.
    """
    result = {}
    for name, total in totals.items():
        if name in FINAL or name.endswith(MAXIMUM):
            result[name] = float(total)
        else:
            count = totals["rollout_tokens" if name in OVER_ROLLOUT_TOKENS else "tokens"]
            result[name] = float(total) / count if count else 0.0
    return result


@dataclass(frozen=True)
class _Terms:
    """Per token [R]: the loss before weights, the ratio it uses, whether that is under or over the clip range, dual
    clip.
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    below: torch.Tensor
    above: torch.Tensor
    dual: torch.Tensor


def _clipped(log_ratio: torch.Tensor, advantages: torch.Tensor, cfg: Algorithm) -> _Terms:
    lowest, highest = 1.0 - _given(cfg.clip_ratio_low), 1.0 + _given(cfg.clip_ratio_high)
    ratio = bound(log_ratio).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(lowest, highest))
    dual = torch.zeros_like(ratio, dtype=torch.bool)
    if cfg.clip_ratio_c is not None:
        dual = (advantages < 0) & (ratio > cfg.clip_ratio_c)
        loss = torch.where(dual, -advantages * cfg.clip_ratio_c, loss)
    return _Terms(loss, ratio, ratio < lowest, ratio > highest, dual)


def _geometric_mean(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    active: torch.Tensor,
    segment_R: torch.Tensor,
    num_segments: int,
    cfg: Algorithm,
) -> _Terms:
    low, high = _given(cfg.clip_ratio_low), _given(cfg.clip_ratio_high)
    clipped = log_ratio.clamp(-low, high)
    pessimistic = torch.where(advantages > 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped))
    ratio = bound(_segment_mean(pessimistic, active, segment_R, num_segments)).exp()
    below, above = log_ratio < -low, log_ratio > high
    return _Terms(-advantages * ratio, ratio, below, above, torch.zeros_like(below))


def _segment_mean(
    values_R: torch.Tensor, active_R: torch.Tensor, segment_R: torch.Tensor, num_segments: int
) -> torch.Tensor:
    """Mean over the active tokens of each token's segment, [R]."""
    segments = Segments(segment_R, num_segments)
    count = segment_sum(active_R.to(values_R.dtype), segments)
    total = segment_sum(torch.where(active_R, values_R, 0.0), segments)
    return (total / count.clamp(min=1.0))[segment_R]


def _kl_to_reference(logps_R: torch.Tensor, batch: MicroBatch, active_R: torch.Tensor, cfg: Algorithm) -> torch.Tensor:
    assert batch.ref_logps_R is not None, "a KL term needs the reference model's log-probs"
    logps, reference = torch.where(active_R, logps_R, 0.0), torch.where(active_R, batch.ref_logps_R, 0.0)
    return kl_estimate(logps, reference, estimator=cfg.kl.estimator)


def _given(clip_ratio: float | None) -> float:
    assert clip_ratio is not None, "clip ratios come from config/presets.py when they are not set"
    return clip_ratio
