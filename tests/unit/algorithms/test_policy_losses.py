"""Policy losses against loops in fp64 numpy, their gradients, their bounds, and denominators that no cut can change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mdapo.algorithms.losses import make_loss_fn, means, policy_loss, token_weights
from mdapo.config.schema import Algorithm, Config, Data, Kl, Model, RolloutCorrection
from mdapo.types import MicroBatch

LOSSES = {"token_clip": (0.2, 0.28), "gspo": (0.05, 0.1), "gmpo": (0.4, 0.3)}
NAN = float("nan")


def algorithm(loss: Any, **keys: Any) -> Algorithm:
    low, high = LOSSES[loss]
    return Algorithm(policy_loss=loss, clip_ratio_low=low, clip_ratio_high=high, loss_agg_mode="token-mean", **keys)


def batch(seed: int, *, lengths: tuple[int, ...] = (3, 1, 6, 4), scale: float = 0.4) -> SimpleNamespace:
    rng = np.random.default_rng(seed)
    segments = np.repeat(np.arange(len(lengths)), lengths)
    old = -rng.exponential(size=len(segments))
    return SimpleNamespace(
        logps=torch.from_numpy(old + scale * rng.normal(size=len(segments))),
        old=torch.from_numpy(old),
        advantages=torch.from_numpy(rng.normal(size=len(lengths))[segments]),
        weights=torch.from_numpy(rng.uniform(0.1, 1.0, size=len(lengths))[segments]),
        segments=torch.from_numpy(segments),
        n=len(lengths),
    )


def gradient(logps: torch.Tensor) -> torch.Tensor:
    assert logps.grad is not None
    return logps.grad


def clip_range(cfg: Algorithm) -> tuple[float, float]:
    assert cfg.clip_ratio_low is not None
    assert cfg.clip_ratio_high is not None
    return cfg.clip_ratio_low, cfg.clip_ratio_high


def reference(b: SimpleNamespace, cfg: Algorithm) -> float:
    """The definitions, token by token, for batches without weightless tokens."""
    logps, old, adv, weights, segments = (x.numpy() for x in (b.logps, b.old, b.advantages, b.weights, b.segments))
    (low, high), total = clip_range(cfg), 0.0
    for t, a in enumerate(adv):
        members = segments == segments[t]
        log_ratios = logps[members] - old[members]
        if cfg.policy_loss == "gmpo":
            clipped = [
                min(x, high) if a > 0 else max(x, -low) for x in log_ratios
            ]  # the pessimistic side of a clip to [-low, high]
            total += weights[t] * -a * np.exp(np.mean(clipped))
            continue
        ratio = np.exp(np.mean(log_ratios)) if cfg.policy_loss == "gspo" else np.exp(logps[t] - old[t])
        objective = min(ratio * a, np.clip(ratio, 1 - low, 1 + high) * a)
        if cfg.clip_ratio_c is not None and a < 0:
            objective = max(objective, cfg.clip_ratio_c * a)
        total += weights[t] * -objective
    return float(total)


def run(b: SimpleNamespace, cfg: Algorithm, logps: torch.Tensor | None = None) -> tuple[torch.Tensor, dict]:
    logps = b.logps if logps is None else logps
    return policy_loss(logps, b.old, b.advantages, b.weights, b.segments, b.n, cfg)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", range(5))
def test_losses_equal_their_definitions(loss: Any, seed: int) -> None:
    b, cfg = batch(seed), algorithm(loss)
    assert float(run(b, cfg)[0]) == pytest.approx(reference(b, cfg), rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_dual_clip_bounds_the_loss_of_bad_tokens(seed: int) -> None:
    b, cfg = batch(seed, scale=3.0), algorithm("token_clip", clip_ratio_c=3.0)
    value, metrics = run(b, cfg)
    assert float(value) == pytest.approx(reference(b, cfg), rel=1e-12)
    ratio = (b.logps - b.old).exp()
    assert metrics["clip_dual"] == ((b.advantages < 0) & (ratio > 3.0)).sum()


@pytest.mark.parametrize("loss", ["token_clip", "gmpo"])
def test_gradients_are_those_of_the_value(loss: Any) -> None:
    b = batch(1)
    logps = b.logps.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: run(b, algorithm(loss), x)[0], logps)


def test_sequence_ratio_reaches_each_token_as_its_own_score_function() -> None:
    """GSPO's stop-gradient: d loss / d logp_t = -w A s where the sequence is unclipped, 0 where it is clipped."""
    b, cfg = batch(2, scale=0.1), algorithm("gspo")
    low, high = clip_range(cfg)
    logps = b.logps.clone().requires_grad_()
    run(b, cfg, logps)[0].backward()
    for s in range(b.n):
        members = b.segments == s
        ratio = (b.logps - b.old)[members].mean().exp()
        a = b.advantages[members]
        clipped = ((a > 0) & (ratio > 1 + high)) | ((a < 0) & (ratio < 1 - low))
        expected = torch.where(clipped, 0.0, -b.weights[members] * a * ratio)
        torch.testing.assert_close(gradient(logps)[members], expected)


