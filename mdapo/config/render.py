"""A run's plan as an aligned plain-text table."""

from __future__ import annotations

from mdapo.config.memory import Memory
from mdapo.config.model_facts import ModelFacts
from mdapo.config.plan import RunPlan, balance_objective
from mdapo.config.schema import Config

Rows = list[tuple[str, str]]
LEVELLED = {
    "slowest": "so that ranks end a mini-batch together",
    "lockstep": "so that ranks, which wait for each other in every micro-batch, end each together",
}


def render_plan(plan: RunPlan, config: Config, model: ModelFacts | None) -> str:
    """Sections of ``label  value`` lines; notes last."""
    sections: list[tuple[str, Rows]] = [("batch", _batch(plan, config)), ("ranks", _ranks(plan, config))]
    if model is not None:
        sections.append(("model", _model(model, config)))
    if plan.memory is not None:
        sections.append(("memory of the fullest rank (an estimate)", _memory(plan.memory)))
    if plan.notes:
        sections.append(("notes", [("", note) for note in plan.notes]))
    width = max(len(label) for _, rows in sections for label, _ in rows)
    blocks = []
    for title, rows in sections:
        indent = "  " if title == "notes" else f"  {'':{width}}  "
        body = (indent + value if not label else f"  {label:{width}}  {value}" for label, value in rows)
        blocks.append("\n".join([title, *body]))
    return "\n\n".join(blocks)


def _batch(plan: RunPlan, config: Config) -> Rows:
    actor, n = config.actor, config.rollout.n_resp_per_prompt
    prompt, response = config.data.max_prompt_len, config.rollout.max_response_len
    rounds = config.algorithm.filter_groups.max_num_gen_batches if config.algorithm.filter_groups.enable else None
    most = f", at most {rounds} rounds a step" if rounds else ""
    epochs = f" (x {actor.ppo_epochs} epochs)" if actor.ppo_epochs > 1 else ""
    if actor.use_dynamic_bsz:
        cut = f"cut at {actor.ppo_max_token_len:,} tokens"
        least = "each alone" if plan.micro_samples == 1 else f"{plan.micro_samples} or more in each"
    else:
        cut, least = f"{actor.ppo_micro_batch_size} samples each", "not cut by tokens"
    return [
        ("prompts a step", f"{plan.groups} groups x {n} episodes = {plan.samples:,} samples"),
        ("generation", f"{plan.gen_prompts} prompts x {n} = {plan.gen_prompts * n:,} episodes a round{most}"),
        ("optimizer steps", f"{plan.mini_batches} a step{epochs}, of {plan.mini_samples:,} samples"),
        ("a rank's share", f"{plan.rank_samples:,} samples of each optimizer step (data-parallel {plan.dp})"),
        ("longest sample", f"{plan.longest:,} tokens: prompt {prompt:,} + response {response:,}"),
        ("micro-batches", f"{cut}; if all samples were longest: {plan.micro_batches:,} a rank, {least}"),
        *_filter(config),
        ("levelled", f"by FLOPs, {LEVELLED[balance_objective(config)]}"),
        ("whole run", f"{config.run.total_steps:,} steps, {config.run.total_steps * plan.samples:,} samples"),
    ]


def _filter(config: Config) -> Rows:
    """Which groups are kept, where more is asked of them than that they differ, and how their quality is measured."""
    filters, quality, rows = config.algorithm.filter_groups, config.quality, []
    least = []
    if filters.reward_threshold is not None:
        parts = f" (outcome 1 : coherence {filters.coherence_weight:g} : relevance {filters.relevance_weight:g})"
        of = filters.metric + (parts if filters.metric == "combined" else "")
        least.append(f"a mean {of} of at least {filters.reward_threshold:g}")
    if filters.min_coherence_score is not None:
        least.append(f"a mean coherence of at least {filters.min_coherence_score:g}")
    if filters.enable and least:
        rows.append(("groups kept", f"whose outcomes differ, with {' and '.join(least)}"))
    if quality.embeddings == "lexical":
        rows.append(("quality", "coherence and relevance by words alone (lexical)"))
    elif quality.embeddings is not None:
        how = f"{quality.model} at " if quality.model else ""
        where = "" if quality.model else f", on the CPU with {quality.threads} thread{'s' * (quality.threads > 1)}"
        rows.append(("quality", f"coherence and relevance by embeddings of {how}{quality.embeddings}{where}"))
    return rows


def _ranks(plan: RunPlan, config: Config) -> Rows:
    parallel = config.parallel
    world = f"{plan.world:,}" + (" (assumed: the fewest for this layout)" if plan.world_assumed else "")
    layout = f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x data {plan.dp}"
    extras = [
        *([f"virtual pipeline {parallel.virtual_pipeline}"] if parallel.virtual_pipeline > 1 else []),
        *(["sequence parallel"] if parallel.sequence else []),
        *(["distributed optimizer"] if parallel.distributed_optimizer else []),
    ]
    return [("ranks", world), ("layout", ", ".join([layout, *extras])), ("engine", config.rollout.engine)]


def _model(model: ModelFacts, config: Config) -> Rows:
    stages = config.parallel.pipeline * config.parallel.virtual_pipeline
    each = f", {model.layers // stages} a stage" if stages > 1 else ""
    return [
        ("model", f"{model.architecture}, {count(model.parameters)} parameters, trained in {config.model.dtype}"),
        ("shape", f"{model.layers} layers{each}, hidden {model.hidden:,}, feed-forward {model.ffn:,}"),
        ("attention", f"{model.heads} heads, {model.kv_heads} key-value heads of {model.head_dim}"),
        ("vocabulary", f"{model.vocab:,}, {'tied' if model.tied else 'untied'}"),
        ("context", f"{config.model.max_context:,} of {model.max_positions:,} positions"),
    ]


def _memory(memory: Memory) -> Rows:
    rows = [
        ("parameters", memory.parameters),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.activations),
        ("vocabulary", memory.vocabulary),
        ("reference model", memory.reference),
        ("training", memory.training),
        ("+ engine, rank 0", memory.engine),
    ]
    return [(label, f"{size(value):>9}") for label, value in rows if value]


def count(number: int) -> str:
    """8_190_735_360 -> "8.19 B"."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return str(number)


def size(number: int) -> str:
    """Bytes in binary units."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{number / 1024:.1f} KiB"
