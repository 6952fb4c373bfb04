"""Per-token estimates of a KL divergence, finite by construction (J. Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

from typing import Literal

import torch

KlEstimator = Literal["k1", "k2", "k3"]
# exp() of a log-ratio is taken only within these bounds: exp(20) is 4.9e8, far from the fp32 limit of 3e38. Values
# inside pass through bit for bit; outside, the value saturates and the gradient is 0.
MAX_LOG_RATIO = 20.0


def bound(log_ratio: torch.Tensor) -> torch.Tensor:
    """The log-ratio, safe to exponentiate."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_estimate(logps_R: torch.Tensor, ref_logps_R: torch.Tensor, *, estimator: KlEstimator) -> torch.Tensor:
    """KL(policy || reference) at tokens drawn from the policy, [R], in nats.

    With ``d = logp - ref_logp``: ``k1 = d`` (unbiased, can be negative), ``k2 = d^2 / 2`` (biased, small variance),
    ``k3 = exp(-d) - 1 + d`` (unbiased, never negative; GRPO, arXiv 2402.03300, eq. 4). Only k3 takes an exponential:
    where the reference is more likely than the policy by more than ``MAX_LOG_RATIO`` nats it saturates.
    """
    difference = logps_R - ref_logps_R
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    assert estimator == "k3", estimator
    towards_ref = (-difference).clamp(max=MAX_LOG_RATIO)
    return towards_ref.exp() - 1.0 - towards_ref


def kl_to_go(kl_R: torch.Tensor, segment_R: torch.Tensor, *, gamma: float = 1.0) -> torch.Tensor:
    """Discounted sum of the KL of this and all later scored tokens of the same segment, [R].

    Subtracted (times the coefficient) from the advantages this is a KL penalty *in the reward*, though not quite that
    of REINFORCE++ (arXiv 2501.03262): there the penalised return, ``r - coef * KL to go``, is normalised over the
    batch; here ``A - coef * KL to go`` with ``A`` normalised before, from the rewards alone. So the KL enters neither
    baseline nor standard deviation ``S``, and the coefficient is in units of the advantage: theirs divided by ``S``
    (with ``group_mean`` and ``rloo``, which divide by nothing, in units of the reward). The reason: advantages are
    computed on rank 0 before any rank has the reference's log-probs. A discount step is a model token, as in
    `advantages.spread`: tokens in between that the policy did not write have no place in ``_R`` and cost nothing. With
    gamma 0.9 and two scored tokens of KL 1 the first gets 1.9.
    """
    returns, step = kl_R.double(), 1
    while step < len(returns):  # after k rounds each entry holds the sum over its next 2^k tokens
        same = segment_R[step:] == segment_R[:-step]
        later = torch.where(same, returns[step:] * gamma**step, 0.0)
        returns = torch.cat([returns[:-step] + later, returns[-step:]])
        step *= 2
    return returns.to(kl_R.dtype)