@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_gradient_is_the_plain_policy_gradient(loss: Any) -> None:
    """All three agree at ratio 1: -w A at each token (gmpo: with the sequence's mean of w A)."""
    b = batch(3)
    logps = b.old.clone().requires_grad_()
    run(b, algorithm(loss), logps)[0].backward()
    torch.testing.assert_close(gradient(logps), -b.weights * b.advantages)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("difference", [200.0, -200.0])
def test_extreme_ratios_stay_finite_in_fp32(loss: Any, difference: float) -> None:
    """Case 23."""
    for sign in (1.0, -1.0):
        b = batch(0)
        logps = b.old.float() + torch.tensor([difference] + [0.01] * 13)
        logps.requires_grad_()
        value, metrics = policy_loss(
            logps, b.old.float(), torch.full((14,), sign), b.weights.float(), b.segments, b.n, algorithm(loss)
        )
        value.backward()
        assert value.isfinite()
        assert gradient(logps).isfinite().all()
        assert all(m.isfinite() for m in metrics.values())


@pytest.mark.parametrize("loss", LOSSES)
def test_weightless_tokens_leak_nothing_not_even_nan(loss: Any) -> None:
    b, cfg = batch(4), algorithm(loss)
    dead = b.segments == 2
    dead[0] = True  # one token of a living sequence, too
    b.weights = torch.where(dead, 0.0, b.weights)
    poisoned = SimpleNamespace(**vars(b))
    for name in ("old", "advantages"):
        setattr(poisoned, name, torch.where(dead, NAN, getattr(b, name)))
    clean, poison = b.logps.clone().requires_grad_(), torch.where(dead, NAN, b.logps).requires_grad_()
    value, metrics = run(b, cfg, clean)
    value_p, metrics_p = run(poisoned, cfg, poison)
    value.backward()
    value_p.backward()
    assert value == value_p
    assert torch.equal(gradient(clean), gradient(poison))
    assert (gradient(poison)[dead] == 0).all()
    assert metrics == metrics_p
    assert metrics["tokens"] == (~dead).sum()


def test_low_precision_inputs_are_computed_in_fp32() -> None:
    b = batch(0)
    logps, old, advantages, weights = (x.bfloat16() for x in (b.logps, b.old, b.advantages, b.weights))
    cfg = algorithm("token_clip")
    value, _ = policy_loss(logps, old, advantages, weights, b.segments, b.n, cfg)
    wide, _ = policy_loss(logps.float(), old.float(), advantages.float(), weights.float(), b.segments, b.n, cfg)
    assert value.dtype == torch.float32
    assert value == wide


def test_clip_metrics_count_only_where_the_clipped_branch_rules() -> None:
    ratios, adv = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0]), torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    _, m = policy_loss(
        ratios.log(), torch.zeros(5), adv, torch.ones(5), torch.zeros(5, dtype=torch.int64), 1, algorithm("token_clip")
    )
    assert (m["clip_high"], m["clip_low"], m["tokens"]) == (1, 1, 5)
    assert float(m["ratio_max"]) == pytest.approx(1.5)
    assert float(m["ratio"]) == pytest.approx(5.0)


# Denominators.


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 12, 1 / 12, 0, 1 / 12]),
        ("group-token-mean", [1 / (2 * 10), 1 / (2 * 10), 0, 1 / (2 * 2)]),
        ("seq-mean-token-mean", [1 / (3 * 2), 1 / (3 * 8), 0, 1 / (3 * 2)]),
        ("seq-mean-token-sum-norm", [1 / (3 * 16), 1 / (3 * 16), 0, 1 / (3 * 16)]),
    ],
)
def test_each_mode_has_its_denominator(mode: Any, expected: list[float]) -> None:
    """Case 15: the token mean over the batch and over each group both exist; a masked sample counts in neither."""
    found = token_weights([2, 8, 0, 2], [7, 7, 7, 9], mode=mode, max_response_len=16)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_token_means_differ_for_groups_of_unequal_length_only() -> None:
    """Case 15."""
    tokens, groups = [1, 3, 10, 10], [0, 0, 1, 1]
    by_batch, by_group = (
        token_weights(tokens, groups, mode=mode, max_response_len=1) for mode in ("token-mean", "group-token-mean")
    )
    np.testing.assert_allclose(by_batch, 1 / 24)
    np.testing.assert_allclose(by_group, [1 / 8, 1 / 8, 1 / 40, 1 / 40])
    equal = token_weights([1, 3, 2, 2], groups, mode="group-token-mean", max_response_len=1)
    np.testing.assert_allclose(equal, 1 / 8)


