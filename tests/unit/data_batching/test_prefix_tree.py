"""Shared prefixes: the tree holds every row, each common beginning once, and samples stay together where that pays."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.data.prefix_tree import prefix_tree
from mdapo.types import MicroBatch, Sample
from tests.unit.data_batching.test_batching import config, packed, planned

Row = np.ndarray


@st.composite
def branching(draw: st.DrawFn) -> list[Row]:
    base = draw(st.lists(st.integers(0, 2), min_size=1, max_size=24))
    rows = []
    for _ in range(draw(st.integers(1, 7))):
        kept = draw(st.integers(0, len(base)))
        row = base[:kept] + draw(st.lists(st.integers(0, 2), min_size=0 if kept else 1, max_size=6))
        rows.append(np.array(row, np.int32))
    return rows


@settings(deadline=None)
@given(branching(), st.integers(1, 6))
def test_every_row_is_a_path_of_whole_nodes_with_a_leaf_of_its_own(rows: list[Row], least: int) -> None:
    tree = prefix_tree(rows, least=least)
    assert (tree.lengths_M > 0).all()
    nodes = [
        rows[row][begin:][:length]
        for row, begin, length in zip(tree.rows_M, tree.begins_M, tree.lengths_M, strict=True)
    ]
    for row, path in zip(rows, tree.paths, strict=True):
        assert [tree.parents[node] for node in path] == [-1, *path[:-1]]
        assert tree.begins_M[list(path)].tolist() == [0, *np.cumsum(tree.lengths_M[list(path[:-1])])]
        np.testing.assert_array_equal(np.concatenate([nodes[node] for node in path]), row)
    assert len({path[-1] for path in tree.paths}) == len(rows)
    assert {node for path in tree.paths for node in path} == set(range(len(nodes)))
    assert all(len(nodes[node]) >= least for node in set(tree.parents) - {-1})


def test_a_common_beginning_is_found_behind_one_that_is_too_short_for_a_node() -> None:
    """Five rows agree on two tokens only, four of them on twelve."""
    long = [1, 2, *range(10, 20)]
    rows = [np.array(r, np.int32) for r in ([1, 2, 99, 98], *([*long, 30 + i] for i in range(4)))]
    tree = prefix_tree(rows, least=8)
    assert sorted(tree.lengths_M.tolist()) == [1, 1, 1, 1, 4, 12]


def sample(uid: str, group: int, ids: list[int], start: int) -> Sample:
    mask = np.arange(len(ids)) >= start
    values = np.where(mask, 0.5, 0.0).astype(np.float32)
    versions = np.zeros(len(ids), np.int32)
    return Sample(uid, group, np.array(ids, np.int32), mask, values, versions, values, values)


def group_of(group: int, prompt: int, response: int, n: int = 4) -> list[Sample]:
    head = [100 + group, *range(prompt - 1)]
    return [
        sample(f"{group}/{i}", group, [*head, *(1000 * i + k for k in range(1, response + 1))], prompt)
        for i in range(n)
    ]


def test_what_is_scored_stays_and_hidden_states_come_from_the_shared_token() -> None:
    samples = group_of(0, 10, 3)
    [[[plain]]] = packed(samples, [[[range(4)]]])
    [[[shared]]] = packed(samples, [[[range(4)]]], share_prefix=True, token_multiple=4)
    assert shared.cu_seqlens == (0, 10, 13, 16, 19, 22, 24) and shared.parents == (-1, 0, 0, 0, 0, -1)
    assert shared.positions_T.tolist() == [*range(10), *([10, 11, 12] * 4), 0, 1]
    assert plain.num_tokens == 52
    for name in ("targets_R", "segment_R", "advantages_R", "loss_weights_R", "rollout_logps_R"):
        torch.testing.assert_close(getattr(shared, name), getattr(plain, name))
    assert shared.loss_index_R.view(4, 3)[:, 0].tolist() == [9] * 4  # every first token is read off the prompt's last
    before = shared.ids_T[shared.loss_index_R]
    torch.testing.assert_close(before, plain.ids_T[plain.loss_index_R])


def seen(batch: MicroBatch, token: int) -> list[int]:
    """The ids that attention shows at this token: its segment's up to it, behind those of the segment's ancestors."""
    segment = int(np.searchsorted(batch.cu_seqlens, token, side="right")) - 1
    ids = batch.ids_T[batch.cu_seqlens[segment] : token + 1].tolist()
    while batch.parents and (segment := batch.parents[segment]) >= 0:
        ids = batch.ids_T[batch.cu_seqlens[segment] : batch.cu_seqlens[segment + 1]].tolist() + ids
    return ids


@settings(deadline=None)
@given(st.lists(branching(), min_size=1, max_size=3), st.integers(1, 5), st.booleans())
def test_every_scored_token_is_read_off_its_own_row_up_to_it(
    parts: list[list[Row]], multiple: int, share_prefix: bool
) -> None:
    """Over several micro-batches, the last of which is a filler."""
    rows = [[[9, *row.tolist()] for row in part] for part in parts]
    numbers = iter(range(100))
    cut = [[next(numbers) for _ in part] for part in rows]
    samples = [sample(str(i), 0, row, 1) for i, row in enumerate(row for part in rows for row in part)]
    [[*batches, filler]] = packed(samples, [[[*cut, []]]], token_multiple=multiple, share_prefix=share_prefix)[0]
    assert filler.targets_R.tolist() == [0] and filler.loss_weights_R.tolist() == [0.0]
    for part, batch in zip(rows, batches, strict=True):
        assert batch.num_tokens == len(batch.ids_T) == len(batch.positions_T) and batch.num_tokens % multiple == 0
        assert all(size > 0 for size in np.diff(batch.cu_seqlens))
        assert len(batch.parents) == (batch.num_segments if share_prefix else 0)
        expected = [(n, row[:at]) for n, row in enumerate(part) for at in range(1, len(row))]
        before_R = [seen(batch, token) for token in batch.loss_index_R.tolist()]
        assert [*zip(batch.segment_R.tolist(), before_R, strict=True)] == expected
        assert batch.positions_T[batch.loss_index_R].tolist() == [len(before) - 1 for _, before in expected]
        assert batch.targets_R.tolist() == [token for row in part for token in row[1:]]


def test_groups_stay_whole_where_the_ranks_can_still_be_level() -> None:
    cfg = config(actor={"ppo_max_token_len": 4096})
    shares = planned([s for g in range(4) for s in group_of(g, 100, 10)], cfg, dp=2)
    assert [mb.num_tokens for rank in shares for mini in rank for mb in mini] == [2 * 140] * 2


def test_a_group_is_split_where_a_rank_would_have_nothing() -> None:
    cfg = config(actor={"ppo_max_token_len": 4096})
    shares = planned(group_of(0, 100, 10), cfg, dp=2)
    assert [mb.num_tokens for rank in shares for mini in rank for mb in mini] == [120, 120]


def test_the_cap_holds_for_shared_tokens() -> None:
    cfg = config(actor={"ppo_max_token_len": 130})
    shares = planned(group_of(0, 100, 10), cfg, dp=1)
    tokens = [mb.num_tokens for mini in shares[0] for mb in mini]
    assert max(tokens) <= 130 and sum(tokens) == 240


def test_the_cap_holds_where_all_groups_begin_alike() -> None:
    """27 tokens of a group are a node of its own tree; in one with another group 20 are, and 7 are too few for one."""
    heads = [[1] * 20 + [50 + g] * 7 for g in range(2)]
    samples = [
        sample(f"{g}/{i}", g, [*head, *range(100 * i, 100 * i + 5)], 27)
        for g, head in enumerate(heads)
        for i in range(8)
    ]
    assert prefix_tree([s.ids for s in samples]).num_tokens == 20 + 16 * 12
    for cap in (134, 211, 212):  # 134: both groups' own trees
        [[mini]] = planned(samples, config(actor={"ppo_max_token_len": cap}), dp=1)
        assert max(batch.num_tokens for batch in mini) <= cap


def test_switched_off_it_lays_out_every_sample_alone() -> None:
    cfg = config(actor={"ppo_max_token_len": 4096})
    off = cfg.model_copy(update={"actor": cfg.actor.model_copy(update={"share_prefix": False})})
    (share,) = planned(group_of(0, 100, 10), off, dp=1)
    assert share[0][0].num_tokens == 440 and share[0][0].parents == ()
