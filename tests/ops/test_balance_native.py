"""The compiled balancing ops give what the Python ones give, in every bit; and both are well-behaved torch ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from backends import Backend
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.ops import registry

OP = "balance_plan"
ALIKE = settings(max_examples=150, deadline=None, derandomize=True)
NUMBERS = st.one_of(
    st.lists(st.integers(0, 9), max_size=60),
    st.lists(st.integers(0, 5000), max_size=60),
    st.lists(st.sampled_from([3, 3, 3, 70, 200]), max_size=60),
)


@pytest.fixture(autouse=True)
def native() -> None:
    if "cpu" not in registry.native_backends()[OP]:
        pytest.skip(registry.LIBRARIES["cpu"])


def same(op: str, *arguments: Any) -> None:
    ours = getattr(torch.ops.mdapo, op)(*arguments)
    reference = registry.REFERENCES[op](*arguments)
    for got, expected in zip(
        [ours] if isinstance(ours, torch.Tensor) else ours,
        [reference] if isinstance(reference, torch.Tensor) else reference,
        strict=True,
    ):
        assert torch.equal(got, expected), (got.tolist(), expected.tolist())


@ALIKE
@given(costs=NUMBERS, k=st.integers(1, 20), equal=st.booleans())
def test_partitions_are_those_of_the_reference(costs: list[int], k: int, equal: bool) -> None:
    same("balance_partition", torch.tensor(costs, dtype=torch.int64), k, equal)


@ALIKE
@given(
    data=st.data(), tokens=NUMBERS, dp=st.integers(1, 6), cap=st.integers(0, 6000),
    rows=st.sampled_from([1, 2, 5, 10**9]), multiple=st.integers(1, 3), at_least=st.integers(1, 3),
    lockstep=st.booleans(), equal=st.booleans(),
)  # fmt: skip
def test_plans_are_those_of_the_reference(
    data: st.DataObject, tokens: list[int], dp: int, cap: int, rows: int, multiple: int, at_least: int,
    lockstep: bool, equal: bool,
) -> None:  # fmt: skip
    n = len(tokens)
    costs = data.draw(
        st.one_of(st.just([t * (t + 100) for t in tokens]), st.lists(st.integers(0, 99), min_size=n, max_size=n))
    )
    mini = data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    columns = [torch.tensor(column, dtype=torch.int64) for column in (tokens, costs, mini)]
    same("balance_plan", *columns, 2, dp, cap, rows, multiple, at_least, lockstep, equal)


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize(("n", "dp", "scale"), [(300, 4, 7.5), (400, 16, 7.5), (200, 4, 9.3)])
def test_real_batches_are_planned_alike(n: int, dp: int, scale: float, lockstep: bool, equal: bool) -> None:
    """Long tails, tight caps: peeled slots, gathered room, best fit, exchanges."""
    lengths = np.minimum(np.random.default_rng(n).lognormal(scale, 1.0, n), 32768).astype(np.int64) + 1
    tokens = torch.from_numpy(lengths)
    same(
        "balance_plan",
        tokens,
        tokens * (24576 + tokens),
        torch.zeros_like(tokens),
        1,
        dp,
        32769,
        10**9,
        1,
        1,
        lockstep,
        equal,
    )
    same("balance_partition", tokens * (24576 + tokens), dp, equal)


def test_ops_pass_torchs_own_checks(host: Backend) -> None:
    costs, mini = torch.tensor([5, 3, 9, 1, 7]), torch.tensor([0, 0, 1, 0, 1])
    host.opcheck("balance_partition", costs, 2, True)
    host.opcheck("balance_plan", costs, costs, mini, 2, 2, 10, 9, 1, 1, False, False)


def test_strided_numbers_are_read_as_they_are() -> None:
    costs = torch.arange(40).reshape(20, 2)
    same("balance_partition", costs[:, 1], 4, False)


def test_numbers_that_make_no_sense_are_refused() -> None:
    ok = torch.tensor([1, 2, 3])
    for costs in (
        torch.tensor([1.0, 2.0]),
        torch.tensor([[1, 2]]),
        torch.tensor([-1, 2]),
        torch.tensor([2**61, 2**61]),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            torch.ops.mdapo.balance_partition(costs, 2, False)
    with pytest.raises((RuntimeError, ValueError)):
        torch.ops.mdapo.balance_plan(ok, ok, torch.tensor([0, 1, 2]), 2, 2, 10, 9, 1, 1, False, False)
