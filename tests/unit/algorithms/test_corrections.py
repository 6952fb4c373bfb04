"""Corrections for tokens of another policy: hand-computed weights and masks, bounds, unknowns, equal policies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.algorithms.corrections import Segments, correct, mismatch, ratios, rs_range
from mdapo.algorithms.losses import make_loss_fn, means
from mdapo.config.schema import Algorithm, Config, Data, Model, RolloutCorrection
from mdapo.types import MicroBatch

NAN = float("nan")
LEVELS: tuple[Any, ...] = ("token", "sequence", "geometric")
TWO = Segments(torch.tensor([0, 0, 1, 1, 1]), 2)
ALL = torch.ones(5, dtype=torch.bool)
ROLLOUT = torch.tensor([-1.0, -1.0, -2.0, -2.0, -2.0])
GAPS = torch.tensor([0.5, -0.2, 0.1, 0.2, -0.6])


def found(segments: Segments = TWO, active: torch.Tensor = ALL, gaps: torch.Tensor = GAPS, **keys: Any) -> list[float]:
    return correct(ROLLOUT + gaps, ROLLOUT, active, segments, RolloutCorrection(**keys)).weights_R.tolist()


def test_token_weights_are_truncated_one_by_one() -> None:
    got = found(rollout_is="token", rollout_is_threshold=1.2)
    assert got == pytest.approx([1.2, math.exp(-0.2), math.exp(0.1), 1.2, math.exp(-0.6)])


def test_sequence_weights_are_products_and_geometric_ones_their_roots() -> None:
    got = found(rollout_is="sequence", rollout_is_threshold=1.2)
    assert got == pytest.approx([1.2] * 2 + [math.exp(-0.3)] * 3)
    got = found(rollout_is="geometric", rollout_is_threshold=1.1)
    assert got == pytest.approx([1.1] * 2 + [math.exp(-0.1)] * 3)


def test_masking_lets_pass_what_is_inside_the_range() -> None:
    assert found(rollout_rs="token", rollout_rs_threshold=1.3) == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert found(rollout_rs="token", rollout_rs_threshold=2.0, rollout_rs_threshold_lower=0.9) == [1, 0, 1, 1, 0]
    assert found(rollout_rs="sequence", rollout_rs_threshold=1.34, rollout_rs_threshold_lower=0.7) == [
        0.0,
        0.0,
        1.0,
        1.0,
        1.0,
    ]
    assert found(rollout_rs="geometric", rollout_rs_threshold=1.12) == [0.0, 0.0, 1.0, 1.0, 1.0]
    ends = torch.log(torch.tensor([2.0, 0.5, 1.0, 1.0, 1.0]))
    assert found(gaps=ends, rollout_rs="token", rollout_rs_threshold=2.001) == [1.0] * 5
    assert found(gaps=ends, rollout_rs="token", rollout_rs_threshold=1.999) == [0.0, 0.0, 1.0, 1.0, 1.0]


def test_masked_importance_sampling_is_both_together() -> None:
    got = found(rollout_is="token", rollout_is_threshold=1.3, rollout_rs="token", rollout_rs_threshold=1.3)
    assert got == pytest.approx([0.0, math.exp(-0.2), math.exp(0.1), math.exp(0.2), 0.0])


def test_the_lower_end_is_the_reciprocal_unless_given() -> None:
    assert rs_range(RolloutCorrection(rollout_rs="token", rollout_rs_threshold=4.0)) == (0.25, 4.0)
    both = RolloutCorrection(rollout_rs="token", rollout_rs_threshold=4.0, rollout_rs_threshold_lower=0.5)
    assert rs_range(both) == (0.5, 4.0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("gap", [200.0, -200.0, 1e30])
def test_extreme_gaps_are_bounded_before_exp(level: Any, gap: float) -> None:
    """Case 23, at every level, for one token and for a sequence of many."""
    many = Segments(torch.zeros(5, dtype=torch.int64), 1)
    ratio = ratios(torch.full((5,), gap), torch.zeros(5), ALL, many, level=level)
    assert ratio.isfinite().all() and (ratio > 0).all()
    cfg = RolloutCorrection(rollout_is=level, rollout_rs=level, rollout_rs_threshold=2.0)
    assert correct(torch.full((5,), gap), torch.zeros(5), ALL, many, cfg).weights_R.tolist() == [0.0] * 5


@pytest.mark.parametrize("level", LEVELS)
def test_unknown_log_probs_are_neutral_and_counted(level: Any) -> None:
    """NaN: a token of ratio 1 that has no part in its sequence's."""
    rollout = torch.tensor([-1.0, NAN, -2.0, -2.0, -2.0])
    old = ROLLOUT + GAPS
    ratio = ratios(old, rollout, ALL, TWO, level=level)
    alone = ratios(old[:1], rollout[:1], ALL[:1], Segments(torch.tensor([0]), 1), level=level)
    assert ratio[0] == alone[0]
    assert ratio[1] == (1.0 if level == "token" else ratio[0])
    numbers = mismatch(old, rollout, ALL)
    assert (int(numbers["rollout_tokens"]), int(numbers["rollout_unknown"])) == (4, 1)
    unknown = torch.full((5,), NAN)
    assert torch.equal(ratios(old, unknown, ALL, TWO, level=level), torch.ones(5))


