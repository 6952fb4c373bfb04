"""Groups -> samples with credit -> a plan -> packed micro-batches.

Everything that needs to see the whole step happens here, on one rank: advantages, the loss denominators (inside
``Sample.loss_weights``) and the cut. What follows is a plain sum over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mdapo.algorithms.advantages import advantages, spread
from mdapo.algorithms.losses import token_weights
from mdapo.algorithms.overlong import overlong_penalty
from mdapo.data.shares import Share, pack_shares, rows_of
from mdapo.ops.balance import Plan, plan_fixed, plan_micro_batches
from mdapo.types import Sample

if TYPE_CHECKING:
    from mdapo.config.schema import Config
    from mdapo.types import Episode, Group


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
        _sample(episode, group=g, advantage=float(advantage_N[i]), weight=float(weight_N[i]), gamma=algorithm.gamma)
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
    samples: Sequence[Sample], cfg: Config, *, dp: int, token_multiple: int = 1, micro_multiple: int = 1
) -> list[Share]:
    """A share for each data-parallel rank: equal numbers of micro-batches on all ranks in every mini-batch.

    Samples without weight are left out, and so is a mini-batch that has no others. ``token_multiple`` rounds each
    micro-batch's tokens up (sequence parallelism), ``micro_multiple`` their number (virtual pipelines). A micro-batch
    never exceeds ``actor.ppo_max_token_len`` tokens, padding included. Raises ``UserError`` for a longer sample
    unless ``actor.over_cap`` is ``alone``.
    """
    rows = rows_of(samples)
    trains = np.flatnonzero(rows.trains_N)
    mini_of = np.array([sample.group for sample in samples], np.int64)[trains] // mini_batch_groups(cfg)
    by_rank: list[list[list[list[int]]]] = [[] for _ in range(dp)]
    for mini in np.unique(mini_of):
        members = trains[mini_of == mini].tolist()
        plan = _plan(
            rows.lengths_N[members],
            [samples[i].uid for i in members],
            cfg,
            dp=dp,
            token_multiple=token_multiple,
            micro_multiple=micro_multiple,
        )
        for rank, micro in zip(by_rank, plan.ranks, strict=True):
            rank.append([[members[i] for i in chosen] for chosen in micro])
    return pack_shares(rows, by_rank, token_multiple=token_multiple, remove_padding=cfg.actor.use_remove_padding)


def _plan(
    lengths: np.ndarray, names: Sequence[str], cfg: Config, *, dp: int, token_multiple: int, micro_multiple: int
) -> Plan:
    if not cfg.actor.use_remove_padding:
        lengths = -(-lengths // token_multiple) * token_multiple
    if not cfg.actor.use_dynamic_bsz:
        return plan_fixed(lengths, dp=dp, size=cfg.actor.ppo_micro_batch_size, multiple=micro_multiple)
    return plan_micro_batches(
        lengths,
        dp=dp,
        cap=cfg.actor.ppo_max_token_len // token_multiple * token_multiple,  # rounding up must not pass it
        multiple=micro_multiple,
        padded=not cfg.actor.use_remove_padding,
        over_cap=cfg.actor.over_cap,
        names=names,
    )


def _sample(episode: Episode, *, group: int, advantage: float, weight: float, gamma: float) -> Sample:
    mask = episode.response_mask
    return Sample(
        uid=f"{episode.prompt.uid}/{episode.index}",
        group=group,
        ids=episode.ids,
        response_mask=mask,
        rollout_logps=episode.rollout_logps,
        versions=episode.versions,
        advantages=spread(advantage, mask, gamma=gamma),
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
