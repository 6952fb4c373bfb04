"""Plans keep a hard cap, give every rank as many micro-batches, lose no sample, and are about as good as the bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.errors import UserError
from mdapo.ops.balance import Plan, partition, plan_fixed, plan_micro_batches, token_cost

LENGTHS = st.lists(st.integers(1, 40), min_size=0, max_size=60)


def sizes(plan: Plan, lengths: list[int]) -> list[list[int]]:
    return [[sum(lengths[i] for i in micro) for micro in rank] for rank in plan.ranks]


def samples(plan: Plan) -> list[int]:
    return sorted(i for rank in plan.ranks for micro in rank for i in micro)


@pytest.mark.parametrize(
    ("lengths", "cap", "parts"),
    [
        ([1700, 800, 1500, 1600], 2000, 4),
        ([1000, 900, 600, 500, 1000], 2000, 2),
        ([7] * 8, 8, 8),
        ([20], 20, 1),
    ],
)
def test_no_part_exceeds_the_cap_and_none_is_wasted(lengths: list[int], cap: int, parts: int) -> None:
    """Case 11."""
    plan = plan_micro_batches(lengths, dp=1, cap=cap)
    assert plan.micro_batches == parts
    assert max(sizes(plan, lengths)[0]) <= cap
    assert samples(plan) == list(range(len(lengths)))


def test_a_sequence_over_the_cap_is_named_before_anything_runs() -> None:
    """Case 13: length 21, cap 20; every such sample is in the message."""
    with pytest.raises(UserError) as error:
        plan_micro_batches([20, 21, 3, 99], dp=2, cap=20, names=["a/0", "a/1", "b/0", "b/1"])
    assert len(error.value.problems) == 2
    assert "a/1" in error.value.problems[0]
    assert "21" in error.value.problems[0]
    assert "actor.ppo_max_token_len" in error.value.problems[0]
    assert "b/1" in error.value.problems[1]


def test_a_sequence_over_the_cap_may_go_alone() -> None:
    """Case 13, the stated policy."""
    lengths = [20, 21, 3, 4]
    plan = plan_micro_batches(lengths, dp=1, cap=20, over_cap="alone")
    assert samples(plan) == [0, 1, 2, 3]
    assert [micro for micro in plan.ranks[0] if 1 in micro] == [(1,)]
    assert all(sum(lengths[i] for i in micro) <= 20 for micro in plan.ranks[0] if micro != (1,))


def test_nine_sequences_over_four_ranks() -> None:
    """Case 12: 3, 2, 2, 2 in order, never 3, 3, 3, 0."""
    assert [len(part) for part in partition([5] * 9, 4, equal_size=True)] == [3, 2, 2, 2]
    assert [len(part) for part in partition([9, 1, 1, 1, 1, 1, 1, 1, 1], 4, equal_size=True)] == [3, 2, 2, 2]


def test_short_and_long_ranks_run_as_many_micro_batches() -> None:
    """Case 9: what would be 5 here and 6 there is 6 and 6."""
    lengths = [10] * 10 + [19] * 6
    plan = plan_micro_batches(lengths, dp=2, cap=20)
    assert {len(rank) for rank in plan.ranks} == {6}
    assert samples(plan) == list(range(16))


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, dp=st.integers(1, 5), multiple=st.integers(1, 4), cap=st.integers(40, 90), padded=st.booleans())
def test_any_plan_keeps_its_promises(lengths: list[int], dp: int, multiple: int, cap: int, padded: bool) -> None:
    plan = plan_micro_batches(lengths, dp=dp, cap=cap, multiple=multiple, padded=padded)
    assert samples(plan) == list(range(len(lengths)))
    assert len(plan.ranks) == dp
    assert {len(rank) for rank in plan.ranks} == {plan.micro_batches}
    assert plan.micro_batches % multiple == 0
    assert plan.micro_batches >= 1
    for rank in plan.ranks:
        for micro in rank:
            tokens = [lengths[i] for i in micro]
            assert (len(tokens) * max(tokens, default=0) if padded else sum(tokens)) <= cap
    if len(lengths) >= dp:
        assert all(any(micro for micro in rank) for rank in plan.ranks)
    assert plan == plan_micro_batches(lengths, dp=dp, cap=cap, multiple=multiple, padded=padded)


def test_the_cap_holds_to_the_token_where_batches_are_nearly_full() -> None:
    """Case 11: many small tight batches, where one token too many is likely."""
    rng = np.random.default_rng(0)
    fullest = []
    for _ in range(300):
        cap = int(rng.integers(10, 15))
        lengths = rng.integers(1, 11, 20).tolist()
        loads = [tokens for rank in sizes(plan_micro_batches(lengths, dp=2, cap=cap), lengths) for tokens in rank]
        assert max(loads) <= cap
        fullest.append(max(loads) == cap)
    assert np.mean(fullest) > 0.5


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, dp=st.integers(1, 5), size=st.integers(1, 6), multiple=st.integers(1, 4))
def test_fixed_plans_hold_at_most_so_many_samples(lengths: list[int], dp: int, size: int, multiple: int) -> None:
    plan = plan_fixed(lengths, dp=dp, size=size, multiple=multiple)
    assert samples(plan) == list(range(len(lengths)))
    assert {len(rank) for rank in plan.ranks} == {plan.micro_batches}
    assert plan.micro_batches % multiple == 0
    assert all(len(micro) <= size for rank in plan.ranks for micro in rank)


@settings(max_examples=150, deadline=None)
@given(costs=st.lists(st.integers(0, 50), max_size=40), k=st.integers(1, 9), equal=st.booleans())
def test_partitions_hold_every_item_once_and_starve_no_part(costs: list[int], k: int, equal: bool) -> None:
    parts = partition(costs, k, equal_size=equal)
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)
    if len(costs) >= k:
        assert all(parts)
    if equal:
        assert [len(p) for p in parts] == sorted((len(p) for p in parts), reverse=True)
        assert len(parts[0]) - len(parts[-1]) <= 1


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize(("n", "k", "bound"), [(512, 16, 1.01), (4096, 64, 1.001)])
def test_imbalance_is_near_the_lower_bound(n: int, k: int, bound: float, *, equal: bool) -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(7, 1, n).astype(int) + 1, 8192)
    costs = token_cost(lengths)
    loads = np.array([costs[part].sum() for part in partition(costs, k, equal_size=equal)])
    lower = max(costs.max(), loads.mean())
    assert loads.max() / lower < bound


def test_small_partitions_are_near_the_best_of_all() -> None:
    """Against enumeration: longest first is at most 4/3 of the best, with exchanges mostly equal to it."""
    rng = np.random.default_rng(1)
    ratios = []
    for _ in range(30):
        costs = rng.integers(1, 100, 8).astype(float)
        best = min(
            np.bincount([assignment // 3**i % 3 for i in range(8)], weights=costs, minlength=3).max()
            for assignment in range(3**8)
        )
        ratios.append(max(costs[part].sum() for part in partition(costs, 3)) / best)
    assert max(ratios) < 4 / 3
    assert np.mean(ratios) < 1.03


def test_long_tail_needs_no_more_than_one_micro_batch_over_the_bound() -> None:
    """Many lengths, eight ranks: the count is the token bound, or one more where the cap leaves no room to fit."""
    lengths = np.minimum(np.random.default_rng(0).lognormal(8.5, 1, 512).astype(int) + 1, 32768)
    plan = plan_micro_batches(lengths, dp=8, cap=32768)
    assert plan.micro_batches <= -(-int(lengths.sum()) // (32768 * 8)) + 1
