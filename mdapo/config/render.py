"""A run's plan as an aligned plain-text table."""

from __future__ import annotations

from mdapo.config.lengths import scaled, token_len
from mdapo.config.memory import SHARE, Memory
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
    prompt = config.data.max_prompt_len
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
        ("longest sample", f"{plan.longest:,} tokens: prompt {prompt:,} + response {plan.longest - prompt:,}"),
        ("micro-batches", f"{cut}; if all samples were longest: {plan.micro_batches:,} a rank, {least}"),
        *_adaptive(plan, config),
        ("levelled", f"by FLOPs, {LEVELLED[balance_objective(config)]}"),
        ("whole run", f"{config.run.total_steps:,} steps, {config.run.total_steps * plan.samples:,} samples"),
    ]


def _adaptive(plan: RunPlan, config: Config) -> Rows:
    """What lengths adapt to, and what they end at."""
    adaptive, rollout = config.rollout.adaptive_lengths, config.rollout
    if not adaptive.enable:
        return []
    scales = (adaptive.shorter, 1.0, adaptive.longer)
    responses = " / ".join(f"{scaled(rollout.max_response_len, scale):,}" for scale in scales)
    tokens = " / ".join(f"{token_len(config, scale, memory_cap=plan.token_cap):,}" for scale in scales)
    most = adaptive.max_token_len
    why = f"rollout.adaptive_lengths.max_token_len={most:,}" if most is not None else "as memory is not known here, any"
    if most is None and plan.token_cap is not None:
        why = f"{plan.token_cap:,} by an estimate of memory, of which {SHARE:.0%} may be filled"
    turns = f"below {adaptive.turns_below:g} / else / above {adaptive.turns_above:g} turns on average"
    return [
        ("adaptive lengths", f"responses {responses}, micro-batches {tokens} tokens, {turns}"),
        ("hard cap", f"micro-batches: {why}; a conversation: model.max_context={config.model.max_context:,}"),
    ]


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
