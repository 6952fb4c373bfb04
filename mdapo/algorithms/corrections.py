"""Correcting for tokens that were drawn from a distribution other than the actor's: another engine, older weights."""

from __future__ import annotations

import torch

from mdapo.algorithms.kl import bound


def tis_weights(old_logps_R: torch.Tensor, rollout_logps_R: torch.Tensor, *, cap: float) -> torch.Tensor:
    """Truncated importance weights ``min(exp(old_logp - rollout_logp), cap)``, float [R], without gradient.

    The actor computes ``old_logps`` with its own kernels, its precision and the weights of the step's start; the engine
    drew the tokens with others, and those of a group carried over from an earlier step with older weights too. The
    weight makes the expectation the actor's again, and the cap bounds its variance (Yao et al., "Your efficient RL
    framework secretly brings you off-policy RL training", 2025). A token without a rollout log-prob (NaN) weighs 1.
    """
    gap = (old_logps_R - rollout_logps_R).detach()
    return torch.where(gap.isfinite(), bound(torch.nan_to_num(gap)).exp().clamp(max=cap), torch.ones_like(gap))
