"""Samples stay together where shared beginnings pay, under a cap that holds for what is laid out in the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.config.flops import TOKENS_ONLY, WorkModel
from mdapo.data.bundles import plan_bundles
from mdapo.data.prefix_tree import prefix_tree
from mdapo.ops.balance import Plan, plan_step

Row = list[int]
WORK = WorkModel(per_token=100.0, per_token2=1.0, per_scored=20.0)


def planned(groups: list[list[Row]], *, mini: list[int] | None = None, work: WorkModel = WORK, **how: Any) -> Plan:
    """Rows end to end, group by group, half of each row scored; ``mini``: of each group."""
    rows = [row for group in groups for row in group]
    lengths = np.array([len(row) for row in rows], np.int64)
    of_group = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    return plan_bundles(
        np.array([token for row in rows for token in row], np.int32),
        lengths.cumsum() - lengths,
        lengths,
        lengths // 2,
        of_group,
        np.array(mini or [0] * len(groups), np.int64)[of_group],
        work=work,
        **how,
    )


def tree_tokens(groups: list[list[Row]], plan: Plan) -> list[list[int]]:
    """[rank][micro-batch], over all mini-batches."""
    rows = [np.array(row, np.int32) for group in groups for row in group]
    tokens = [prefix_tree([rows[i] for i in micro]).num_tokens if len(micro) else 0 for micro in plan.groups]
    per_rank = sum(plan.counts_M)
    return [tokens[first : first + per_rank] for first in range(0, len(tokens), per_rank)]


def prompted(g: int, n: int, *, prompt: int = 100, answer: int = 10) -> list[Row]:
    """n rows that share nothing but their group's prompt."""
    return [[1000 + g] * prompt + [10 * g + i] * answer for i in range(n)]


def test_groups_stay_whole_where_that_is_level() -> None:
    groups = [prompted(g, 4) for g in range(8)]
    plan = planned(groups, dp=2, cap=140)
    assert plan.counts_M == (4,)
    assert sorted(tuple(micro) for micro in plan.groups) == [tuple(range(4 * g, 4 * g + 4)) for g in range(8)]
    assert tree_tokens(groups, plan) == [[140] * 4] * 2


def test_one_group_is_shared_out_among_ranks_that_would_wait() -> None:
    """Halves compute the prompt twice, and are done sooner than the whole on one rank."""
    plan = planned([prompted(0, 8, prompt=20, answer=50)], dp=2, cap=1000)
    assert sorted(np.bincount(plan.rank_N).tolist()) == [4, 4]
    whole = planned([prompted(0, 2, prompt=500, answer=1)], dp=1, cap=1000)
    assert len(whole.groups) == 1


def test_one_large_group_is_cut_and_the_others_stay_whole() -> None:
    groups = [prompted(0, 8, answer=50), *(prompted(g, 2, answer=100) for g in range(1, 5))]
    plan = planned(groups, dp=1, cap=300)
    for g in range(1, 5):
        first = 8 + 2 * (g - 1)
        assert plan.place_N[first] == plan.place_N[first + 1]
    assert max(tokens for rank in tree_tokens(groups, plan) for tokens in rank) == 300
    assert plan.counts_M == (6,)


def test_rows_that_agree_furthest_stay_together() -> None:
    """A group whose branches interleave: halves are the two branches, not the first and the second four."""
    group = [[1] * 40 + [2 + i % 2] * 40 + [10 + i] * 5 for i in range(8)]
    plan = planned([group], dp=2, cap=200)
    assert {tuple(micro.tolist()) for micro in plan.groups} == {(0, 2, 4, 6), (1, 3, 5, 7)}


def test_the_cap_holds_for_bundles_in_one_tree() -> None:
    """Five rows share 20 tokens, two others 15 of them: together, the five have 5 tokens each to themselves, since that
    is no node. Apart they have 20 + 5 * 3 and 15 + 2 * 3 tokens, together 15 + 5 * 8 + 2 * 3."""
    a = [[7] * 15 + [8] * 5 + [20 + i] * 3 for i in range(5)]
    b = [[7] * 15 + [30 + i] * 3 for i in range(2)]
    apart, together = 35 + 21, 61
    plan = planned([a, b], dp=1, cap=apart, work=TOKENS_ONLY)
    assert max(tokens for rank in tree_tokens([a, b], plan) for tokens in rank) <= apart
    loose = planned([a, b], dp=1, cap=together, work=TOKENS_ONLY)
    assert tree_tokens([a, b], loose) == [[together]]


