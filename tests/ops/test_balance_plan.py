"""Plans keep a hard cap, give every rank as many micro-batches, lose no sample, and are about as good as can be."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from backends import Backend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mdapo.errors import UserError
from mdapo.ops.balance import Plan, plan_step

OP = "balance_plan"
ON_BOTH = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
LENGTHS = st.one_of(
    st.lists(st.integers(1, 40), max_size=40),
    st.lists(st.sampled_from([1, 7, 39, 40]), max_size=40),
    st.lists(st.just(8), max_size=40),
)


def tokens_of(plan: Plan, lengths: list[int], *, mini: int = 0) -> list[list[int]]:
    """[rank][micro]"""
    return [[sum(lengths[i] for i in micro) for micro in rank[mini]] for rank in plan.ranks]


def cost_table(plan: Plan, costs: np.ndarray) -> np.ndarray:
    """[rank, micro] of a step of one mini-batch."""
    table = np.zeros((plan.dp, plan.counts_M[0]))
    np.add.at(table, (plan.rank_N, plan.micro_N), costs)
    return table


def slowest(plan: Plan, costs: np.ndarray) -> float:
    return float(cost_table(plan, costs).sum(1).max())


def lockstep(plan: Plan, costs: np.ndarray) -> float:
    return float(cost_table(plan, costs).max(0).sum())


def long_tail(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths up to 32k, and what they cost."""
    lengths = np.minimum(np.random.default_rng(seed).lognormal(7.5, 1.2, n), 32768).astype(np.int64) + 1
    lengths = np.minimum(lengths, 32768)
    return lengths, lengths * (24576 + lengths)


@pytest.mark.parametrize(
    ("lengths", "cap", "parts"),
    [
        ([1700, 800, 1500, 1600], 2000, 4),
        ([1000, 900, 600, 500, 1000], 2000, 2),
        ([7] * 8, 8, 8),
        ([20], 20, 1),
        ([5, 5, 5, 5], 10, 2),
    ],
)
def test_no_part_exceeds_the_cap_and_none_is_wasted(host: Backend, lengths: list[int], cap: int, parts: int) -> None:
    """Case 11; the last rows meet the cap exactly."""
    plan = plan_step(lengths, dp=1, cap=cap)
    assert plan.counts_M == (parts,)
    assert max(tokens_of(plan, lengths)[0]) <= cap
    assert sorted(i for micro in plan.ranks[0][0] for i in micro) == list(range(len(lengths)))


def test_a_sequence_over_the_cap_is_named_before_anything_runs() -> None:
    """Case 13: length 21, cap 20; every such sample is in the message."""
    with pytest.raises(UserError) as error:
        plan_step([20, 21, 3, 99], dp=2, cap=20, names=["a/0", "a/1", "b/0", "b/1"])
    assert len(error.value.problems) == 2
    assert "a/1 has 21 tokens" in error.value.problems[0]
    assert "actor.ppo_max_token_len" in error.value.problems[0]
    assert "b/1" in error.value.problems[1]


@ON_BOTH
@given(
    lengths=LENGTHS, dp=st.integers(1, 4), cap=st.integers(1, 45), objective=st.sampled_from(["slowest", "lockstep"])
)
def test_sequences_over_the_cap_may_go_alone(
    host: Backend, lengths: list[int], dp: int, cap: int, objective: Any
) -> None:
    """Case 13, the stated policy."""
    plan = plan_step(lengths, dp=dp, cap=cap, over_cap="alone", objective=objective)
    assert sorted(i for group in plan.groups for i in group) == list(range(len(lengths)))
    for group in plan.groups:
        assert sum(lengths[i] for i in group) <= cap or len(group) == 1


def test_short_and_long_ranks_run_as_many_micro_batches(host: Backend) -> None:
    """Case 9: what would be 5 here and 6 there is 6 and 6."""
    lengths = [10] * 10 + [19] * 6
    plan = plan_step(lengths, dp=2, cap=20)
    assert plan.counts_M == (6,)
    assert [len(rank[0]) for rank in plan.ranks] == [6, 6]
    assert sorted(i for group in plan.groups for i in group) == list(range(16))


