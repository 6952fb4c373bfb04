"""KL estimates: exact values, bounds, unbiasedness; KL in the reward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mdapo.algorithms.kl import MAX_LOG_RATIO, bound, kl_estimate, kl_to_go

ESTIMATORS = ("k1", "k2", "k3")


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("difference", [-200.0, 200.0])
def test_extreme_log_ratios_give_finite_values_and_gradients(estimator: Any, difference: float) -> None:
    """Case 23: +-200 nats at one token."""
    logps = torch.tensor([-1.0, -1.0], requires_grad=True)
    kl = kl_estimate(logps, torch.tensor([-1.0 - difference, -1.0]), estimator=estimator)
    kl.sum().backward()
    assert kl.isfinite().all()
    assert logps.grad is not None
    assert logps.grad.isfinite().all()
    assert kl[1] == 0


def test_in_range_log_ratios_pass_bit_for_bit() -> None:
    """Case 23: the bound changes nothing where nothing is wrong."""
    values = torch.linspace(-MAX_LOG_RATIO, MAX_LOG_RATIO, 4001)
    assert torch.equal(bound(values), values)
    plain = (-values).exp() - 1.0 - (-values)
    assert torch.equal(kl_estimate(values, torch.zeros_like(values), estimator="k3"), plain)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_are_those_of_the_formula(estimator: Any) -> None:
    logps = torch.tensor([-2.0, -0.3, -5.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -0.4, -5.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, reference, estimator=estimator), logps)


def test_k1_and_k3_have_the_expectation_of_the_true_divergence() -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    true = (policy * (policy / reference).log()).sum()
    for estimator in ("k1", "k3"):
        estimate = kl_estimate(policy.log(), reference.log(), estimator=estimator)
        torch.testing.assert_close((policy * estimate).sum(), true)
    assert (kl_estimate(policy.log(), reference.log(), estimator="k3") >= 0).all()


def test_kl_in_the_reward_counts_model_tokens_only() -> None:
    """Case 22b: mask 1, 0, 0, 1, KL 1 everywhere, gamma 0.9. Ours is 1.9: the two scored tokens are neighbours. A
    discount over observations would give 1.729, and leaking their KL 3.439."""
    to_go = kl_to_go(torch.ones(2), torch.zeros(2, dtype=torch.int64), gamma=0.9)
    torch.testing.assert_close(to_go, torch.tensor([1.9, 1.0]))


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_kl_to_go_equals_a_backward_loop_within_each_segment(gamma: float) -> None:
    kl = np.random.default_rng(0).normal(size=23)
    segments = np.repeat([0, 1, 3, 4], [5, 1, 9, 8])
    expected = kl.copy()
    for t in reversed(range(22)):
        if segments[t] == segments[t + 1]:
            expected[t] += gamma * expected[t + 1]
    found = kl_to_go(torch.from_numpy(kl), torch.from_numpy(segments), gamma=gamma)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
