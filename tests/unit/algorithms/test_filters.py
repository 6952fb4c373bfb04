"""The group filter on raw outcomes, and the soft overlong penalty."""

from __future__ import annotations

import numpy as np
import pytest

from mdapo.algorithms.filters import (
    ALL_SOLVED,
    INVALID,
    LOW_COHERENCE,
    LOW_METRIC,
    NO_SPREAD,
    NONE_SOLVED,
    judge,
    keep,
    metric_values,
    outcomes,
)
from mdapo.algorithms.overlong import overlong_penalty
from mdapo.config.schema import FilterGroups
from mdapo.types import Episode, Group, Message, Prompt, Score, Turn

NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([1.0] * 4, ALL_SOLVED),
        ([0.0] * 4, NONE_SOLVED),
        ([0.5] * 4, NO_SPREAD),
        ([0.1] * 3, NO_SPREAD),
        ([0.3, 0.1 + 0.2], NO_SPREAD),
        ([NAN, NAN], INVALID),
        ([], INVALID),
        ([1.0, NAN, NAN], INVALID),
        ([1.0, 1.0, NAN], ALL_SOLVED),
        ([0.0, 0.0, NAN], NONE_SOLVED),
    ],
)
def test_groups_without_spread_are_rejected_with_a_reason(values: list[float], reason: str) -> None:
    """Cases 4 and 5a: uniform groups of any value go, float noise or not."""
    verdict = keep(values, FilterGroups())
    assert (verdict.kept, verdict.reason) == (False, reason)


@pytest.mark.parametrize("values", [[0.0, 1.0], [0.0] + [0.95] * 7, [0.5, 0.5, 0.51], [1.0, 0.0, NAN], [-1e-9, 1e-9]])
def test_groups_with_spread_are_kept(values: list[float]) -> None:
    """Case 5b: one 0.0 and seven 0.95 stay together."""
    assert keep(values, FilterGroups()).kept


def test_tolerance_is_relative() -> None:
    cfg = FilterGroups(tolerance=1e-3)
    assert not keep([1000.0, 1000.5], cfg).kept
    assert keep([0.0010, 0.0015], cfg).kept


def test_solved_is_said_of_accuracies_only() -> None:
    assert keep([1.0, 1.0], FilterGroups(metric="score")).reason == NO_SPREAD


def test_disabled_filter_keeps_all_that_was_scored() -> None:
    cfg = FilterGroups(enable=False)
    assert keep([1.0, 1.0], cfg).kept
    assert keep([1.0, NAN], cfg).kept
    assert keep([NAN, NAN], cfg).reason == INVALID


def _episode(prompt: Prompt, index: int, score: Score | None, *, turns: int) -> Episode:
    turn = Turn("assistant", np.ones(2, np.int32), np.ones(2, bool), np.zeros(2, np.float32), version=0)
    return Episode(prompt, index, np.ones(3, np.int32), (turn,) * turns, (), "done", score)


def test_one_outcome_an_episode_however_many_turns_it_has() -> None:
    """Case 7: dialogues that fan out into many turns count once each."""
    prompt = Prompt("p", 0, (Message("user", "hello"),))
    scores = [Score(0.7, 1.0), Score(0.2, 0.0, valid=False), None]
    episodes = tuple(_episode(prompt, i, s, turns=i + 1) for i, s in enumerate(scores))
    group = Group(prompt, episodes, version=0)
    np.testing.assert_array_equal(outcomes(group), [1.0, NAN, NAN])
    np.testing.assert_array_equal(outcomes(group, "score"), [0.7, NAN, NAN])


def _group(*scores: Score | None) -> Group:
    prompt = Prompt("p", 0, (Message("user", "hello"),))
    return Group(prompt, tuple(_episode(prompt, i, s, turns=1) for i, s in enumerate(scores)), version=0)