@pytest.mark.parametrize("mode", ["token-mean", "group-token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_a_batch_without_tokens_has_no_weight(mode: Any) -> None:
    assert (token_weights([0, 0], [0, 1], mode=mode, max_response_len=4) == 0).all()


# The micro-batch's loss.


def config(**keys: Any) -> Config:
    return Config(model=Model(path="m"), data=Data(train_files=["d"]), algorithm=algorithm("token_clip", **keys))


def micro_batch(**fields: Any) -> MicroBatch:
    weights = torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0])
    segments = torch.tensor([0, 0, 1, 1, 1])
    base: dict[str, Any] = {
        "ids_T": torch.zeros(7, dtype=torch.int64),
        "positions_T": torch.arange(7),
        "cu_seqlens": (0, 3, 7),
        "loss_index_R": torch.tensor([0, 1, 3, 4, 5]),
        "targets_R": torch.zeros(5, dtype=torch.int64),
        "segment_R": segments,
        "advantages_R": torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0]),
        "loss_weights_R": weights,
        "rollout_logps_R": torch.tensor([-1.0, -1.5, -2.0, NAN, NAN]),
    }
    return MicroBatch(**{**base, **fields})


LOGPS = torch.tensor([-1.1, -1.5, -2.3, -0.7, -9.0])
ENTROPIES = torch.tensor([1.0, 2.0, 3.0, 4.0, NAN])


def test_on_policy_step_needs_no_old_log_probs() -> None:
    given_old = LOGPS.clone().requires_grad_()
    without = LOGPS.clone().requires_grad_()
    loss_fn = make_loss_fn(config())
    loss, metrics = loss_fn(without, ENTROPIES, micro_batch())
    loss.backward()
    same, _ = loss_fn(given_old, ENTROPIES, micro_batch(old_logps_R=LOGPS))
    same.backward()
    assert loss == same
    assert torch.equal(gradient(given_old), gradient(without))
    assert means({k: float(v) for k, v in metrics.items()})["ratio"] == 1.0


def test_gap_to_the_engine_is_over_tokens_whose_log_prob_is_known() -> None:
    _, metrics = make_loss_fn(config())(LOGPS, ENTROPIES, micro_batch())
    logged = means({k: float(v) for k, v in metrics.items()})
    assert metrics["rollout_tokens"] == 3
    assert logged["rollout_logp_gap"] == pytest.approx((0.1 + 0.0 + 0.3) / 3, rel=1e-5)
    assert logged["rollout_logp_gap_max"] == pytest.approx(0.3, rel=1e-5)
    gaps = np.array([-0.1, 0.0, -0.3])
    assert logged["rollout_kl"] == pytest.approx(np.mean(np.exp(gaps) - 1 - gaps), rel=1e-4)
    assert logged["entropy"] == pytest.approx(2.5)


def test_kl_entropy_and_importance_weights_enter_as_their_formulas_say() -> None:
    ref = torch.tensor([-1.0, -1.0, -2.0, -1.0, NAN])
    cfg = config(
        kl=Kl(enable=True, estimator="k3", coef=0.1),
        entropy_coef=0.01,
        rollout_correction=RolloutCorrection(rollout_is="token", rollout_is_threshold=1.05),
    )
    loss, metrics = make_loss_fn(cfg)(LOGPS, ENTROPIES, micro_batch(ref_logps_R=ref))
    tis = np.minimum(np.exp([-0.1, 0.0, -0.3, 0.0]), 1.05)
    adv, logps, reference_logps = np.array([1, 1, -1, -1.0]), LOGPS[:4].numpy(), ref[:4].numpy()
    k3 = np.exp(reference_logps - logps) - 1 - (reference_logps - logps)
    expected = np.sum(0.25 * tis * (-adv + 0.1 * k3 - 0.01 * ENTROPIES[:4].numpy()))
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["kl"]) == pytest.approx(k3.sum(), rel=1e-5)
    torch.testing.assert_close(loss, metrics["pg_loss"] + metrics["kl_loss"] + metrics["entropy_loss"])


def test_kl_in_the_reward_lowers_advantages_and_has_no_gradient_of_its_own() -> None:
    ref = torch.tensor([-1.0, -1.0, -2.0, -1.0, NAN])
    cfg = config(kl=Kl(enable=True, where="reward", estimator="k1", coef=0.5))
    logps = LOGPS.clone().requires_grad_()
    loss, _ = make_loss_fn(cfg)(logps, ENTROPIES, micro_batch(ref_logps_R=ref))
    loss.backward()
    k1 = (LOGPS - ref)[:4]
    to_go = torch.stack([k1[0] + k1[1], k1[1], k1[2] + k1[3], k1[3]])
    expected = -0.25 * (torch.tensor([1.0, 1.0, -1.0, -1.0]) - 0.5 * to_go)
    torch.testing.assert_close(gradient(logps)[:4], expected)
    assert gradient(logps)[4] == 0


def test_a_filler_stays_in_the_graph_with_a_zero_gradient() -> None:
    """Case 10: dummy work takes part in the backward pass."""
    logps = LOGPS.clone().requires_grad_()
    for loss in LOSSES:
        cfg = Config(model=Model(path="m"), data=Data(train_files=["d"]), algorithm=algorithm(loss))
        value, metrics = make_loss_fn(cfg)(logps, ENTROPIES, micro_batch(loss_weights_R=torch.zeros(5)))
        assert value.requires_grad
        assert value == 0
        value.backward()
        assert gradient(logps).count_nonzero() == 0
        assert metrics["tokens"] == 0
        assert all(np.isfinite(v) for v in means({k: float(v) for k, v in metrics.items()}).values())
