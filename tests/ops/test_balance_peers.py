"""The baselines of the balancing benchmark are what they say they are."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "ops"))
from balance_peers import differencing, differencing_equal, differencing_sparse, first_fit, strict_differencing


def loads(costs: np.ndarray, parts: list) -> list[int]:
    return sorted(int(costs[list(part)].sum()) for part in parts)


def test_differencing_of_a_known_example() -> None:
    """8, 7, 6, 5, 4 in two parts: 8 - 7, 6 - 5, 4 - 1, 3 - 1: a difference of 2, where 15 and 15 could be had."""
    costs = [8, 7, 6, 5, 4]
    assert loads(np.array(costs), differencing(costs, 2)) == [14, 16]


def test_leaving_out_empty_sets_changes_no_sum() -> None:
    rng = np.random.default_rng(0)
    for k in (2, 3, 7):
        costs = rng.integers(1, 10**6, 40)
        assert loads(costs, differencing(costs.tolist(), k)) == loads(costs, differencing_sparse(costs.tolist(), k))


def test_plans_of_peers_hold_every_sample_under_the_cap() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(7, 1, 64).astype(np.int64) + 1, 8000)
    for peer in (strict_differencing, first_fit):
        ranks = peer(lengths, lengths * (100 + lengths), dp=4, cap=8000)
        assert sorted(i for rank in ranks for micro in rank for i in micro) == list(range(64))
        assert len({len(rank) for rank in ranks}) == 1
        assert max(int(lengths[micro].sum()) for rank in ranks for micro in rank) <= 8000
    assert {len(part) for part in differencing_equal(lengths.tolist(), 4)} == {16}
