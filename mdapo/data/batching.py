"""Groups -> samples with credit -> a plan -> packed micro-batches.

Everything that needs to see the whole step happens here, on one rank: advantages, the loss denominators (inside
``Sample.loss_weights``) and the cut. What follows is a plain sum over micro-batches and ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from mdapo.algorithms.advantages import advantages, spread, turn_advantages
from mdapo.algorithms.losses import token_weights
from mdapo.algorithms.overlong import overlong_penalty
from mdapo.data.prefix_tree import prefix_tree, share_prefixes
from mdapo.ops.balance import Plan, plan_fixed, plan_micro_batches, token_cost
from mdapo.ops.pack import pack
from mdapo.types import MicroBatch, Sample

if TYPE_CHECKING:
    from mdapo.config.schema import Algorithm, Config
    from mdapo.types import Episode, Group

FILLER_TOKENS = 2  # a sequence needs one token to read and one to score


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
    samples: Sequence[Sample], cfg: Config, *, dp: int, token_multiple: int = 1, micro_multiple: int = 1
) -> list[list[list[MicroBatch]]]:
    """``[dp rank][mini-batch][micro-batch]``: equal numbers of micro-batches on all ranks in every mini-batch.

    Samples without weight are left out, and so is a mini-batch that has no others. ``token_multiple`` rounds each
    micro-batch's tokens up (sequence parallelism), ``micro_multiple`` their number (virtual pipelines). A micro-batch
    never exceeds ``actor.ppo_max_token_len`` tokens, padding included. Raises ``UserError`` for a longer sample
    unless ``actor.over_cap`` is ``alone``.
    """
    shares: list[list[list[MicroBatch]]] = [[] for _ in range(dp)]
    by_mini: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.loss_weights.any():
            by_mini.setdefault(sample.group // mini_batch_groups(cfg), []).append(trim(sample))
    for mini in sorted(by_mini):
        members = by_mini[mini]
        plan = _plan(members, cfg, dp=dp, token_multiple=token_multiple, micro_multiple=micro_multiple)
        for rank, micro_batches in enumerate(plan.ranks):
            shares[rank].append(
                [
                    pack_micro_batch(
                        [members[i] for i in chosen],
                        token_multiple=token_multiple,
                        remove_padding=cfg.actor.use_remove_padding,
                        share_prefix=shares_prefix(cfg),
                    )
                    for chosen in micro_batches
                ]
            )
    return shares


def trim(sample: Sample) -> Sample:
    """The sample up to its last token of the policy; what follows is never predicted and predicts nothing scored."""
    end = int(np.flatnonzero(sample.response_mask)[-1]) + 1
    if end == len(sample.ids):
        return sample
    return Sample(
        uid=sample.uid,
        group=sample.group,
        ids=sample.ids[:end],
        response_mask=sample.response_mask[:end],
        rollout_logps=sample.rollout_logps[:end],
        versions=sample.versions[:end],
        advantages=sample.advantages[:end],
        loss_weights=sample.loss_weights[:end],
    )


def pack_micro_batch(
    samples: Sequence[Sample], *, token_multiple: int = 1, remove_padding: bool = True, share_prefix: bool = False
) -> MicroBatch:
    """One micro-batch of ``samples``; of none, a filler: a sequence of zeros whose one scored token has weight 0.

    A token at position p of its sequence is scored at p - 1. With ``remove_padding`` off each row is padded to the
    longest, rounded up (the result is still in packed form, for one code path; padding comes after all scored tokens
    and is never scored). With ``share_prefix`` common beginnings are laid out once.
    """
    rows = {
        "ids": [s.ids for s in samples],
        "mask": [s.response_mask for s in samples],
        "advantages": [s.advantages for s in samples],
        "weights": [s.loss_weights for s in samples],
        "rollout_logps": [s.rollout_logps for s in samples],
    }
    if not samples:
        rows = _filler_rows()
    row_len = None if remove_padding else _round_up(max(len(ids) for ids in rows["ids"]), token_multiple)
    packed = pack(rows, multiple=1 if share_prefix else token_multiple, row_len=row_len)
    scored_R = np.flatnonzero(packed.fields["mask"])
    assert len(scored_R) and packed.positions_T[scored_R].all(), "a scored token needs one before it"

    def of_scored(name: str) -> torch.Tensor:
        return torch.from_numpy(packed.fields[name][scored_R].astype(np.float32))

    ids_T = packed.fields["ids"].astype(np.int64)
    unshared = MicroBatch(
        ids_T=torch.from_numpy(ids_T),
        positions_T=torch.from_numpy(packed.positions_T),
        cu_seqlens=packed.cu_seqlens,
        loss_index_R=torch.from_numpy(scored_R - 1),
        targets_R=torch.from_numpy(ids_T[scored_R]),
        segment_R=torch.from_numpy(np.searchsorted(packed.cu_seqlens, scored_R, side="right") - 1),
        advantages_R=of_scored("advantages"),
        loss_weights_R=of_scored("weights"),
        rollout_logps_R=of_scored("rollout_logps"),
    )
    return share_prefixes(unshared, rows["ids"], multiple=token_multiple) if share_prefix else unshared


def _plan(samples: Sequence[Sample], cfg: Config, *, dp: int, token_multiple: int, micro_multiple: int) -> Plan:
    lengths = [len(s.ids) for s in samples]
    if not cfg.actor.use_remove_padding:
        lengths = [_round_up(length, token_multiple) for length in lengths]
    if not cfg.actor.use_dynamic_bsz:
        return plan_fixed(lengths, dp=dp, size=cfg.actor.ppo_micro_batch_size, multiple=micro_multiple)

    def plan(lengths: Sequence[int]) -> Plan:
        return plan_micro_batches(
            lengths,
            dp=dp,
            cap=cfg.actor.ppo_max_token_len // token_multiple * token_multiple,  # rounding up must not pass it
            multiple=micro_multiple,
            padded=not cfg.actor.use_remove_padding,
            over_cap=cfg.actor.over_cap,
            names=[s.uid for s in samples],
        )

    best = plan(lengths)
    if not shares_prefix(cfg):
        return best
    lowest = _slowest(best, lengths)
    largest = max(Counter(s.group for s in samples).values())
    for parts in (2**k for k in range(largest.bit_length())):  # a group whole, in halves, in quarters, ...
        bundles = _bundles(samples, parts)
        tokens = [len(prefix_tree([samples[i].ids for i in bundle]).source_T) for bundle in bundles]
        if max(tokens) > cfg.actor.ppo_max_token_len // token_multiple * token_multiple:
            continue
        found = plan(tokens)
        if _slowest(found, tokens) < lowest:
            lowest, best = _slowest(found, tokens), _unbundled(found, bundles)
    return best


def shares_prefix(cfg: Config) -> bool:
    """Whether ``actor.share_prefix`` is on; ``auto`` is on wherever micro-batches are packed by tokens."""
    wanted, possible = cfg.actor.share_prefix, cfg.actor.use_remove_padding and cfg.actor.use_dynamic_bsz
    return possible if wanted == "auto" else wanted


def _bundles(samples: Sequence[Sample], parts: int) -> list[list[int]]:
    """Each group in so many parts of consecutive samples, which stay together."""
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(index)
    cut = (np.array_split(members, min(parts, len(members))) for members in groups.values())
    return [[int(i) for i in part] for group in cut for part in group]


def _unbundled(plan: Plan, bundles: Sequence[Sequence[int]]) -> Plan:
    return Plan(
        tuple(
            tuple(tuple(sorted(i for bundle in micro for i in bundles[bundle])) for micro in rank)
            for rank in plan.ranks
        )
    )


def _slowest(plan: Plan, lengths: Sequence[int]) -> float:
    """Work of the rank that has most of it."""
    costs = token_cost(lengths)
    return max(float(sum(costs[i] for micro in rank for i in micro)) for rank in plan.ranks)


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


def _filler_rows() -> dict[str, list[np.ndarray]]:
    zeros = np.zeros(FILLER_TOKENS, np.float32)
    return {
        "ids": [np.zeros(FILLER_TOKENS, np.int32)],
        "mask": [np.arange(FILLER_TOKENS) == FILLER_TOKENS - 1],
        "advantages": [zeros],
        "weights": [zeros],
        "rollout_logps": [zeros],
    }


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0
