"""From groups to micro-batches: who carries loss, with what weight, and that no cut changes loss or gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mdapo.algorithms.losses import make_loss_fn
from mdapo.config.schema import Actor, Algorithm, Config, Data, Model, OverlongBuffer, RewardCfg, Rollout
from mdapo.data.batching import make_samples, micro_batches, plan_shares
from mdapo.data.shares import Cut, pack_shares, rows_of
from mdapo.data.unfold import unfold
from mdapo.errors import UserError
from mdapo.types import EndReason, Episode, Group, MicroBatch, Prompt, Sample, Samples, Score, Turn

VOCABULARY = 11


def config(*, algorithm: dict[str, Any] | None = None, actor: dict[str, Any] | None = None, **sections: Any) -> Config:
    keys: dict[str, Any] = {
        "advantage_estimator": "group_mean",
        "policy_loss": "token_clip",
        "loss_agg_mode": "token-mean",
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
    }
    limits: dict[str, Any] = {"ppo_max_token_len": 64}
    return Config(
        model=Model(path="m"),
        data=Data(train_files=["d"], train_prompt_bsz=8),
        algorithm=Algorithm(**(keys | (algorithm or {}))),
        actor=Actor(**(limits | (actor or {}))),
        **sections,
    )


def turn(rng: np.random.Generator, length: int, *, agent: bool = True) -> Turn:
    return Turn(
        role="assistant" if agent else "user",
        ids=rng.integers(1, VOCABULARY, length).astype(np.int32),
        mask=np.full(length, agent),
        logps=(-rng.exponential(size=length) if agent else np.full(length, np.nan)).astype(np.float32),
        version=3 if agent else -1,
    )


def episode(
    prompt: Prompt, index: int, value: float, *turns: Turn, end: EndReason = "done", valid: bool = True
) -> Episode:
    ids = np.arange(1, 4, dtype=np.int32)
    return Episode(prompt, index, ids, turns, (), end, Score(value, value, valid=valid))


def group(name: str, values: list[float], lengths: list[int], *, seed: int = 0) -> Group:
    rng, prompt = np.random.default_rng(seed), Prompt(name, 0, ())
    episodes = [
        episode(prompt, i, value, turn(rng, n), turn(rng, 3, agent=False), turn(rng, 2))
        for i, (value, n) in enumerate(zip(values, lengths, strict=True))
    ]
    return Group(prompt, tuple(episodes), version=3)


def mixed_groups() -> list[Group]:
    return [
        group("a", [1, 0, 1, 0], [3, 9, 1, 20], seed=1),
        group("b", [0, 0.5, 2], [8, 2, 13], seed=2),
        group("c", [1, 0], [5, 6], seed=3),
    ]


def planned(
    samples: Sequence[Sample], cfg: Config, *, token_multiple: int = 1, **cut: int
) -> list[list[list[MicroBatch]]]:
    """[rank][mini-batch][micro-batch], as the ranks unfold their shares."""
    shares = plan_shares(Samples.of(samples), cfg, token_multiple=token_multiple, **cut)
    return [micro_batches(share, cfg, token_multiple=token_multiple) for share in shares]


def packed(samples: Sequence[Sample], cut: Cut, **options: Any) -> list[list[list[MicroBatch]]]:
    return [unfold(share, **options) for share in pack_shares(rows_of(Samples.of(samples)), cut)]


# What carries loss.


def test_a_sample_keeps_the_engines_tokens_and_credits_the_policys_alone() -> None:
    groups = mixed_groups()
    samples, stats = make_samples(groups, config())
    assert [s.uid for s in samples[:5]] == ["a/0", "a/1", "a/2", "a/3", "b/0"]
    assert [s.group for s in samples] == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    for sample, source in zip(samples, [e for g in groups for e in g.episodes], strict=True):
        np.testing.assert_array_equal(sample.ids, source.ids)
        np.testing.assert_array_equal(sample.response_mask, source.response_mask)
        assert (sample.advantages[~sample.response_mask] == 0).all()
        assert (sample.loss_weights[~sample.response_mask] == 0).all()
        assert len(set(sample.advantages[sample.response_mask])) == 1
    assert samples[1].advantages[samples[1].response_mask][0] == np.float32(-0.5)
    assert stats["batch/samples_trained"] == 9
    assert sum(float(s.loss_weights.sum()) for s in samples) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("kind", ["invalid", "truncated", "silent"])
def test_episodes_without_loss_change_nothing_for_the_others(kind: str) -> None:
    cfg = config(algorithm={"mask_truncated": True, "advantage_estimator": "group_norm"})
    [plain] = [group("a", [1, 0, 1], [3, 4, 5])]
    rng = np.random.default_rng(9)
    odd = {
        "invalid": episode(plain.prompt, 3, 50.0, turn(rng, 6), valid=False),
        "truncated": episode(plain.prompt, 3, 50.0, turn(rng, 6), end="token_limit"),
        "silent": episode(plain.prompt, 3, 50.0, turn(rng, 6, agent=False)),
    }[kind]
    alone, _ = make_samples([plain], cfg)
    joined, stats = make_samples([replace(plain, episodes=(*plain.episodes, odd))], cfg)
    for a, b in zip(alone, joined[:3], strict=True):
        np.testing.assert_array_equal(a.advantages, b.advantages)
        np.testing.assert_array_equal(a.loss_weights, b.loss_weights)
    assert (joined[3].loss_weights == 0).all()
    assert (joined[3].advantages == 0).all()
    counter = {"invalid": "masked_invalid", "truncated": "masked_truncated", "silent": "without_model_tokens"}[kind]
    assert stats[f"batch/{counter}"] == 1
    shares = planned(joined, cfg, dp=1)
    assert sum(int((b.loss_weights_R == 0).sum()) for mini in shares[0] for b in mini) == 0


def test_truncated_episodes_train_unless_they_are_masked() -> None:
    rng, prompt = np.random.default_rng(0), Prompt("p", 0, ())
    cut = [episode(prompt, i, float(i), turn(rng, 4), end="token_limit") for i in range(2)]
    samples, stats = make_samples([Group(prompt, tuple(cut), 0)], config())
    assert all(s.loss_weights.any() for s in samples)
    assert stats["batch/masked_truncated"] == 0


def test_length_penalty_ignores_tool_text_and_is_never_below_the_factor() -> None:
    """Case 20: limit 16, buffer 4; 6 model + 10 tool tokens cost nothing, 20 model tokens cost the factor."""
    rng, prompt = np.random.default_rng(0), Prompt("p", 0, ())
    episodes = (
        episode(prompt, 0, 1.0, turn(rng, 6), turn(rng, 10, agent=False)),
        episode(prompt, 1, 1.0, turn(rng, 20)),
    )
    cfg = config(
        rollout=Rollout(max_response_len=16),
        reward=RewardCfg(overlong_buffer_cfg=OverlongBuffer(enable=True, len=4, penalty_factor=0.5)),
    )
    samples, stats = make_samples([Group(prompt, episodes, 0)], cfg)
    assert [float(s.advantages.max() + s.advantages.min()) for s in samples] == [0.25, -0.25]
    assert stats["batch/overlong"] == 1
    assert stats["batch/value_mean"] == 0.75


# The cut.


def lengths_of(shares: list) -> list[list[list[int]]]:
    return [[[b.num_tokens for b in mini] for mini in rank] for rank in shares]


def test_tokens_after_the_last_of_the_policy_are_dropped() -> None:
    rng, prompt = np.random.default_rng(0), Prompt("p", 0, ())
    source = episode(prompt, 0, 1.0, turn(rng, 4), turn(rng, 3, agent=False), turn(rng, 2), turn(rng, 9, agent=False))
    [sample], _ = make_samples([Group(prompt, (source,), 0)], config())
    assert len(sample.ids) == 21
    [[[batch]]] = planned([sample], config(), dp=1)
    assert batch.ids_T.tolist() == sample.ids[:12].tolist()
    assert len(batch.targets_R) == 6


def test_a_scored_token_is_predicted_from_the_one_before_it() -> None:
    samples, _ = make_samples(mixed_groups(), config())
    [[[batch]]] = packed(samples, [[[[0, 1, 2]]]], token_multiple=8)
    assert batch.num_tokens % 8 == 0
    assert batch.num_tokens == len(batch.ids_T) == len(batch.positions_T)
    expected = np.concatenate([s.ids[s.response_mask] for s in samples[:3]])
    np.testing.assert_array_equal(batch.targets_R, expected)
    assert torch.equal(batch.ids_T[batch.loss_index_R + 1], batch.targets_R)
    np.testing.assert_array_equal(
        batch.rollout_logps_R, np.concatenate([s.rollout_logps[s.response_mask] for s in samples[:3]])
    )
    starts = torch.tensor(batch.cu_seqlens)[batch.segment_R]
    assert (batch.loss_index_R >= starts).all()
    assert (batch.loss_index_R + 1 < torch.tensor(batch.cu_seqlens)[batch.segment_R + 1]).all()
    assert (batch.segment_R.diff() >= 0).all()


def test_padded_rows_are_of_one_length_that_the_token_multiple_divides() -> None:
    """No odd segment behind the rows: a layer that wants [batch, sequence] gets rows only."""
    samples, _ = make_samples(mixed_groups(), config())
    [[[batch]]] = packed(samples, [[[[0, 1, 2]]]], token_multiple=4, remove_padding=False)
    assert batch.cu_seqlens == (0, 20, 40, 60)
    assert max(len(s.ids) for s in samples[:3]) == 17
    assert torch.equal(batch.ids_T[batch.loss_index_R + 1], batch.targets_R)


def test_a_filler_has_one_scored_token_without_weight() -> None:
    """Case 10."""
    [[[batch]]] = packed([], [[[[]]]], token_multiple=4)
    assert batch.num_tokens == 4
    assert len(batch.targets_R) == 1
    assert (batch.loss_weights_R == 0).all()


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("token_multiple", [1, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_every_micro_batch_keeps_the_cap_and_ranks_keep_step(dp: int, token_multiple: int, *, padded: bool) -> None:
    """Cases 9 and 11, padding included."""
    cfg = config(actor={"ppo_max_token_len": 33, "use_remove_padding": not padded})
    samples, _ = make_samples(mixed_groups(), cfg)
    shares = planned(samples, cfg, dp=dp, token_multiple=token_multiple, micro_multiple=2)
    sizes = lengths_of(shares)
    assert {len(rank[0]) for rank in sizes} == {len(sizes[0][0])}
    assert len(sizes[0][0]) % 2 == 0
    assert max(t for rank in sizes for mini in rank for t in mini) <= 33
    assert all(t % token_multiple == 0 for rank in sizes for mini in rank for t in mini)
    scored = sum(int((b.loss_weights_R > 0).sum()) for rank in shares for mini in rank for b in mini)
    assert scored == sum(int(s.response_mask.sum()) for s in samples)


def test_rounding_up_to_the_token_multiple_stays_within_the_cap() -> None:
    """16 + 17 tokens fit a cap of 33, but not when 33 becomes 36."""
    rng, prompt = np.random.default_rng(0), Prompt("p", 0, ())
    pair = Group(prompt, tuple(episode(prompt, i, float(i), turn(rng, 13 + i)) for i in range(2)), 0)
    cfg = config(actor={"ppo_max_token_len": 33})
    samples, _ = make_samples([pair], cfg)
    assert lengths_of(planned(samples, cfg, dp=1)) == [[[33]]]
    assert sorted(lengths_of(planned(samples, cfg, dp=1, token_multiple=4))[0][0]) == [16, 20]


def test_a_sample_over_the_cap_is_a_user_error_with_its_name() -> None:
    """Case 13: 28 tokens, cap 27; 28 passes."""
    samples, _ = make_samples(mixed_groups(), config())
    with pytest.raises(UserError, match=r"a/3 has 28 tokens"):
        planned(samples, config(actor={"ppo_max_token_len": 27}), dp=1)
    planned(samples, config(actor={"ppo_max_token_len": 28}), dp=1)
    planned(samples, config(actor={"ppo_max_token_len": 27, "over_cap": "alone"}), dp=1)


def test_mini_batches_are_cut_by_groups_and_normalised_each() -> None:
    cfg = config(actor={"ppo_mini_batch_size": 2})
    samples, _ = make_samples(mixed_groups(), cfg)
    shares = planned(samples, cfg, dp=2)
    assert [len(rank) for rank in shares] == [2, 2]
    for mini in range(2):
        total = sum(float(b.loss_weights_R.sum()) for rank in shares for b in rank[mini])
        assert total == pytest.approx(1.0, rel=1e-6)


def test_a_mini_batch_without_loss_is_no_optimizer_step() -> None:
    rng, prompt = np.random.default_rng(0), Prompt("p", 0, ())
    dead = Group(prompt, (episode(prompt, 0, 1.0, turn(rng, 4), valid=False),), 0)
    cfg = config(actor={"ppo_mini_batch_size": 1})
    samples, _ = make_samples([dead, group("a", [0, 1], [3, 3])], cfg)
    assert [len(rank) for rank in planned(samples, cfg, dp=2)] == [1, 1]
    assert planned(samples[:1], cfg, dp=2) == [[], []]


def test_fixed_micro_batches_hold_so_many_samples() -> None:
    cfg = config(actor={"use_dynamic_bsz": False, "ppo_micro_batch_size": 2, "ppo_max_token_len": 1})
    samples, _ = make_samples(mixed_groups(), cfg)
    shares = planned(samples, cfg, dp=2)
    counts = [[len(b.segment_R.unique()) for b in mini] for rank in shares for mini in rank]
    assert [len(c) for c in counts] == [3, 3]
    assert max(n for c in counts for n in c) <= 2


# The cut changes nothing.


class TinyPolicy(torch.nn.Module):
    """Log-probs and entropies from a two-token context: enough that every scored position has gradients of its own."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64))
        self.position = torch.nn.Parameter(torch.randn(64, VOCABULARY, generator=generator, dtype=torch.float64))

    def forward(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        at = batch.loss_index_R
        logits = self.weight[batch.ids_T[at]] + self.position[batch.positions_T[at]]
        logps = logits.log_softmax(-1)
        return logps.gather(1, batch.targets_R[:, None])[:, 0], -(logps.exp() * logps).sum(-1)


def loss_and_gradient(shares: list[list[list[MicroBatch]]], cfg: Config) -> tuple[float, torch.Tensor]:
    """As the trainer has it: a plain sum over ranks and micro-batches."""
    policy, loss_fn, total = TinyPolicy(), make_loss_fn(cfg), 0.0
    for rank in shares:
        for mini in rank:
            for batch in mini:
                logps, entropies = policy(batch)
                old = logps.detach() + 0.3 * torch.sin(batch.targets_R.double() + batch.positions_T[batch.loss_index_R])
                loss, _ = loss_fn(logps, entropies, replace(batch, old_logps_R=old.float()))
                loss.backward()
                total += float(loss.detach())
    return total, torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


CUTS = [
    {"dp": 1, "cap": 1000},
    {"dp": 1, "cap": 30},
    {"dp": 1, "cap": 41},
    {"dp": 2, "cap": 30},
    {"dp": 2, "cap": 1000, "token_multiple": 8},
    {"dp": 3, "cap": 28, "micro_multiple": 4},
    {"dp": 2, "cap": 64, "padded": True},
]


@pytest.mark.parametrize("policy_loss", ["token_clip", "gspo", "gmpo"])
@pytest.mark.parametrize("mode", ["token-mean", "group-token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_loss_and_gradient_do_not_depend_on_the_cut(policy_loss: str, mode: str) -> None:
    """Case 14, for every denominator and loss: any cap, one to three ranks, fillers, packed or padded."""
    keys = {"policy_loss": policy_loss, "loss_agg_mode": mode, "entropy_coef": 0.01}
    found = []
    for cut in CUTS:
        actor = {"ppo_max_token_len": cut["cap"], "use_remove_padding": not cut.get("padded", False)}
        cfg = config(algorithm=keys, actor=actor, rollout=Rollout(max_response_len=32))
        samples, _ = make_samples(mixed_groups(), cfg)
        shares = planned(
            samples,
            cfg,
            dp=cut["dp"],
            token_multiple=cut.get("token_multiple", 1),
            micro_multiple=cut.get("micro_multiple", 1),
        )
        found.append(loss_and_gradient(shares, cfg))
    loss, gradient = found[0]
    assert gradient.abs().max() > 1e-3
    for other_loss, other_gradient in found[1:]:
        assert other_loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
        torch.testing.assert_close(other_gradient, gradient, rtol=1e-5, atol=1e-7 * float(gradient.abs().max()))


@pytest.mark.parametrize(("dp", "cap"), [(1, 1000), (1, 11), (2, 11)])
def test_two_bad_tokens_among_ten_cost_a_fifth_in_every_cut(dp: int, cap: int) -> None:
    """Case 14: sample A has 2 tokens of loss 1, B has 8 of loss 0. 0.2, never 0.5."""

    def sample(uid: str, model_tokens: int, advantage: float) -> Sample:
        mask = np.array([False] * 3 + [True] * model_tokens)
        weights = np.where(mask, 0.1, 0.0).astype(np.float32)
        return Sample(
            uid=uid,
            group=0,
            ids=np.ones(len(mask), np.int32),
            response_mask=mask,
            rollout_logps=np.zeros(len(mask), np.float32),
            versions=np.zeros(len(mask), np.int32),
            advantages=np.where(mask, advantage, 0.0).astype(np.float32),
            loss_weights=weights,
        )

    cfg = config(actor={"ppo_max_token_len": cap})
    shares = planned([sample("A", 2, -1.0), sample("B", 8, 0.0)], cfg, dp=dp)
    total, loss_fn = 0.0, make_loss_fn(cfg)
    for rank in shares:
        for batch in rank[0]:
            logps = torch.full(batch.targets_R.shape, -1.0)
            total += float(loss_fn(logps, torch.zeros_like(logps), batch)[0])
    assert total == pytest.approx(0.2, rel=1e-6)


# Credit by turn.


def test_each_turn_carries_its_share_of_its_own_credit_and_the_rest_of_the_episodes() -> None:
    [plain] = [group("a", [1, 0], [3, 4])]
    values = [(0.0, 0.75), (0.0, 0.0)]
    episodes = tuple(
        replace(e, score=Score(e.score.value, 0.0, before=before))
        for e, before in zip(plain.episodes, values, strict=True)
        if e.score is not None
    )
    samples, _ = make_samples(
        [replace(plain, episodes=episodes)], config(algorithm={"advantage": {"credit": "turn", "turn_share": 0.5}})
    )
    first = samples[0].advantages[samples[0].response_mask]
    # episode: 0.5; turns gained 1.0 and 0.25 against 0 and 0
    np.testing.assert_allclose(first, [0.5] * 3 + [0.5 * 0.5 + 0.5 * 0.125] * 2)
    assert (samples[0].advantages[~samples[0].response_mask] == 0).all()
    np.testing.assert_allclose(samples[1].advantages[samples[1].response_mask], -np.array([0.5] * 4 + [0.3125] * 2))


def test_turns_of_reinforce_plus_plus_count_by_their_tokens() -> None:
    [plain] = [group("a", [1, 0], [3, 4])]
    episodes = tuple(
        replace(e, score=Score(e.score.value, 0.0, before=(0.0, 0.75 * e.score.value)))
        for e in plain.episodes
        if e.score is not None
    )
    algorithm = {"name": "reinforce++", "advantage_estimator": "reinforce++", "advantage": {"credit": "turn"}}
    samples, _ = make_samples([replace(plain, episodes=episodes)], config(algorithm=algorithm))
    credit = np.concatenate([s.advantages[s.response_mask] for s in samples])
    np.testing.assert_allclose([credit.mean(), credit.std()], [0.0, 1.0], atol=1e-5)  # over the tokens of the batch


def test_a_step_may_have_a_cap_of_its_own() -> None:
    cfg = config(actor={"ppo_max_token_len": 20})
    samples, _ = make_samples([group("a", [1, 0, 1, 0], [9, 9, 9, 9])], cfg)
    most = [
        max(batch.num_tokens for mini in micro_batches(share, cfg) for batch in mini)
        for share in (*plan_shares(samples, cfg, dp=1), *plan_shares(samples, cfg, dp=1, max_token_len=40))
    ]
    assert most[0] <= 20 < most[1] <= 40
    with pytest.raises(UserError, match="a micro-batch may have 10"):
        plan_shares(samples, cfg, dp=1, max_token_len=10)
