"""Sizes of prefix trees are those of the trees, and the compiled op has the order and numbers of the Python one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backends import Backend
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.data.prefix_tree import LEAST, prefix_tree
from mdapo.ops import registry
from mdapo.ops.prefix import prefix_sizes

OP = "prefix_sizes"
SHAPES = settings(max_examples=200, deadline=None, derandomize=True)
# Few tokens, so that rows agree by chance, in pieces that some rows have in common.
PIECES = st.lists(st.sampled_from([[0] * 3, [1] * 5, [0, 1] * 4, [2] * 9, [-1]]), min_size=1, max_size=6)
ROWS = st.lists(PIECES.map(lambda pieces: [token for piece in pieces for token in piece]), max_size=12)


def laid_out(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lengths = np.array([len(row) for row in rows], np.int64)
    return np.array([token for row in rows for token in row], np.int32), lengths.cumsum() - lengths, lengths


@SHAPES
@given(rows=ROWS.filter(bool), least=st.sampled_from([1, 2, 4, LEAST]))
def test_a_bundle_is_as_large_as_its_tree(rows: list[list[int]], least: int) -> None:
    tree = prefix_tree([np.array(row, np.int32) for row in rows], least=least)
    ends = tree.begins_M + tree.lengths_M
    order, tokens, squares = prefix_sizes(*laid_out(rows), np.array([len(rows)]), least=least)
    assert tokens.tolist() == [tree.num_tokens]
    assert squares.tolist() == [int((ends**2 - tree.begins_M**2).sum())]
    assert [rows[i] for i in order] == sorted(rows)


@SHAPES
@given(rows=ROWS, data=st.data(), least=st.integers(1, 9))
def test_kernels_give_what_the_reference_gives(rows: list[list[int]], data: st.DataObject, least: int) -> None:
    if "cpu" not in registry.native_backends()[OP]:
        pytest.skip(registry.LIBRARIES["cpu"])
    ends = data.draw(st.lists(st.integers(0, len(rows)), max_size=4).map(lambda cuts: [*sorted(cuts), len(rows)]))
    ids, *columns = (torch.from_numpy(column) for column in (*laid_out(rows), np.array(ends, np.int64)))
    ours, expected = torch.ops.mdapo.prefix_sizes(ids, *columns, least), registry.REFERENCES[OP](ids, *columns, least)
    for got, wanted in zip(ours, expected, strict=True):
        assert torch.equal(got, wanted), (got.tolist(), wanted.tolist())


@pytest.mark.parametrize("length", [63, 64, 65, 200])
def test_long_beginnings_are_compared_to_their_end(host: Backend, length: int) -> None:
    """Around the block that is compared at once: two rows that differ in one token, or end."""
    for at in (0, length - 2, length - 1):
        a, b = [7] * length, [7] * length
        b[at] = 8
        _, tokens, squares = prefix_sizes(*laid_out([a, b, a]), np.array([3]), least=1)
        both, first = length - 1, min(at, length - 1)
        assert tokens.tolist() == [3 * length - both - first]
        assert squares.tolist() == [3 * length**2 - both**2 - first**2]


def test_bundles_share_nothing_with_each_other(host: Backend) -> None:
    """Two bundles, an empty one and a single row; 20 common tokens count once in each bundle."""
    rows = [[5] * 20 + [i] for i in range(5)]
    _, tokens, squares = prefix_sizes(*laid_out(rows), np.array([2, 4, 4, 5]), least=8)
    assert tokens.tolist() == [22, 22, 0, 21]
    assert squares.tolist() == [2 * 21**2 - 400, 2 * 21**2 - 400, 0, 21**2]


def test_a_row_that_is_there_twice_ends_twice(host: Backend) -> None:
    order, tokens, _ = prefix_sizes(*laid_out([[3] * 9, [3] * 9, [1]]), np.array([3]), least=8)
    assert tokens.tolist() == [9 + 1 + 1]
    assert order.tolist() == [2, 0, 1]


def test_the_op_passes_torchs_own_checks(host: Backend) -> None:
    ids, starts, lengths = (torch.from_numpy(column) for column in laid_out([[1, 2, 3], [1, 2], [4]]))
    host.opcheck(OP, ids, starts, lengths, torch.tensor([2, 3]), 1)


@pytest.mark.parametrize(
    ("starts", "lengths", "ends", "least"),
    [
        ([0, -1], [1, 1], [2], 1),
        ([0, 3], [1, 1], [2], 1),
        ([0, 1], [1, 3], [2], 1),
        ([0, 1], [1, 0], [2], 1),
        ([0, 1], [1, 1], [1], 1),
        ([0, 1], [1, 1], [3, 2], 1),
        ([0, 1], [1, 1], [2, 1, 2], 1),
        ([0, 1], [1, 1], [2], 0),
        ([0, 1], [1], [2], 1),
    ],
)
def test_rows_that_are_not_there_are_refused(
    host: Backend, starts: list[int], lengths: list[int], ends: list[int], least: int
) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        prefix_sizes(np.zeros(3, np.int32), np.array(starts), np.array(lengths), np.array(ends), least=least)


def test_ids_that_fit_no_int32_are_refused() -> None:
    with pytest.raises(ValueError, match="ids: one does not fit int32"):
        prefix_sizes(np.array([1, 2**40]), np.array([0]), np.array([2]), np.array([1]), least=1)
