"""The numbers of one step, under the names of ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mdapo.algorithms.losses import COUNTS, FINAL, MAXIMUM, means
from mdapo.tracking.metrics import summary

if TYPE_CHECKING:
    from mdapo.megatron.actor import UpdateStats
    from mdapo.rollout.dynamic_batch import Collected
    from mdapo.trainer.flow import Trainer
    from mdapo.types import Group


@dataclass
class StepRecord:
    """``groups`` is what was trained on (rank 0 only)."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    groups: Sequence[Group] = ()


def make_record(
    t: Trainer, collected: Collected | None, credit: Mapping[str, float], updates: Sequence[UpdateStats]
) -> StepRecord:
    """Close the step's books: prompts trained are committed, numbers joined; timers start over."""
    synced = t.synced if updates else {}
    t.state.updates += sum(not update.skipped for update in updates)
    numbers = {**credit, **actor_metrics(updates), **synced, **t.timers.pop(), "version": t.state.version}
    numbers["actor/updates_total"] = t.state.updates
    record = StepRecord(t.state.step, metrics=numbers)
    if collected is not None:
        assert t.rollout is not None
        t.rollout.trained(collected)
        record.groups = collected.groups
        record.metrics |= {**collected.stats, **group_metrics(collected.groups)}
        if "rollout/reward_mean" in collected.stats:  # over everything generated, before the filter
            record.metrics["reward/mean"] = collected.stats["rollout/reward_mean"]
            record.metrics["reward/outcome"] = collected.stats["rollout/outcome_mean"]
    t.state.exhausted = t.agree({"exhausted": collected is not None and collected.exhausted})["exhausted"]
    return record


def actor_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """``actor/...`` over the step's optimizer steps: token means over all tokens, loss terms as their mean, maxima."""
    if not updates:
        return {"actor/updates": 0}
    totals: dict[str, float] = {}
    for name in updates[0].metrics:
        values = [update.metrics[name] for update in updates]
        totals[name] = max(values) if name.endswith(MAXIMUM) else sum(values)
    found = means(totals)
    found |= {name: found[name] / len(updates) for name in (FINAL - COUNTS) & found.keys()}
    found["loss"] = sum(update.loss for update in updates) / len(updates)
    found["grad_norm"] = sum(update.grad_norm for update in updates) / len(updates)
    found |= {"lr": updates[-1].lr, "updates": len(updates), "skipped": sum(update.skipped for update in updates)}
    return {f"actor/{name}": value for name, value in found.items()}


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """``trained/...``, ``length/...`` over the episodes that were trained on (those that the filter kept)."""
    episodes = [episode for group in groups for episode in group.episodes]
    scores = [episode.score for episode in episodes if episode.score is not None and episode.score.valid]
    found = summary("trained/reward", [s.value for s in scores])
    found |= summary("trained/outcome", [s.outcome for s in scores])
    if scores:
        for name in scores[0].parts:
            found[f"trained/parts/{name}"] = sum(s.parts.get(name, 0.0) for s in scores) / len(scores)
    found |= summary("length/response", [episode.num_model_tokens for episode in episodes])
    found |= summary("length/total", [len(episode.ids) for episode in episodes])
    found |= summary("length/turns", [episode.num_agent_turns for episode in episodes])
    if episodes:
        found["length/truncated"] = sum(episode.truncated for episode in episodes) / len(episodes)
    return found


def first_step_health(metrics: Mapping[str, float]) -> str:
    """The line that says whether rollout and actor speak of the same model (before anything was learned)."""
    wanted = {
        "log-prob gap": "actor/rollout_logp_gap",
        "largest": "actor/rollout_logp_gap_max",
        "KL(engine, actor)": "actor/rollout_kl",
        "ratio": "actor/ratio",
        "clipped low": "actor/clip_low",
        "clipped high": "actor/clip_high",
    }
    shown = [f"{label} {metrics[name]:.3g}" for label, name in wanted.items() if name in metrics]
    return "first step: " + (", ".join(shown) or "no update")
