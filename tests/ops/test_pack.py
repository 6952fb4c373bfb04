"""The packing reference: layout, padding, and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.ops.pack import pack, unpack

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def rows(lengths: list[int]) -> dict[str, list[np.ndarray]]:
    rng = np.random.default_rng(sum(lengths))
    return {
        "ids": [rng.integers(1, 99, n).astype(np.int32) for n in lengths],
        "logps": [rng.normal(size=n).astype(np.float32) for n in lengths],
        "mask": [rng.integers(0, 2, n).astype(bool) for n in lengths],
    }


def test_layout_of_three_rows() -> None:
    packed = pack({"ids": [np.array([1, 2]), np.array([3]), np.array([4, 5, 6])]}, multiple=4)
    assert packed.cu_seqlens == (0, 2, 3, 6, 8)
    assert packed.num_rows == 3
    np.testing.assert_array_equal(packed.fields["ids"], [1, 2, 3, 4, 5, 6, 0, 0])
    np.testing.assert_array_equal(packed.positions_T, [0, 1, 0, 0, 1, 2, 0, 1])


def test_padded_rows_of_one_length() -> None:
    packed = pack({"ids": [np.array([1, 2]), np.array([3])]}, row_len=3)
    assert packed.cu_seqlens == (0, 3, 6)
    np.testing.assert_array_equal(packed.fields["ids"], [1, 2, 0, 3, 0, 0])
    np.testing.assert_array_equal(packed.positions_T, [0, 1, 2, 0, 1, 2])


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, multiple=st.integers(1, 8), padded=st.booleans())
def test_unpacking_gives_every_field_back(lengths: list[int], multiple: int, padded: bool) -> None:
    fields = rows(lengths)
    packed = pack(fields, multiple=multiple, row_len=9 if padded else None)
    total = 9 * len(lengths) if padded else sum(lengths)
    assert packed.cu_seqlens[-1] == len(packed.positions_T) == -(-total // multiple) * multiple
    back = unpack(packed, lengths)
    for name, parts in fields.items():
        assert packed.fields[name].dtype == parts[0].dtype
        for found, part in zip(back[name], parts, strict=True):
            np.testing.assert_array_equal(found, part)


def test_rows_that_disagree_or_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="'b'"):
        pack({"a": [np.zeros(2)], "b": [np.zeros(3)]})
    with pytest.raises(ValueError, match="4 tokens"):
        pack({"a": [np.zeros(4)]}, row_len=3)
    with pytest.raises(ValueError, match="nothing"):
        pack({"a": []})
