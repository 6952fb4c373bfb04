"""Groups -> samples with credit -> a plan -> shares.

Everything that needs to see the whole step happens here, on one rank: advantages, the loss denominators (inside
``Samples``' weights) and the cut. What follows is a plain sum over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mdapo.algorithms.advantages import advantages, spread
from mdapo.algorithms.losses import token_weights
from mdapo.algorithms.overlong import overlong_penalty
from mdapo.algorithms.turn_credit import turn_advantages
from mdapo.config.flops import TOKENS_ONLY, WorkModel
from mdapo.config.lengths import scaled
from mdapo.data.bundles import plan_bundles
from mdapo.data.padded import plan_padded
from mdapo.data.shares import Share, pack_shares, rows_of
from mdapo.data.unfold import unfold
from mdapo.ops.balance import Objective, plan_step, refuse_longer
from mdapo.types import Samples, Turn, end_to_end

if TYPE_CHECKING:
    from mdapo.config.schema import Config
    from mdapo.types import Episode, Group, MicroBatch


def make_samples(
    groups: Sequence[Group], cfg: Config, *, overlong_len: int | None = None
) -> tuple[Samples, dict[str, float]]:
    """One sample an episode, in order, with advantages and loss weights; and what was done, as numbers to log.

    An episode carries loss when it was scored, has a token of the policy, and (with ``algorithm.mask_truncated``) was
    not cut off. The others enter no statistic, no denominator, and have weight 0. The soft overlong penalty is added
    to the value before the advantages, never to the outcome that filters look at; ``overlong_len`` is its buffer, None
    ``reward.overlong_buffer_cfg.len``, at most the budget that an episode began with, at whose end it is full. Weights
    are normalised over each mini-batch of ``actor.ppo_mini_batch_size`` groups.
    """
    algorithm = cfg.algorithm
    assert algorithm.advantage_estimator is not None and algorithm.loss_agg_mode is not None
    episodes = [(g, episode) for g, group in enumerate(groups) for episode in group.episodes]
    group_N = np.array([g for g, _ in episodes], np.int64)
    samples = _uncredited([e for _, e in episodes], group_N)
    mask_P, lengths_N, tokens_N = samples.fields["response_mask"], samples.lengths_N, samples.model_tokens_N
    scored_N = np.array([e.score is not None and e.score.valid for _, e in episodes], bool)
    cut_N = np.array([e.truncated for _, e in episodes], bool) & algorithm.mask_truncated
    carries_N = scored_N & ~cut_N & (tokens_N > 0)
    penalty_N = _penalties(tokens_N, [group.length_scale for group in groups], group_N, cfg, overlong_len)
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
    advantages_P = spread(advantage_N, mask_P, lengths_N, gamma=algorithm.gamma)
    if algorithm.advantage.credit == "turn":
        share = algorithm.advantage.turn_share
        own_P = _turn_credit([e for _, e in episodes], value_N, group_N, carries_N, cfg)
        advantages_P = np.where(mask_P, (1.0 - share) * advantages_P + share * own_P, 0.0).astype(np.float32)
    weights_P = np.where(mask_P, np.repeat(weight_N, lengths_N), 0.0).astype(np.float32)
    samples = replace(samples, fields={**samples.fields, "advantages": advantages_P, "loss_weights": weights_P})
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
    samples: Samples,
    cfg: Config,
    *,
    dp: int,
    work: WorkModel = TOKENS_ONLY,
    token_multiple: int = 1,
    micro_multiple: int = 1,
    at_least: int = 1,
    objective: Objective = "slowest",
    max_token_len: int | None = None,
) -> list[Share]:
    """A share for each data-parallel rank: equal numbers of micro-batches on all ranks in every mini-batch.

    Samples without weight are left out, and so is a mini-batch that has no others. ``work`` is what samples cost.
    ``token_multiple`` rounds each micro-batch's tokens up (sequence parallelism), ``micro_multiple`` their number
    (virtual pipelines), which is ``at_least`` so many where samples suffice (pipelines); ``objective`` as `plan_step`
    has it. A micro-batch never exceeds ``max_token_len`` tokens (None: ``actor.ppo_max_token_len``), padding included.
    Raises ``UserError`` for a longer sample unless ``actor.over_cap`` is ``alone``.
    """
    rows, actor = rows_of(samples), cfg.actor
    own = np.flatnonzero(rows.trains_N)
    starts_N, tokens_N, scored_N = rows.starts_N[own], rows.lengths_N[own], rows.scored_N[own]
    group_N = samples.group_N[own]
    mini_N = np.unique(group_N // mini_batch_groups(cfg), return_inverse=True)[1]
    cap = (max_token_len or actor.ppo_max_token_len) // token_multiple * token_multiple  # rounding up must not pass it
    if actor.use_dynamic_bsz and actor.over_cap == "error":
        longer = own[tokens_N > cap]
        refuse_longer(rows.lengths_N[longer], cap, [samples.uids[i] for i in longer.tolist()])
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


def _uncredited(episodes: Sequence[Episode], group_N: np.ndarray) -> Samples:
    """The episodes' tokens: prompts and turns end to end, copied once."""
    pieces = [piece for episode in episodes for piece in (_as_turn(episode.prompt_ids), *episode.turns)]
    sizes = np.array([len(piece.ids) for piece in pieces], np.int64)
    edges = np.append(0, sizes.cumsum())[np.append(0, np.cumsum([1 + len(e.turns) for e in episodes], dtype=np.int64))]
    mask_P = end_to_end([piece.mask for piece in pieces], np.bool_)
    logps_P = end_to_end([piece.logps for piece in pieces], np.float32)
    runs = np.array([run for piece in pieces for run in piece.runs], np.int64).reshape(-1, 2)
    versions_P = np.repeat(runs[:, 0].astype(np.int32), runs[:, 1])
    fields = {
        "ids": end_to_end([piece.ids for piece in pieces], np.int32),
        "response_mask": mask_P,
        "rollout_logps": np.where(mask_P, logps_P, np.float32(0)),
        "versions": np.where(mask_P, versions_P, np.int32(-1)),
    }
    return Samples([f"{e.prompt.uid}/{e.index}" for e in episodes], group_N, np.diff(edges), fields)