WON, LOST = Score(0.9, 1.0, coherence=0.8, relevance=0.6), Score(0.1, 0.0, coherence=0.4, relevance=0.2)


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("acc", [1.0, 0.0]),
        ("score", [0.9, 0.1]),
        ("seq_reward", [0.9, 0.1]),
        ("seq_final_reward", [0.9, 0.1]),
        ("coherence", [0.8, 0.4]),
        ("relevance", [0.6, 0.2]),
        ("combined", [(1.0 + 0.5 * 0.8 + 0.25 * 0.6) / 1.75, (0.5 * 0.4 + 0.25 * 0.2) / 1.75]),
    ],
)
def test_each_metric_has_one_number_an_episode(metric: str, values: list[float]) -> None:
    cfg = FilterGroups.model_validate({"metric": metric, "coherence_weight": 0.5, "relevance_weight": 0.25})
    np.testing.assert_allclose(metric_values(_group(WON, LOST), cfg), values)


def test_quality_that_could_not_be_had_is_no_number_and_none_that_is_not_asked_for() -> None:
    unmeasured = Score(0.9, 1.0)
    group = _group(WON, unmeasured, None, Score(0.5, 1.0, valid=False, coherence=1.0, relevance=1.0))
    np.testing.assert_array_equal(np.isfinite(metric_values(group, FilterGroups(metric="combined"))), [1, 0, 0, 0])
    only_outcome = FilterGroups(metric="combined", coherence_weight=0.0, relevance_weight=0.0)
    np.testing.assert_array_equal(metric_values(group, only_outcome), [1.0, 1.0, NAN, NAN])


@pytest.mark.parametrize("metric", ["coherence", "relevance", "combined"])
def test_spread_is_asked_of_the_raw_outcome_whatever_the_quality(metric: str) -> None:
    """Episodes that differ in quality alone teach nothing; those that do not differ in it may."""
    cfg = FilterGroups.model_validate({"metric": metric})
    worse = Score(0.2, 1.0, coherence=0.1, relevance=0.1)
    assert judge(_group(WON, worse), cfg).reason == ALL_SOLVED
    alike = Score(0.1, 0.0, coherence=0.8, relevance=0.6)
    assert judge(_group(WON, alike), cfg).kept
    assert judge(_group(LOST, LOST), cfg).reason == NONE_SOLVED


def test_the_mean_of_the_group_meets_the_threshold_and_the_group_is_whole() -> None:
    group = _group(WON, LOST)  # mean coherence 0.6
    assert judge(group, FilterGroups(metric="coherence", reward_threshold=0.6)).kept
    assert judge(group, FilterGroups(metric="coherence", reward_threshold=0.61)).reason == LOW_METRIC
    assert judge(group, FilterGroups(metric="acc", reward_threshold=0.5)).kept
    assert judge(group, FilterGroups(metric="acc", reward_threshold=0.51)).reason == LOW_METRIC
    assert judge(group, FilterGroups(metric="score", reward_threshold=-3.0)).kept
    assert judge(group, FilterGroups(min_coherence_score=0.6)).kept
    assert judge(group, FilterGroups(min_coherence_score=0.61)).reason == LOW_COHERENCE
    assert judge(group, FilterGroups(enable=False, reward_threshold=2.0)).kept


def test_a_threshold_that_is_given_stands_in_for_the_configured_one() -> None:
    cfg = FilterGroups(metric="coherence", reward_threshold=0.9)
    assert judge(_group(WON, LOST), cfg, threshold=0.5).kept
    assert judge(_group(WON, LOST), FilterGroups(metric="coherence"), threshold=0.7).reason == LOW_METRIC


def test_a_group_without_any_quality_is_invalid_where_quality_is_asked_for() -> None:
    group = _group(Score(1.0, 1.0), Score(0.0, 0.0))
    assert judge(group, FilterGroups(metric="combined")).reason == INVALID
    assert judge(group, FilterGroups(min_coherence_score=0.0)).reason == INVALID
    assert judge(group, FilterGroups()).kept
    assert judge(_group(WON, LOST, Score(1.0, 1.0)), FilterGroups(metric="combined")).kept  # of those that have one


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (6, 0.0), (12, 0.0), (13, -0.5), (14, -1.0), (16, -2.0), (17, -2.0), (20, -2.0)]
)
def test_overlong_penalty_falls_over_the_buffer_and_no_further(tokens: int, penalty: float) -> None:
    """Case 20: limit 16, buffer 4; six model tokens cost nothing, twenty cost the factor and no more."""
    assert overlong_penalty(tokens, max_response_len=16, buffer_len=4, factor=2.0) == penalty
