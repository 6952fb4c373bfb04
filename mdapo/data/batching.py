"""Groups -> samples with credit -> a plan -> shares.

Everything that needs to see the whole step happens here, on one rank: advantages, the loss denominators (inside
``Sample.loss_weights``) and the cut. What follows is a plain sum over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mdapo.algorithms.advantages import advantages, spread, turn_advantages
from mdapo.algorithms.losses import token_weights
from mdapo.algorithms.overlong import overlong_penalty
from mdapo.config.flops import TOKENS_ONLY, WorkModel
from mdapo.data.bundles import plan_bundles
from mdapo.data.padded import plan_padded
from mdapo.data.shares import Share, pack_shares, rows_of
from mdapo.data.unfold import unfold
from mdapo.ops.balance import Objective, plan_step, refuse_longer
from mdapo.types import Sample

if TYPE_CHECKING:
    from mdapo.config.schema import Algorithm, Config
    from mdapo.types import Episode, Group, MicroBatch


def make_samples(groups: Sequence[Group], cfg: Config) -> tuple[list[Sample], dict[str, float]]:
    """One sample an episode, in order, with advantages and loss weights; and what was done, as numbers to log.

    An episode carries loss when it was scored, has a token of the policy, and (with ``algorithm.mask_truncated``) was
    not cut off. The others enter no statistic, no denominator, and have weight 0. The soft overlong penalty is added
    to the value before the advantages, never to the outcome that filters look at. Weights are normalised over each
    mini-batch of ``actor.ppo_mini_batch_size`` groups.
    """
    algorithm = cfg.algorithm
    assert algorithm.advantage_estimator is not None and algorithm.loss_agg_mode is not None
    episodes = [(g, episode) for g, group in enumerate(groups) for episode in group.episodes]
    group_N = np.array([g for g, _ in episodes], np.int64)
    tokens_N = np.array([e.num_model_tokens for _, e in episodes], np.int64)
    scored_N = np.array([e.score is not None and e.score.valid for _, e in episodes], bool)
    cut_N = np.array([e.truncated for _, e in episodes], bool) & algorithm.mask_truncated
    carries_N = scored_N & ~cut_N & (tokens_N > 0)
    penalty_N = np.array([_penalty(e, cfg) for _, e in episodes], np.float64)
    value_N = np.array([e.score.value if e.score is not None else 0.0 for _, e in episodes], np.float64) + penalty_N
    advantage_N = advantages(
        value_N, group_N, estimator=algorithm.advantage_estimator, valid_N=carries_N, tokens_N=tokens_N
    )
    credit_NT = _turn_credit([e for _, e in episodes], value_N, group_N, carries_N, cfg)
    weight_N = np.zeros(len(episodes))
    mini_N = group_N // mini_batch_groups(cfg)
    for mini in np.unique(mini_N):
        members = mini_N == mini
        weight_N[members] = token_weights(
            np.where(carries_N, tokens_N, 0)[members],
            group_N[members],
            mode=algorithm.loss_agg_mode,
            max_response_len=cfg.rollout.max_response_len,
        )
    samples = [
        _sample(
            episode,
            group=g,
            advantage=float(advantage_N[i]),
            turns=credit_NT[i],
            weight=float(weight_N[i]),
            algorithm=algorithm,
        )
        for i, (g, episode) in enumerate(episodes)
    ]
    carried = advantage_N[carries_N]
    stats = {
        "batch/samples": float(len(samples)),
        "batch/samples_trained": float(carries_N.sum()),
        "batch/masked_invalid": float((~scored_N).sum()),
        "batch/masked_truncated": float((cut_N & scored_N).sum()),
        "batch/without_model_tokens": float((tokens_N == 0).sum()),
        "batch/model_tokens": float(tokens_N[carries_N].sum()),
        "batch/overlong": float((penalty_N < 0).sum()),
        "batch/overlong_penalty_mean": _mean(penalty_N[carries_N]),
        "batch/value_mean": _mean(value_N[carries_N]),
        "batch/advantage_abs_mean": _mean(np.abs(carried)),
        "batch/advantage_max": float(carried.max(initial=0.0)),
        "batch/advantage_min": float(carried.min(initial=0.0)),
    }
    return samples, stats


def mini_batch_groups(cfg: Config) -> int:
    """Groups of one optimizer step."""
    return cfg.actor.ppo_mini_batch_size or cfg.data.train_prompt_bsz


def plan_shares(
    samples: Sequence[Sample],
    cfg: Config,
    *,
    dp: int,
    work: WorkModel = TOKENS_ONLY,
    token_multiple: int = 1,
    micro_multiple: int = 1,
    at_least: int = 1,
    objective: Objective = "slowest",
) -> list[Share]:
    """A share for each data-parallel rank: equal numbers of micro-batches on all ranks in every mini-batch.

    Samples without weight are left out, and so is a mini-batch that has no others. ``work`` is what samples cost.
    ``token_multiple`` rounds each micro-batch's tokens up (sequence parallelism), ``micro_multiple`` their number
    (virtual pipelines), which is ``at_least`` so many where samples suffice (pipelines); ``objective`` as `plan_step`
    has it. A micro-batch never exceeds ``actor.ppo_max_token_len`` tokens, padding included. Raises ``UserError`` for a
    longer sample unless ``actor.over_cap`` is ``alone``.
    """
    rows, actor = rows_of(samples), cfg.actor
    own = np.flatnonzero(rows.trains_N)
    starts_N, tokens_N, scored_N = rows.starts_N[own], rows.lengths_N[own], rows.scored_N[own]
    group_N = np.array([sample.group for sample in samples], np.int64)[own]
    mini_N = np.unique(group_N // mini_batch_groups(cfg), return_inverse=True)[1]
    cap = actor.ppo_max_token_len // token_multiple * token_multiple  # rounding up must not pass it
    if actor.use_dynamic_bsz and actor.over_cap == "error":
        longer = own[tokens_N > cap]
        refuse_longer(rows.lengths_N[longer], cap, [samples[i].uid for i in longer.tolist()])
    shape: dict[str, Any] = {"dp": dp, "multiple": micro_multiple, "at_least": at_least, "objective": objective}
    if not actor.use_dynamic_bsz:
        costs_N = work.of(tokens_N, scored_N)
        plan = plan_step(tokens_N, costs_N=costs_N, mini_N=mini_N, rows=actor.ppo_micro_batch_size, **shape)
    elif not actor.use_remove_padding:
        rounded_N = -(-tokens_N // token_multiple) * token_multiple
        plan = plan_padded(rounded_N, scored_N, mini_N, cap=cap, work=work, **shape)
    elif shares_prefix(cfg):
        ids_P = rows.fields["ids"]
        plan = plan_bundles(ids_P, starts_N, tokens_N, scored_N, group_N, mini_N, cap=cap, work=work, **shape)
    else:
        costs_N = work.of(tokens_N, scored_N)
        plan = plan_step(tokens_N, costs_N=costs_N, mini_N=mini_N, cap=cap, over_cap="alone", **shape)
    groups = (own[group].tolist() for group in plan.groups)
    return pack_shares(rows, [[[next(groups) for _ in range(count)] for count in plan.counts_M] for _ in range(dp)])


def micro_batches(share: Share, cfg: Config, *, token_multiple: int = 1) -> list[list[MicroBatch]]:
    """``[mini-batch][micro-batch]`` of a share, laid out as `plan_shares` counted its tokens."""
    return unfold(
        share,
        token_multiple=token_multiple,
        remove_padding=cfg.actor.use_remove_padding,
        share_prefix=shares_prefix(cfg),
    )


def shares_prefix(cfg: Config) -> bool:
    """Whether ``actor.share_prefix`` is on; ``auto`` is on wherever micro-batches are packed by tokens."""
    wanted, possible = cfg.actor.share_prefix, cfg.actor.use_remove_padding and cfg.actor.use_dynamic_bsz
    return possible if wanted == "auto" else wanted


def _turn_credit(
    episodes: Sequence[Episode], value_N: np.ndarray, group_N: np.ndarray, carries_N: np.ndarray, cfg: Config
) -> list[np.ndarray]:
    """Advantage of every agent turn, by episode; of none where turns get no credit of their own."""
    if not cfg.algorithm.turn_credit:
        return [np.zeros(0, np.float32)] * len(episodes)
    before = []
    for episode in episodes:
        known = episode.score.before if episode.score is not None else ()
        assert len(known) in (0, episode.num_agent_turns), f"{episode.prompt.uid}: a value before each turn"
        before.append(known or (0.0,) * episode.num_agent_turns)
    estimator = cfg.algorithm.advantage_estimator
    assert estimator is not None
    tokens = [[int(t.mask.sum()) for t in episode.turns if t.role == "assistant"] for episode in episodes]
    return turn_advantages(value_N, before, group_N, estimator=estimator, valid_N=carries_N, tokens=tokens)


def _sample(
    episode: Episode, *, group: int, advantage: float, turns: np.ndarray, weight: float, algorithm: Algorithm
) -> Sample:
    mask = episode.response_mask
    advantages_L = spread(advantage, mask, gamma=algorithm.gamma)
    if len(turns):
        lengths = [len(t.ids) for t in episode.turns]
        agent = np.cumsum([t.role == "assistant" for t in episode.turns]) - 1
        own_L = np.concatenate([np.zeros(len(episode.prompt_ids)), np.repeat(turns[agent], lengths)])
        share = algorithm.turn_credit
        advantages_L = np.where(mask, (1.0 - share) * advantages_L + share * own_L, 0.0).astype(np.float32)
    return Sample(
        uid=f"{episode.prompt.uid}/{episode.index}",
        group=group,
        ids=episode.ids,
        response_mask=mask,
        rollout_logps=episode.rollout_logps,
        versions=episode.versions,
        advantages=advantages_L,
        loss_weights=np.where(mask, weight, 0.0).astype(np.float32),
    )


def _penalty(episode: Episode, cfg: Config) -> float:
    buffer = cfg.reward.overlong_buffer_cfg
    if not buffer.enable:
        return 0.0
    return overlong_penalty(
        episode.num_model_tokens,
        max_response_len=cfg.rollout.max_response_len,
        buffer_len=buffer.len,
        factor=buffer.penalty_factor,
    )


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0