def _as_turn(prompt_ids: np.ndarray) -> Turn:
    nothing = np.zeros(len(prompt_ids), np.float32)
    return Turn("user", prompt_ids, nothing.astype(bool), nothing)


def _turn_credit(
    episodes: Sequence[Episode], value_N: np.ndarray, group_N: np.ndarray, carries_N: np.ndarray, cfg: Config
) -> np.ndarray:
    """The advantage of each agent turn on its tokens, float64 [P], 0 on all others."""
    before = []
    for episode in episodes:
        known = episode.score.before if episode.score is not None else ()
        assert len(known) in (0, episode.num_agent_turns), f"{episode.prompt.uid}: a value before each turn"
        before.append(known or (0.0,) * episode.num_agent_turns)
    estimator = cfg.algorithm.advantage_estimator
    assert estimator is not None
    tokens = [[int(t.mask.sum()) for t in episode.turns if t.role == "assistant"] for episode in episodes]
    found = turn_advantages(
        value_N,
        before,
        group_N,
        estimator=estimator,
        turn_gamma=cfg.algorithm.advantage.turn_gamma,
        valid_N=carries_N,
        tokens=tokens,
    )
    sizes, values = [], []
    for episode, own in zip(episodes, found, strict=True):
        agent = iter(own.tolist())
        sizes += [len(episode.prompt_ids), *(len(turn.ids) for turn in episode.turns)]
        values += [0.0, *(next(agent) if turn.role == "assistant" else 0.0 for turn in episode.turns)]
    return np.repeat(np.array(values), sizes)


def _penalties(
    tokens_N: np.ndarray, scales: Sequence[float], group_N: np.ndarray, cfg: Config, overlong_len: int | None
) -> np.ndarray:
    """The overlong penalty of each episode, float64 [N]. ``scales``: of the budgets of each group."""
    buffer = cfg.reward.overlong_buffer_cfg
    if not buffer.enable:
        return np.zeros(len(tokens_N))
    wanted = buffer.len if overlong_len is None else overlong_len
    assert wanted != "auto", "who has collected a step knows how long its dialogues are"
    found = []
    for tokens, group in zip(tokens_N.tolist(), group_N.tolist(), strict=True):
        budget = scaled(cfg.rollout.max_response_len, scales[group])
        room = min(wanted, budget)
        found.append(overlong_penalty(tokens, max_response_len=budget, buffer_len=room, factor=buffer.penalty_factor))
    return np.array(found, np.float64)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0
