"""Advantages against references written out in plain Python, and the inputs that broke others."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.algorithms.advantages import EPS, advantages, spread

ESTIMATORS = ("group_norm", "group_mean", "rloo")
GROUPS = st.lists(st.lists(st.integers(-8, 8).map(lambda i: i / 4), min_size=1, max_size=6), min_size=1, max_size=5)


def reference(rewards: list[float], estimator: Any) -> list[float]:
    """One group, by the definitions."""
    if len(rewards) < 2 or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    if estimator == "group_mean":
        return [r - mean for r in rewards]
    if estimator == "group_norm":
        return [(r - mean) / (statistics.stdev(rewards) + EPS) for r in rewards]
    others = [(sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    return [r - o for r, o in zip(rewards, others, strict=True)]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=50, deadline=None)
@given(groups=GROUPS, seed=st.integers(0, 99))
def test_estimators_equal_their_definitions_whatever_the_order(estimator: Any, groups: list, seed: int) -> None:
    values = np.array([r for group in groups for r in group])
    names = np.array([100 - g for g, group in enumerate(groups) for _ in group])
    expected = np.array([a for group in groups for a in reference(group, estimator)])
    order = np.random.default_rng(seed).permutation(len(values))
    found = advantages(values[order], names[order], estimator=estimator)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected[order], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_uneven_groups_are_normalised_each_by_itself(estimator: Any) -> None:
    """Case 21: sizes 4, 3, 4 with a uniform middle group, and a singleton."""
    values = np.array([1, 0, 0, 1, 5, 5, 5, 2, 4, 6, 8, 7], float)
    groups = np.array([0] * 4 + [1] * 3 + [2] * 4 + [3])
    found = advantages(values, groups, estimator=estimator)
    assert (found[4:7] == 0).all()
    assert found[11] == 0
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[:4], reference([1, 0, 0, 1], estimator), rtol=1e-5)
    np.testing.assert_allclose(found[7:11], reference([2, 4, 6, 8], estimator), rtol=1e-5)


@pytest.mark.parametrize("estimator", [*ESTIMATORS, "reinforce++"])
@pytest.mark.parametrize("value", [0.1, 1e-30, 1e12, -0.7])
def test_uniform_group_has_no_advantage_though_its_std_is_not_zero(estimator: Any, value: float) -> None:
    """Case 5a: three times 0.1 has a standard deviation of 1.4e-17 in numpy."""
    assert np.std([0.1, 0.1, 0.1]) > 0
    found = advantages(np.array([value, value, value * (1 + 1e-15)]), np.zeros(3, int), estimator=estimator)
    assert (found == 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_one_loser_among_winners_keeps_all_eight(estimator: Any) -> None:
    """Case 5b: one 0.0 and seven 0.95."""
    found = advantages(np.array([0.0] + [0.95] * 7), np.zeros(8, int), estimator=estimator)
    assert found[0] < 0
    assert (found[1:] > 0).all()
    assert np.abs(found).max() < 3


@pytest.mark.parametrize("estimator", [*ESTIMATORS, "reinforce++"])
def test_masked_and_non_finite_episodes_enter_no_statistic(estimator: Any) -> None:
    values, groups = np.array([1.0, 0.0, 0.5, 99.0, np.nan]), np.zeros(5, int)
    valid = np.array([True, True, True, False, True])
    found = advantages(values, groups, estimator=estimator, valid_N=valid)
    alone = advantages(values[:3], groups[:3], estimator=estimator)
    np.testing.assert_array_equal(found, np.append(alone, [0.0, 0.0]).astype(np.float32))


def test_reinforce_normalises_over_all_tokens_of_the_batch() -> None:
    values, tokens = np.array([1.0, 0.0, 3.0]), np.array([2, 5, 1])
    per_token = np.repeat(values, tokens)
    expected = (values - per_token.mean()) / (per_token.std() + EPS)
    found = advantages(values, np.array([0, 0, 1]), estimator="reinforce++", tokens_N=tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_leave_one_out_is_the_centred_reward_times_n_over_n_minus_one() -> None:
    values, groups = np.array([0.3, 0.9, 0.1, 0.4]), np.zeros(4, int)
    rloo = advantages(values, groups, estimator="rloo")
    np.testing.assert_allclose(rloo, advantages(values, groups, estimator="group_mean") * 4 / 3, rtol=1e-6)


def test_discount_counts_model_tokens_only() -> None:
    """Case 22a: reward 1 at the end, mask 1, 0, 1, gamma 0.5; and an episode of its own before and behind it."""
    mask, lengths = np.array([1, 1, 0, 1, 0, 1]), np.array([1, 3, 0, 2])
    found = spread(np.array([4.0, 1.0, 9.0, -2.0]), mask, lengths, gamma=0.5)
    np.testing.assert_array_equal(found, np.array([4.0, 0.5, 0.0, 1.0, 0.0, -2.0], np.float32))


def test_without_discount_every_model_token_gets_the_advantage() -> None:
    mask, length = np.array([0, 0, 1, 1, 0, 1, 0], bool), np.array([7])
    np.testing.assert_array_equal(spread(np.array([-0.3]), mask, length), np.float32(-0.3) * mask)
    last = np.array([0, 0, 0, 0, 0, 2, 0], np.float32)
    np.testing.assert_array_equal(spread(np.array([2.0]), mask, length, gamma=0.0), last)
