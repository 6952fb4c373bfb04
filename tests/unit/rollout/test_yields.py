"""The estimate of the yield, against the exact beta-binomial distribution."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdapo.rollout.yields import LEAST_JUDGED, MEMORY, MOST_ASKED, Yield


def seen(kept: int, judged: int) -> Yield:
    found = Yield()
    for i in range(judged):
        found.saw(kept=i < kept)
    return found


def upto(m: int, a: float, b: float) -> list[float]:
    """P(X <= k) of the beta-binomial, k from 0 to m."""

    def beta(x: float, y: float) -> float:
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    return list(accumulate(math.comb(m, k) * math.exp(beta(k + a, m - k + b) - beta(a, b)) for k in range(m + 1)))


@pytest.mark.parametrize(("kept", "judged"), [(4, 10), (40, 100), (90, 100), (80, 200)])
@pytest.mark.parametrize("missing", [1, 5, 60])
@pytest.mark.parametrize("sure", [0.2, 0.5, 0.8, 0.9])
def test_what_is_asked_is_enough_and_not_too_much_with_about_the_stated_probability(
    kept: int, judged: int, missing: int, sure: float
) -> None:
    estimate, slack = seen(kept, judged), 0.08  # of the normal distribution
    a, b = 1.0 + kept, 1.0 + judged - kept

    def enough(m: int) -> float:
        return 1.0 - upto(m, a, b)[missing - 1] if m >= missing else 0.0

    def not_too_many(m: int) -> float:
        return upto(m, a, b)[min(missing, m)]

    fewest, most = estimate.enough(missing, sure=sure), estimate.at_most(missing, sure=sure)
    if fewest < missing * MOST_ASKED:
        assert enough(fewest) >= sure - slack
        assert fewest == missing or enough(fewest - 1) < sure + slack
    if missing < most < missing * MOST_ASKED - 1:
        assert not_too_many(most) >= sure - slack
        assert not_too_many(most + 1) < sure + slack


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 600), st.floats(0.01, 0.99))
def test_the_counts_are_bounded_whatever_was_seen(kept: int, others: int, missing: int, sure: float) -> None:
    estimate = Yield()
    estimate.kept, estimate.judged = float(kept), float(kept + others)
    for count in (estimate.enough(missing, sure=sure), estimate.at_most(missing, sure=sure)):
        assert missing <= count <= missing * MOST_ASKED
    low, high = estimate.bounds()
    assert 0.0 <= low <= estimate.mean <= high <= 1.0


def test_a_step_remembers_as_many_groups_of_those_before() -> None:
    estimate = seen(180, 300)
    estimate.open_step()
    assert (estimate.judged, estimate.kept) == (MEMORY, pytest.approx(0.6 * MEMORY))
    for i in range(1000):
        estimate.saw(kept=i % 2 == 0)
    estimate.open_step()
    assert estimate.judged == 500  # half of a large step
    small = seen(3, 7)
    small.open_step()
    assert (small.judged, small.kept, small.known) == (7, 3, False)
    small.saw(kept=True)
    assert small.known and small.judged == LEAST_JUDGED


def test_the_estimate_survives_a_restart() -> None:
    first, second = seen(3, 11), Yield()
    second.restore(first.state())
    assert (second.mean, second.bounds()) == (first.mean, first.bounds())
