"""A step's samples end to end: what goes in comes out, one by one and in slices."""

from __future__ import annotations

import numpy as np
import pytest

from mdapo.types import NO_SAMPLES, TOKEN_FIELDS, Sample, Samples


def sample(number: int, tokens: int) -> Sample:
    rng = np.random.default_rng(number)
    values = {name: rng.integers(0, 2, tokens).astype(dtype) for name, dtype in TOKEN_FIELDS.items()}
    return Sample(str(number), number // 2, **values)


def assert_same(ones: Samples, others: list[Sample]) -> None:
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        assert (one.uid, one.group) == (other.uid, other.group)
        for name, dtype in TOKEN_FIELDS.items():
            assert getattr(one, name).dtype == dtype
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_samples_come_back_as_they_were_also_those_without_tokens() -> None:
    ones = [sample(i, tokens) for i, tokens in enumerate((3, 0, 5, 1, 0))]
    joined = Samples.of(ones)
    assert_same(joined, ones)
    assert_same(joined[1:4], ones[1:4])
    assert_same(joined[::-2], ones[::-2])
    assert_same(Samples.of([joined[-1]]), ones[-1:])
    assert joined.starts_N.tolist() == [0, 3, 3, 8, 9]
    assert joined.model_tokens_N.tolist() == [int(one.response_mask.sum()) for one in ones]
    with pytest.raises(IndexError):
        joined[5]


def test_a_sample_of_the_batch_is_a_view() -> None:
    joined = Samples.of([sample(0, 4), sample(1, 2)])
    assert np.shares_memory(joined[1].ids, joined.fields["ids"])


def test_no_samples_have_fields_of_the_right_types() -> None:
    assert len(NO_SAMPLES) == 0 and list(NO_SAMPLES) == []
    assert {name: field.dtype for name, field in NO_SAMPLES.fields.items()} == TOKEN_FIELDS
    assert NO_SAMPLES.model_tokens_N.tolist() == []


def test_an_array_of_another_type_is_refused() -> None:
    odd = sample(0, 3)
    with pytest.raises(TypeError, match="cast"):
        Samples.of([Sample(odd.uid, 0, odd.ids.astype(np.int64), *(getattr(odd, n) for n in list(TOKEN_FIELDS)[1:]))])