@ON_BOTH
@given(data=st.data(), lengths=LENGTHS, dp=st.integers(1, 5), cap=st.integers(40, 120), multiple=st.integers(1, 4))
def test_any_plan_keeps_its_promises(
    host: Backend, data: st.DataObject, lengths: list[int], dp: int, cap: int, multiple: int
) -> None:
    """Cap, rows, multiples, equal counts and sizes, each sample once, no rank idle, in every mini-batch."""
    minis = data.draw(st.integers(1, 3))
    mini_N = data.draw(st.lists(st.integers(0, minis - 1), min_size=len(lengths), max_size=len(lengths)))
    rows, at_least = data.draw(st.one_of(st.none(), st.integers(1, 5))), data.draw(st.integers(1, 4))
    equal, objective = data.draw(st.booleans()), data.draw(st.sampled_from(["slowest", "lockstep"]))
    costs = [length * (30 + length) for length in lengths]
    how: dict[str, Any] = {
        "dp": dp, "cap": cap, "rows": rows, "costs_N": costs, "mini_N": mini_N, "multiple": multiple,
        "at_least": at_least, "objective": objective, "equal_size": equal,
    }  # fmt: skip
    plan = plan_step(lengths, **how)
    assert sorted(i for group in plan.groups for i in group) == list(range(len(lengths)))
    assert len(plan.groups) == dp * sum(plan.counts_M)
    for m, count in enumerate(plan.counts_M):
        samples = [i for i in range(len(lengths)) if mini_N[i] == m]
        assert (count > 0) == bool(samples)
        assert count % multiple == 0
        assert count >= min(at_least, len(samples) // dp)
        of_rank = []
        for rank in plan.ranks:
            assert len(rank[m]) == count
            assert all(sum(lengths[i] for i in micro) <= cap for micro in rank[m])
            assert all(len(micro) <= (rows or len(lengths)) for micro in rank[m])
            own = [i for micro in rank[m] for i in micro]
            assert set(own) <= set(samples)
            of_rank.append(len(own))
        if len(samples) >= dp:
            assert min(of_rank) >= 1
        if equal:
            assert max(of_rank) - min(of_rank) <= 1
    again = plan_step(lengths, **how)
    assert again.ranks == plan.ranks


@ON_BOTH
@given(
    lengths=LENGTHS, dp=st.integers(1, 4), objective=st.sampled_from(["slowest", "lockstep"]), seed=st.integers(0, 99)
)
def test_plans_depend_on_values_not_on_their_order(
    host: Backend, lengths: list[int], dp: int, objective: Any, seed: int
) -> None:
    order = np.random.default_rng(seed).permutation(len(lengths))
    shuffled = [lengths[i] for i in order]

    def contents(of: list[int]) -> Any:
        plan = plan_step(of, dp=dp, cap=60, objective=objective)
        return [[[sorted(of[i] for i in micro) for micro in mini] for mini in rank] for rank in plan.ranks]

    assert contents(lengths) == contents(shuffled)


def test_the_cap_holds_to_the_token_where_batches_are_nearly_full() -> None:
    """Case 11: many small tight batches, where one token too many is likely."""
    rng = np.random.default_rng(0)
    fullest = []
    for _ in range(200):
        cap = int(rng.integers(10, 15))
        lengths = rng.integers(1, 11, 20).tolist()
        loads = [tokens for rank in tokens_of(plan_step(lengths, dp=2, cap=cap), lengths) for tokens in rank]
        assert max(loads) <= cap
        fullest.append(max(loads) == cap)
    assert np.mean(fullest) > 0.5


def fewest_bins(lengths: list[int], cap: int) -> int:
    """By enumeration: the longest first into each bin that fits, or a new one."""
    best = len(lengths)
    order = sorted(lengths, reverse=True)

    def place(at: int, bins: list[int]) -> None:
        nonlocal best
        if len(bins) >= best:
            return
        if at == len(order):
            best = len(bins)
            return
        for room in {b for b in bins if b >= order[at]}:
            rest = list(bins)
            rest[rest.index(room)] -= order[at]
            place(at + 1, rest)
        place(at + 1, [*bins, cap - order[at]])

    place(0, [])
    return best


def test_small_batches_have_as_few_micro_batches_as_can_be() -> None:
    """Against enumeration: the fewest in all but one of a hundred, and never two more."""
    rng = np.random.default_rng(2)
    more = []
    for _ in range(300):
        cap, dp = int(rng.integers(10, 40)), int(rng.integers(1, 4))
        lengths = rng.integers(1, cap + 1, int(rng.integers(1, 12))).tolist()
        fewest = -(-fewest_bins(lengths, cap) // dp)
        more.append(plan_step(lengths, dp=dp, cap=cap).counts_M[0] - fewest)
    assert min(more) >= 0 and max(more) <= 1
    assert np.mean(more) <= 0.01


def best_of_all(lengths: list[int], costs: np.ndarray, cap: int, micro: int) -> tuple[float, float]:
    """Slowest and lockstep load of the best plans of two ranks with ``micro`` micro-batches each, by enumeration."""
    best = [np.inf, np.inf]
    for bins in product(range(2 * micro), repeat=len(lengths)):
        tokens, load = np.zeros(2 * micro), np.zeros(2 * micro)
        np.add.at(tokens, list(bins), lengths)
        if tokens.max() > cap:
            continue
        np.add.at(load, list(bins), costs)
        table = load.reshape(2, micro)
        best[0] = min(best[0], table.sum(1).max())
        best[1] = min(best[1], np.sort(table, 1).max(0).sum())
    return best[0], best[1]


def test_small_plans_are_near_the_best_of_all() -> None:
    rng = np.random.default_rng(1)
    ratios = []
    for _ in range(25):
        lengths = rng.integers(1, 20, 6).tolist()
        costs = np.array([length * (10 + length) for length in lengths])
        plans = [plan_step(lengths, dp=2, cap=24, costs_N=costs, objective=o) for o in ("slowest", "lockstep")]
        best = best_of_all(lengths, costs, 24, plans[0].counts_M[0])
        ratios.append([slowest(plans[0], costs) / best[0], lockstep(plans[1], costs) / best[1]])
    assert np.min(ratios) >= 1 - 1e-9
    assert (np.mean(ratios, 0) < [1.05, 1.03]).all()


@pytest.mark.parametrize(("n", "dp"), [(512, 8), (1024, 16)])
def test_long_tails_are_level_under_the_cap(n: int, dp: int) -> None:
    """The token bound's number of micro-batches, near the ideal, and each plan best at its own objective."""
    for seed in range(3):
        lengths, costs = long_tail(n, seed)
        ideal, fewest = costs.sum() / dp, -(-int(lengths.sum()) // (32768 * dp))
        by_rank = plan_step(lengths, dp=dp, cap=32768, costs_N=costs)
        in_step = plan_step(lengths, dp=dp, cap=32768, costs_N=costs, objective="lockstep")
        assert by_rank.counts_M == in_step.counts_M == (fewest,)
        assert slowest(by_rank, costs) <= 1.005 * ideal
        assert lockstep(in_step, costs) <= 1.05 * ideal
        assert slowest(by_rank, costs) <= slowest(in_step, costs)
        assert lockstep(in_step, costs) <= lockstep(by_rank, costs)


def test_fillers_stand_where_samples_run_out(host: Backend) -> None:
    plan = plan_step([9, 9, 9], dp=2, cap=9, multiple=4)
    assert plan.counts_M == (4,)
    assert sorted(sum(1 for micro in rank[0] if not micro) for rank in plan.ranks) == [2, 3]
    assert plan_step([], dp=3, cap=9).ranks == ((), (), ())


def test_mini_batches_are_planned_one_by_one() -> None:
    lengths, costs = long_tail(120, 0)
    mini_N = np.arange(120) % 3
    whole = plan_step(lengths, dp=4, cap=32768, costs_N=costs, mini_N=mini_N)
    for m in range(3):
        own = np.flatnonzero(mini_N == m)
        alone = plan_step(lengths[own], dp=4, cap=32768, costs_N=costs[own])
        assert alone.counts_M[0] == whole.counts_M[m]
        assert (alone.rank_N == whole.rank_N[own]).all() and (alone.micro_N == whole.micro_N[own]).all()


def test_lengths_may_be_near_the_limits_of_integers() -> None:
    long = 2**31 - 1
    plan = plan_step([long] * 6, dp=2, cap=3 * long)
    assert plan.counts_M == (1,)
    assert tokens_of(plan, [long] * 6) == [[3 * long]] * 2
    assert plan_step([5, 5], dp=1, cap=2**70).counts_M == (1,)
    with pytest.raises(ValueError, match="sample 1 has 4611686018427387904, too many to add up"):
        plan_step([1, 2**62], dp=1)


NONSENSE: list[dict[str, Any]] = [
    *({name: 0} for name in ("dp", "cap", "rows", "multiple", "at_least")),
    *({"costs_N": [1]}, {"mini_N": [0, -1]}, {"mini_N": [0.5, 1.0]}),
    *({"objective": "slow"}, {"over_cap": "drop"}),
]


@pytest.mark.parametrize("bad", NONSENSE)
def test_arguments_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|shapes|negative|whole numbers|one of"):
        plan_step([1, 2], **({"dp": 1} | bad))


def test_tokens_are_whole_and_may_be_any_view() -> None:
    with pytest.raises(ValueError, match="tokens: a list of whole numbers"):
        plan_step(np.array([1.5, 2.0]), dp=1)
    backwards = np.arange(1, 6)[::-1]
    viewed, copied = plan_step(backwards, dp=2), plan_step(backwards.copy(), dp=2)
    assert viewed.place_N.tolist() == copied.place_N.tolist()