def test_tokens_without_loss_have_no_say_in_their_sequence() -> None:
    active = torch.tensor([True, True, True, True, False])
    gaps = torch.tensor([0.0, 0.0, 0.1, 0.2, 90.0])
    assert found(active=active, gaps=gaps, rollout_is="sequence", rollout_is_threshold=9.0) == pytest.approx(
        [1.0] * 2 + [math.exp(0.3)] * 3
    )


def test_mismatch_is_hand_computed() -> None:
    numbers = mismatch(ROLLOUT + GAPS, ROLLOUT, torch.tensor([True] * 4 + [False]))
    gaps = GAPS[:4].double().numpy()
    assert float(numbers["rollout_logp_gap"]) == pytest.approx(np.abs(gaps).sum(), rel=1e-5)
    assert float(numbers["rollout_logp_gap_max"]) == pytest.approx(0.5, rel=1e-5)
    assert float(numbers["rollout_kl_k1"]) == pytest.approx(-gaps.sum(), rel=1e-5)
    assert float(numbers["rollout_kl"]) == pytest.approx((np.exp(gaps) - 1 - gaps).sum(), rel=1e-4)


def test_shares_clipped_and_masked_are_over_known_tokens() -> None:
    cfg = RolloutCorrection(
        rollout_is="token", rollout_is_threshold=1.15, rollout_rs="sequence", rollout_rs_threshold=1.5
    )
    numbers = correct(ROLLOUT + GAPS, torch.where(torch.arange(5) == 1, NAN, ROLLOUT), ALL, TWO, cfg).metrics
    assert numbers["rollout_is_capped"] == 2
    assert numbers["rollout_rs_masked"] == 1


# In the loss.


def batch(rollout: torch.Tensor, weights: torch.Tensor) -> MicroBatch:
    count = len(rollout)
    cut = count // 2
    return MicroBatch(
        ids_T=torch.zeros(count + 2, dtype=torch.int64),
        positions_T=torch.arange(count + 2),
        cu_seqlens=(0, cut + 1, count + 2),
        loss_index_R=torch.arange(count),
        targets_R=torch.zeros(count, dtype=torch.int64),
        segment_R=torch.tensor([0] * cut + [1] * (count - cut)),
        advantages_R=torch.linspace(-1.0, 1.5, count),
        loss_weights_R=weights,
        rollout_logps_R=rollout,
    )


def loss_of(loss: str, logps: torch.Tensor, micro: MicroBatch, **keys: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    algorithm = Algorithm(
        policy_loss=loss, clip_ratio_low=0.2, clip_ratio_high=0.28, rollout_correction=RolloutCorrection(**keys)
    )  # type: ignore[arg-type]
    cfg = Config(model=Model(path="m"), data=Data(train_files=["d"]), algorithm=algorithm)
    leaf = logps.clone().requires_grad_()
    value, metrics = make_loss_fn(cfg)(leaf, torch.ones_like(leaf), micro)
    value.backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad, metrics


CORRECTIONS: list[dict[str, Any]] = [
    *({"rollout_is": level} for level in LEVELS),
    *({"rollout_rs": level, "rollout_rs_threshold": 1.0} for level in LEVELS),
    *({"rollout_is": level, "rollout_rs": level, "rollout_rs_threshold": 1.001} for level in LEVELS),
]


@pytest.mark.parametrize("loss", ["token_clip", "gspo", "gmpo"])
@pytest.mark.parametrize("keys", CORRECTIONS, ids=str)
@settings(max_examples=20, deadline=None)
@given(values=st.lists(st.floats(-30, -(2.0**-10), width=32), min_size=2, max_size=40))
def test_with_equal_policies_every_correction_changes_nothing_bitwise(
    loss: str, keys: dict[str, Any], values: list[float]
) -> None:
    logps = torch.tensor(values)
    micro = batch(logps.clone(), torch.full_like(logps, 1.0 / 7.0))
    plain, corrected = loss_of(loss, logps, micro), loss_of(loss, logps, micro, **keys)
    assert torch.equal(plain[0], corrected[0])
    assert torch.equal(plain[1], corrected[1])


def test_a_masked_token_is_to_the_loss_as_one_of_weight_zero_and_the_denominator_stays() -> None:
    logps, rollout = torch.tensor([-1.0, -2.0, -3.0, -1.5]), torch.tensor([-1.0, -2.0, -1.0, -1.5])
    weights = torch.full((4,), 0.25)
    masked = loss_of("token_clip", logps, batch(rollout, weights), rollout_rs="token", rollout_rs_threshold=2.0)
    zeroed = loss_of("token_clip", logps, batch(rollout, torch.tensor([0.25, 0.25, 0.0, 0.25])))
    assert torch.equal(masked[0], zeroed[0]) and torch.equal(masked[1], zeroed[1])
    assert masked[1][2] == 0
    logged = means({name: float(value) for name, value in masked[2].items()})
    assert (logged["tokens"], logged["rollout_tokens"], logged["rollout_rs_masked"]) == (3, 4, 0.25)
    assert logged["entropy"] == 1.0
