"""Shared prefixes: the tree holds every row, each common beginning once, and samples stay together where that pays."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mdapo.data.batching import pack_micro_batch, plan_shares
from mdapo.data.prefix_tree import PrefixTree, prefix_tree
from mdapo.types import Sample
from tests.unit.data_batching.test_batching import config

Row = np.ndarray


def nodes_of(tree: PrefixTree, rows: list[Row]) -> list[list[int]]:
    """For each row, the nodes that its tokens lie in, in order."""
    ends = np.cumsum([len(row) for row in rows])
    paths = []
    for row, end in zip(rows, ends, strict=True):
        nodes = np.searchsorted(tree.cu_seqlens, tree.place_U[end - len(row) : end], side="right") - 1
        paths.append(list(dict.fromkeys(nodes.tolist())))
    return paths


@st.composite
def branching(draw: st.DrawFn) -> list[Row]:
    base = draw(st.lists(st.integers(0, 2), min_size=1, max_size=24))
    rows = []
    for _ in range(draw(st.integers(1, 7))):
        kept = draw(st.integers(0, len(base)))
        row = base[:kept] + draw(st.lists(st.integers(0, 2), min_size=0 if kept else 1, max_size=6))
        rows.append(np.array(row, np.int32))
    return rows


@given(branching(), st.integers(1, 6))
def test_every_row_is_a_path_of_whole_nodes_with_a_leaf_of_its_own(rows: list[Row], least: int) -> None:
    tree = prefix_tree(rows, least=least)
    joined = np.concatenate(rows)
    np.testing.assert_array_equal(joined[tree.source_T][tree.place_U], joined)
    sizes = np.diff(tree.cu_seqlens)
    assert len(tree.parents) == len(sizes) and len(tree.source_T) == tree.cu_seqlens[-1] and (sizes > 0).all()
    paths = nodes_of(tree, rows)
    for row, path in zip(rows, paths, strict=True):
        assert [tree.parents[node] for node in path] == [-1, *path[:-1]]
        assert sizes[path].sum() == len(row)
    assert len({path[-1] for path in paths}) == len(rows)
    inner = set(tree.parents) - {-1}
    assert all(sizes[node] >= least for node in inner)


def test_a_common_beginning_is_found_behind_one_that_is_too_short_for_a_node() -> None:
    """Five rows agree on two tokens only, four of them on twelve."""
    long = [1, 2, *range(10, 20)]
    rows = [np.array(r, np.int32) for r in ([1, 2, 99, 98], *([*long, 30 + i] for i in range(4)))]
    tree = prefix_tree(rows, least=8)
    assert sorted(np.diff(tree.cu_seqlens).tolist()) == [1, 1, 1, 1, 4, 12]


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
    plain, shared = pack_micro_batch(samples), pack_micro_batch(samples, share_prefix=True, token_multiple=4)
    assert shared.cu_seqlens == (0, 10, 13, 16, 19, 22, 24) and shared.parents == (-1, 0, 0, 0, 0, -1)
    assert shared.positions_T.tolist() == [*range(10), *([10, 11, 12] * 4), 0, 1]
    assert plain.num_tokens == 52
    for name in ("targets_R", "segment_R", "advantages_R", "loss_weights_R", "rollout_logps_R"):
        torch.testing.assert_close(getattr(shared, name), getattr(plain, name))
    assert shared.loss_index_R.view(4, 3)[:, 0].tolist() == [9] * 4  # every first token is read off the prompt's last
    before = shared.ids_T[shared.loss_index_R]
    torch.testing.assert_close(before, plain.ids_T[plain.loss_index_R])


def test_groups_stay_whole_where_the_ranks_can_still_be_level() -> None:
    cfg = config(actor={"ppo_max_token_len": 4096})
    shares = plan_shares([s for g in range(4) for s in group_of(g, 100, 10)], cfg, dp=2)
    assert [mb.num_tokens for rank in shares for mini in rank for mb in mini] == [2 * 140] * 2


def test_a_group_is_split_where_a_rank_would_have_nothing() -> None:
    cfg = config(actor={"ppo_max_token_len": 4096})
    shares = plan_shares(group_of(0, 100, 10), cfg, dp=2)
    assert [mb.num_tokens for rank in shares for mini in rank for mb in mini] == [120, 120]


def test_the_cap_holds_for_shared_tokens() -> None:
    cfg = config(actor={"ppo_max_token_len": 130})
    shares = plan_shares(group_of(0, 100, 10), cfg, dp=1)
    tokens = [mb.num_tokens for mini in shares[0] for mb in mini]
    assert max(tokens) <= 130 and sum(tokens) == 240


def test_switched_off_it_lays_out_every_sample_alone() -> None:
    cfg = config(actor={"ppo_max_token_len": 4096})
    off = cfg.model_copy(update={"actor": cfg.actor.model_copy(update={"share_prefix": False})})
    (share,) = plan_shares(group_of(0, 100, 10), off, dp=1)
    assert share[0][0].num_tokens == 440 and share[0][0].parents == ()