PIECES = st.lists(st.sampled_from([[1] * 9, [2] * 4, [3] * 12, [4]]), min_size=1, max_size=4)
GROUPS = st.lists(
    st.lists(PIECES.map(lambda pieces: [token for piece in pieces for token in piece]), min_size=1, max_size=6),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    groups=GROUPS, data=st.data(), dp=st.integers(1, 3), cap=st.integers(20, 90), multiple=st.integers(1, 2),
    at_least=st.integers(1, 3), objective=st.sampled_from(["slowest", "lockstep"]),
)  # fmt: skip
def test_any_plan_of_bundles_keeps_its_promises(
    groups: list[list[Row]], data: st.DataObject, dp: int, cap: int, multiple: int, at_least: int, objective: Any
) -> None:
    """Each row once, in its mini-batch; no tree over the cap but of one row; ranks alike; no worse than single rows."""
    mini = data.draw(st.lists(st.integers(0, 1), min_size=len(groups), max_size=len(groups)))
    mini = np.unique(mini, return_inverse=True)[1].tolist()
    how = {"dp": dp, "cap": cap, "multiple": multiple, "at_least": at_least, "objective": objective}
    plan = planned(groups, mini=mini, **how)
    assert sorted(i for micro in plan.groups for i in micro) == list(range(sum(map(len, groups))))
    for micro, tokens in zip(plan.groups, (t for rank in tree_tokens(groups, plan) for t in rank), strict=True):
        assert tokens <= cap or len(micro) == 1
    of_group = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    mini_N = np.array(mini)[of_group]
    assert plan.mini_N.tolist() == mini_N.tolist()
    lengths = np.array([len(row) for group in groups for row in group])
    alone = plan_step(
        lengths, costs_N=WORK.of(lengths, lengths // 2), mini_N=mini_N, over_cap="alone",
        dp=dp, cap=cap, multiple=multiple, at_least=at_least, objective=objective,
    )  # fmt: skip
    bounds = alone.load_M(WORK.of(lengths, lengths // 2), objective)
    for m, count in enumerate(plan.counts_M):
        assert count % multiple == 0 and count >= min(at_least, int((mini_N == m).sum()) // dp)
        assert (plan.micro_N[mini_N == m] < count).all()
        assert shared_load(groups, plan, m, objective) <= bounds[m] * (1 + 1e-9)
    again = planned(groups, mini=mini, **how)
    assert again.counts_M == plan.counts_M and (again.place_N == plan.place_N).all()


def shared_load(groups: list[list[Row]], plan: Plan, mini: int, objective: str) -> float:
    """What the trees of a plan's micro-batches cost."""
    rows = [np.array(row, np.int32) for group in groups for row in group]
    first = np.cumsum([0, *plan.counts_M])
    table = np.zeros((plan.dp, plan.counts_M[mini]))
    for place, micro in enumerate(plan.groups):
        rank, at = divmod(place, sum(plan.counts_M))
        if first[mini] <= at < first[mini + 1] and len(micro):
            tree = prefix_tree([rows[i] for i in micro])
            ends = tree.begins_M + tree.lengths_M
            squares = float((ends**2 - tree.begins_M**2).sum())
            scored = sum(len(rows[i]) // 2 for i in micro)
            table[rank, at - first[mini]] = WORK.of(tree.num_tokens, scored, squares)
    return float(table.max(0).sum() if objective == "lockstep" else table.sum(1).max())


def test_shuffled_samples_are_planned_alike() -> None:
    """Which rows meet depends on their ids, not on their order."""
    groups = [prompted(g, 5, prompt=30 + g, answer=8 + 3 * g) for g in range(4)]
    rng = np.random.default_rng(0)
    orders = [rng.permutation(5) for _ in groups]
    shuffled = [[group[i] for i in order] for group, order in zip(groups, orders, strict=True)]

    def contents(of: list[list[Row]]) -> list[list[Row]]:
        rows = [row for group in of for row in group]
        return [sorted(rows[i] for i in micro) for micro in planned(of, dp=2, cap=120).groups]

    assert contents(groups) == contents(shuffled)


@pytest.mark.parametrize("dp", [1, 3])
def test_nothing_to_plan_is_a_plan(dp: int) -> None:
    none = np.zeros(0, np.int64)
    plan = plan_bundles(none.astype(np.int32), *[none] * 5, cap=9, work=WORK, dp=dp)
    assert plan.counts_M == () and plan.groups == []
