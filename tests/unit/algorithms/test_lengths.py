"""The rule that lengths follow: the published one, bounded, monotone, and without to and fro at a threshold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.algorithms.lengths import Regime, Running, auto_buffer, next_regime
from mdapo.types import EndReason, Episode, Prompt, Turn

REGIMES: tuple[Regime, ...] = ("shorter", "base", "longer")
PUBLISHED = {"below": 2.0, "above": 5.0, "hysteresis": 0.0}


def episode(turns: int, tokens: int, end: EndReason = "done") -> Episode:
    nothing = np.zeros(tokens, np.int32)
    said = Turn("assistant", nothing, np.ones(tokens, bool), nothing.astype(np.float32))
    answer = Turn("user", nothing[:1], np.zeros(1, bool), np.zeros(1, np.float32))
    return Episode(Prompt("p", 0, ()), 0, nothing[:1], (said, answer) * turns, (), end)


def path(start: Regime, means: Sequence[float], *, hysteresis: float) -> list[Regime]:
    """The regimes in force, one after the other."""
    found = [start]
    for mean in means:
        found.append(next_regime(found[-1], mean, below=2.0, above=5.0, hysteresis=hysteresis))
    return found


@pytest.mark.parametrize(
    ("mean", "wanted"),
    [(1.0, "shorter"), (1.99, "shorter"), (2.0, "base"), (5.0, "base"), (5.01, "longer"), (9.0, "longer")],
)
@pytest.mark.parametrize("before", REGIMES)
def test_without_hysteresis_it_is_the_published_rule_whatever_was_before(
    before: Regime, mean: float, wanted: Regime
) -> None:
    assert next_regime(before, mean, **PUBLISHED) == wanted


def test_a_regime_is_left_once_the_mean_is_back_by_the_hysteresis() -> None:
    assert path("base", [5.1, 4.9, 4.51, 4.5], hysteresis=0.5) == ["base", "longer", "longer", "longer", "base"]
    assert path("base", [1.9, 2.1, 2.49, 2.5], hysteresis=0.5) == ["base", "shorter", "shorter", "shorter", "base"]
    assert path("longer", [1.5], hysteresis=0.5) == ["longer", "shorter"]
    assert path("shorter", [5.5], hysteresis=0.5) == ["shorter", "longer"]


MEANS = st.floats(0.0, 12.0)


@settings(deadline=None)
@given(start=st.sampled_from(REGIMES), center=MEANS, inside=st.lists(st.floats(0.0, 0.49), max_size=30))
def test_a_mean_that_moves_less_than_the_hysteresis_enters_no_regime_twice(
    start: Regime, center: float, inside: list[float]
) -> None:
    changes = [regime for regime, _ in groupby(path(start, [center + x for x in inside], hysteresis=0.5))]
    assert len(set(changes)) == len(changes)


def test_without_hysteresis_such_a_mean_changes_lengths_every_step() -> None:
    changes = list(groupby(path("base", [5.1, 4.9] * 4, hysteresis=0.0)))
    assert len(changes) == 9


@settings(deadline=None)
@given(
    low=st.sampled_from(range(3)), more=st.integers(0, 2), mean=MEANS, extra=st.floats(0.0, 5.0), h=st.floats(0.0, 3.0)
)
def test_more_turns_never_make_lengths_shorter(low: int, more: int, mean: float, extra: float, h: float) -> None:
    one, other = REGIMES[low], REGIMES[min(low + more, 2)]
    lower = next_regime(one, mean, below=2.0, above=5.0, hysteresis=h)
    higher = next_regime(other, mean + extra, below=2.0, above=5.0, hysteresis=h)
    assert REGIMES.index(lower) <= REGIMES.index(higher)


def test_a_dialogue_of_a_step_counts_as_the_others_and_decay_times_one_of_the_step_after_it() -> None:
    first, second = [episode(2, 3), episode(4, 1), episode(0, 0, "error")], [episode(6, 5)]
    found = Running().then(first, decay=0.5).then(second, decay=0.5)
    assert found.mean_turns == pytest.approx((0.5 * (2 + 4) + 6) / (0.5 * 2 + 1))
    assert found.mean_tokens == pytest.approx((0.5 * (2 * 3 + 4 * 1) + 6 * 5) / (0.5 * 2 + 1))
    assert Running().then(first, decay=0.0).then(second, decay=0.0).mean_turns == 6.0
    assert found.then([episode(0, 0, "error")], decay=0.5) == found  # all lost: no step
    assert (Running().mean_turns, Running().mean_tokens) == (None, None)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=8), st.floats(0.0, 0.99))
def test_the_running_mean_stays_within_what_was_seen_and_survives_json(steps: list[list[int]], decay: float) -> None:
    running = Running()
    for step in steps:
        running = running.then([episode(turns, 2) for turns in step], decay=decay)
    seen = [turns for step in steps for turns in step]
    if running.mean_turns is not None:
        assert min(seen) - 1e-9 <= running.mean_turns <= max(seen) + 1e-9
    assert Running(**json.loads(json.dumps(asdict(running)))) == running


@settings(deadline=None)
@given(st.floats(0.0, 1e4), st.floats(0.0, 1e3), st.integers(1, 4096))
def test_the_auto_buffer_is_one_and_a_half_dialogues_within_the_budget(mean: float, more: float, budget: int) -> None:
    found = auto_buffer(mean, max_response_len=budget)
    assert 1 <= found <= budget
    assert auto_buffer(mean + more, max_response_len=budget) >= found
    if 1.0 <= 1.5 * mean <= budget:
        assert abs(found - 1.5 * mean) <= 0.5
