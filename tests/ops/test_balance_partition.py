"""Partitions hold every item once, starve no part, depend on values alone, and are as good as the bound allows."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from backends import Backend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mdapo.ops.balance import integer_costs, partition
from mdapo.ops.balance_reference.partition import lower_bound

OP = "balance_partition"
ON_BOTH = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
COSTS = st.one_of(
    st.lists(st.integers(0, 50), max_size=40),
    st.lists(st.sampled_from([1, 2, 1000]), max_size=40),
    st.lists(st.floats(0, 1e12, allow_subnormal=False), max_size=20),
)


def loads(costs: np.ndarray, parts: list[list[int]]) -> np.ndarray:
    return np.array([costs[part].sum() for part in parts])


def work(kind: str, n: int, seed: int) -> np.ndarray:
    """Costs of sequences: linear and quadratic in lengths of a kind."""
    rng = np.random.default_rng(seed)
    lengths = {
        "lognormal": lambda: np.minimum(rng.lognormal(7, 1, n), 32768).astype(np.int64) + 1,
        "bimodal": lambda: np.where(rng.random(n) < 0.5, rng.normal(500, 50, n), rng.normal(8000, 800, n)).astype(
            np.int64
        ),
        "equal": lambda: np.full(n, 1000),
        "uniform": lambda: rng.integers(100, 8000, n),
    }[kind]()
    return lengths * (24576 + lengths)


def ratio_to_bound(costs: np.ndarray, k: int, *, equal: bool) -> float:
    bound = lower_bound(np.sort(costs)[::-1], k, equal=equal)
    return float(loads(costs, partition(costs, k, equal_size=equal)).max() / bound)


@ON_BOTH
@given(costs=COSTS, k=st.integers(1, 9), equal=st.booleans())
def test_every_item_is_in_one_part_and_no_part_starves(host: Backend, costs: list, k: int, equal: bool) -> None:
    parts = partition(costs, k, equal_size=equal)
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert len(parts) == k and all(part == sorted(part) for part in parts)
    if len(costs) >= k:
        assert all(parts)
    if equal:
        assert [len(p) for p in parts] == sorted((len(p) for p in parts), reverse=True)
        assert len(parts[0]) - len(parts[-1]) <= 1


def test_nine_sequences_over_four_ranks(host: Backend) -> None:
    """Case 12: 3, 2, 2, 2 in order, never 3, 3, 3, 0."""
    assert [len(part) for part in partition([5] * 9, 4, equal_size=True)] == [3, 2, 2, 2]
    assert [len(part) for part in partition([9, 1, 1, 1, 1, 1, 1, 1, 1], 4, equal_size=True)] == [3, 2, 2, 2]


@ON_BOTH
@given(costs=COSTS, k=st.integers(1, 9), equal=st.booleans(), seed=st.integers(0, 99))
def test_parts_depend_on_values_not_on_their_order(host: Backend, costs: list, k: int, equal: bool, seed: int) -> None:
    """A shuffled batch gives the same parts, up to which of equal items is where."""
    values = integer_costs(np.array(costs, np.float64))
    shuffled = values[np.random.default_rng(seed).permutation(len(values))]

    def contents(of: np.ndarray) -> list[list[int]]:
        return [sorted(of[part].tolist()) for part in partition(of, k, equal_size=equal)]

    assert contents(values) == contents(shuffled)
    assert partition(values, k, equal_size=equal) == partition(values, k, equal_size=equal)


def best_of_all(costs: list[int], k: int, *, equal: bool) -> int:
    best = sum(costs)
    for parts in product(range(k), repeat=len(costs)):
        sizes = [parts.count(p) for p in range(k)]
        if not equal or max(sizes) - min(sizes) <= 1:
            best = min(best, max(sum(c for c, p in zip(costs, parts, strict=True) if p == q) for q in range(k)))
    return best


@settings(max_examples=25, deadline=None, derandomize=True)
@given(costs=st.lists(st.integers(0, 30), min_size=1, max_size=7), k=st.integers(2, 3), equal=st.booleans())
def test_few_items_are_parted_as_well_as_can_be(costs: list[int], k: int, equal: bool) -> None:
    """Against enumeration, within the precision of 2^-12 that the search stops at."""
    best = best_of_all(costs, k, equal=equal)
    found = loads(np.array(costs), partition(costs, k, equal_size=equal)).max()
    assert best <= found <= best + best / 4096


@settings(max_examples=200, deadline=None, derandomize=True)
@given(costs=st.lists(st.integers(0, 30), min_size=1, max_size=7), k=st.integers(1, 3), equal=st.booleans())
def test_the_lower_bound_is_one(costs: list[int], k: int, equal: bool) -> None:
    assert lower_bound(np.sort(np.array(costs))[::-1], k, equal=equal) <= best_of_all(costs, k, equal=equal)


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("kind", ["lognormal", "bimodal", "equal", "uniform"])
@pytest.mark.parametrize(("n", "k"), [(512, 8), (1024, 16), (4096, 64)])
def test_many_items_a_part_are_level(n: int, k: int, kind: str, equal: bool) -> None:
    """N / k >= 64."""
    for seed in range(3):
        costs = work(kind, n, seed)
        plain = max(costs.sum() / k, costs.max(), *np.sort(costs)[::-1][k - 1 : k + 1].sum(keepdims=True))
        assert loads(costs, partition(costs, k, equal_size=equal)).max() / plain <= 1.001


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("kind", ["lognormal", "uniform"])
@pytest.mark.parametrize(("n", "k", "limit"), [(48, 16, 1.02), (80, 16, 1.002), (512, 64, 1.001)])
def test_few_items_a_part_are_nearly_as_good_as_the_bound(n: int, k: int, limit: float, kind: str, equal: bool) -> None:
    assert max(ratio_to_bound(work(kind, n, seed), k, equal=equal) for seed in range(5)) <= limit


def test_units_do_not_matter() -> None:
    """Integers, the same as floats, a thousandth and a billion times as large: the same parts."""
    costs = work("lognormal", 60, 0)
    expected = partition(costs, 7)
    for scale in (1.0, 2.0**-40, 2.0**200):
        assert partition(costs * scale, 7) == expected
    assert partition(costs.astype(np.uint64), 7) == expected


@pytest.mark.parametrize(
    "costs", [[2**62, 2**62, 2**62], [2**63 - 1] * 9, [1e300, 1e300, 1.0], [5e-324, 0.0], [0, 0, 0]]
)
def test_extreme_costs_are_parted(host: Backend, costs: list) -> None:
    parts = partition(costs, 3)
    assert (
        sorted(len(part) for part in parts) == sorted(len(part) for part in partition([1] * len(costs), 3))
        or len(costs) < 3
    )
    scaled = integer_costs(np.array(costs))
    assert scaled.min() >= 0 and sum(scaled.tolist()) < 2**61


@pytest.mark.parametrize("costs", [[-1, 2], [math.nan, 1.0], [math.inf, 1.0], [[1.0, 2.0]], ["a", "b"]])
def test_what_is_no_cost_is_refused(costs: list) -> None:
    with pytest.raises(ValueError, match="costs"):
        partition(costs, 2)


def test_there_must_be_a_part() -> None:
    with pytest.raises(ValueError, match="k is 0"):
        partition([1, 2], 0)
    assert partition([], 3) == [[], [], []]
