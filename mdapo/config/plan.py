"""The arithmetic of a run before it starts: prompts -> samples -> mini-batches -> micro-batches -> ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mdapo.config.lengths import largest_scale, longest_sequence, token_len
from mdapo.config.load import Loaded
from mdapo.config.memory import SHARE, Memory, estimate, largest_micro_batch
from mdapo.config.model_facts import ModelFacts, read_model, tokenizer_problems
from mdapo.config.paths import why_no_file, why_no_folder
from mdapo.config.placement import rank_problems, server_python_problems
from mdapo.config.problems import Problem, either, lines
from mdapo.config.rules import MOST_GROUPS
from mdapo.config.schema import Config
from mdapo.errors import UserError

PACKAGE = Path(__file__).resolve().parent.parent
SCENARIOS = PACKAGE / "environments" / "scenarios"


@dataclass(frozen=True)
class RunPlan:
    """Numbers of one step. ``longest`` tokens of the longest sample there can be; counts of micro-batches are for a
    batch in which every sample is that long, hence upper bounds. ``world_assumed``: no number of ranks was given."""

    world: int
    world_assumed: bool
    dp: int
    groups: int
    samples: int
    gen_prompts: int
    mini_batches: int  # optimizer steps
    mini_samples: int
    rank_samples: int  # of a mini-batch
    longest: int
    micro_samples: int  # at least so many fit in a micro-batch
    micro_batches: int  # of a mini-batch on one rank
    memory: Memory | None
    token_cap: int | None  # tokens of the largest micro-batch that memory allows; None: not known, or not asked
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]


def plan(
    config: Config,
    *,
    world_size: int | None,
    model: ModelFacts | None,
    device_bytes: Callable[[int], int] | None = None,
) -> RunPlan:
    """Pure arithmetic. Without ``world_size``, the smallest number of ranks that the layout allows; without ``model``,
    nothing that depends on its shape. ``device_bytes``: memory for each of so many ranks, which adaptive lengths end
    at; None: it is not known here."""
    parallel, actor = config.parallel, config.actor
    replica = parallel.tensor * parallel.pipeline
    world = world_size if world_size is not None else replica * (parallel.data or 1)
    dp = max(world // replica, 1)
    groups, n = config.data.train_prompt_bsz, config.rollout.n_resp_per_prompt
    mini_groups = actor.ppo_mini_batch_size or groups
    rank_samples = -(-mini_groups * n // dp)
    longest = longest_sequence(config)
    fit = max(actor.ppo_max_token_len // longest, 1) if actor.use_dynamic_bsz else actor.ppo_micro_batch_size
    micro_samples = min(fit, rank_samples)
    multiple = parallel.pipeline if parallel.virtual_pipeline > 1 else 1
    micro_batches = max(-(-rank_samples // micro_samples), min(parallel.pipeline, rank_samples))
    micro_batches = -(-micro_batches // multiple) * multiple
    problems = [*_ranks(config, world), *rank_problems(config, world=world), *_batch(config, dp), *_tokens(config)]
    memory, token_cap = None, None
    if model is not None:
        problems += _model(config, model)
        if device_bytes is not None and config.rollout.adaptive_lengths.enable:
            available = device_bytes(world)
            token_cap = largest_micro_batch(config, model, dp=dp, micro_batches=micro_batches, device_bytes=available)
            problems += _adaptive_lengths(config, token_cap, available)
        memory = estimate(config, model, dp=dp, longest=longest, micro_batches=micro_batches)
    return RunPlan(
        world=world,
        world_assumed=world_size is None,
        dp=dp,
        groups=groups,
        samples=groups * n,
        gen_prompts=config.data.gen_batch_size or groups,
        mini_batches=-(-groups // mini_groups) * actor.ppo_epochs,
        mini_samples=mini_groups * n,
        rank_samples=rank_samples,
        longest=longest,
        micro_samples=micro_samples,
        micro_batches=micro_batches,
        memory=memory,
        token_cap=token_cap,
        problems=tuple(problems),
        notes=tuple(_notes(config, model, micro_batches)),
    )


def balance_objective(config: Config) -> Literal["slowest", "lockstep"]:
    """What the data-parallel ranks wait for (`mdapo.ops.balance`).

    They meet when a mini-batch ends, so that its slowest rank counts; with experts, or gradients and weights, spread
    over them (layouts that `load` refuses as yet) they meet in every micro-batch. Tensor, pipeline and context
    parallelism tie ranks of one replica, which have the same micro-batches.
    """
    ddp, transformer = config.megatron.ddp, config.megatron.transformer
    sharded = ddp.get("data_parallel_sharding_strategy") in ("optim_grads", "optim_grads_params")
    spread = sharded and (ddp.get("use_megatron_fsdp") or ddp.get("use_custom_fsdp"))
    return "lockstep" if spread or transformer.get("expert_model_parallel_size", 1) > 1 else "slowest"


def require_plan(loaded: Loaded, *, world_size: int | None) -> tuple[RunPlan, ModelFacts]:
    """The plan of a run that can start. ``UserError`` with all problems of layout, batch, model folder and files."""
    config = loaded.config
    model, problems = read_model(config.model.path)
    found = plan(config, world_size=world_size, model=model)
    problems = [*problems, *file_problems(config), *found.problems]
    if problems or model is None:
        raise UserError(lines(problems, loaded.sources))
    return found, model


def file_problems(config: Config) -> list[Problem]:
    """Files, folders and parts that are named and not there. Relative paths are relative to the current directory."""
    model = config.model
    problems = []
    if model.tokenizer_path is not None or not why_no_folder(model.path):
        key = "model.path" if model.tokenizer_path is None else "model.tokenizer_path"
        problems += tokenizer_problems(model.tokenizer_path or model.path, key=key)
    if model.chat_template is not None and (why := why_no_file(model.chat_template)):
        problems.append(Problem("model.chat_template", f"{why}: {model.chat_template}"))
    if config.algorithm.kl.enable and model.ref_path is not None:
        problems += read_model(model.ref_path, key="model.ref_path")[1]
    if config.debug.mode == "train":
        if config.debug.replay is not None and (why := why_no_folder(config.debug.replay)):
            problems.append(Problem("debug.replay", f"{why}: {config.debug.replay}"))
    else:
        problems += _data_files("data.train_files", config.data.train_files)
        key_file = config.rollout.key_file
        if key_file is not None and (why := why_no_file(key_file)):
            problems.append(Problem("rollout.key_file", f"{why}: {key_file}"))
        problems += server_python_problems(config)
    return [*problems, *_data_files("data.val_files", config.data.val_files)]


def _data_files(key: str, files: list[str]) -> Iterator[Problem]:
    for i, file in enumerate(files):
        shipped = file.removeprefix("package:")
        if shipped != file and why_no_file(SCENARIOS / shipped):
            names = ", ".join(sorted(p.name for p in SCENARIOS.glob("*.jsonl")))
            yield Problem(f"{key}.{i}", f"{shipped!r} is not shipped with mdapo; there are {names}")
        elif shipped == file and (why := why_no_file(file)):
            yield Problem(f"{key}.{i}", f"{why}: {file}")


def _ranks(config: Config, world: int) -> Iterator[Problem]:
    parallel = config.parallel
    replica = parallel.tensor * parallel.pipeline
    shape = f"parallel.tensor x parallel.pipeline = {parallel.tensor} x {parallel.pipeline} = {replica}"
    keys = ("parallel.tensor", "parallel.pipeline")
    if world % replica:
        key = next(k for k, v in zip(keys, (parallel.tensor, parallel.pipeline), strict=True) if v > 1)
        near = world // replica * replica
        works = either(n for n in (near, near + replica) if n)
        yield Problem(key, f"{world} ranks do not divide by {shape}; start {works} ranks", keys)
    elif parallel.data is not None and parallel.data != world // replica:
        text = f"{parallel.data} does not fit: {world} ranks / ({shape}) = {world // replica}"
        hint = f"set parallel.data={world // replica}, or start {parallel.data * replica} ranks"
        yield Problem("parallel.data", f"{text}; {hint}", keys)


def _batch(config: Config, dp: int) -> Iterator[Problem]:
    groups, n = config.data.train_prompt_bsz, config.rollout.n_resp_per_prompt
    mini = config.actor.ppo_mini_batch_size
    key, count = ("data.train_prompt_bsz", groups) if mini is None else ("actor.ppo_mini_batch_size", mini)
    if (count * n) % dp:
        yield Problem(
            key,
            f"{count} x rollout.n_resp_per_prompt={n} = {count * n} samples do not divide by {dp} data-parallel ranks; "
            f"set {_dividing(groups, mini, step=dp // math.gcd(n, dp))}",
            ("rollout.n_resp_per_prompt",),
        )


def _dividing(groups: int, mini: int | None, *, step: int) -> str:
    """Keys and values near those given that make an optimizer step a multiple of ``step`` groups."""
    if mini is None:
        near = either(c for c in (groups // step * step, (groups // step + 1) * step) if c)
        return f"data.train_prompt_bsz={near}"
    if not groups % step:
        multiples = range(step, min(groups, MOST_GROUPS) + 1, step)
        near = min((m for m in multiples if not groups % m), key=lambda m: abs(m - mini), default=step)
        return f"actor.ppo_mini_batch_size={near}"
    new = max(round(mini / step), 1) * step
    return f"actor.ppo_mini_batch_size={new} and data.train_prompt_bsz={max(round(groups / new), 1) * new}"


def _tokens(config: Config) -> Iterator[Problem]:
    """Sequence parallelism rounds a micro-batch up to a multiple of TP, and the cap down."""
    tp, cap, longest = config.parallel.tensor, config.actor.ppo_max_token_len, longest_sequence(config)
    strict = config.actor.use_dynamic_bsz and config.actor.over_cap == "error"
    if config.parallel.sequence and strict and cap >= longest and -(-longest // tp) > cap // tp:
        need = -(-longest // tp) * tp
        multiples = f"once both are multiples of parallel.tensor={tp}"
        text = f"{cap} holds no sample of {longest} tokens {multiples}; set actor.ppo_max_token_len={need} or more"
        yield Problem("actor.ppo_max_token_len", text, ("parallel.tensor",))


def _adaptive_lengths(config: Config, token_cap: int, available: int) -> Iterator[Problem]:
    """The longest sample must fit into the largest micro-batch that there may be."""
    adaptive, longest = config.rollout.adaptive_lengths, longest_sequence(config)
    multiple = config.parallel.tensor if config.parallel.sequence else 1
    most = token_len(config, largest_scale(config), memory_cap=token_cap)
    if config.actor.over_cap != "error" or most // multiple * multiple >= longest:
        return
    need = -(-longest // multiple) * multiple
    if adaptive.max_token_len is not None:
        text = f"{most} holds no sample of {longest} tokens; set {need} or more"
        yield Problem("rollout.adaptive_lengths.max_token_len", text, ("parallel.tensor",))
        return
    yield Problem(
        "rollout.adaptive_lengths.longer",
        f"{adaptive.longer:g} makes samples of {longest} tokens; here, {SHARE:.0%} of a rank's "
        f"{available / 2**30:.1f} GiB hold a micro-batch of {token_cap}, by estimate; make it smaller, or set "
        f"rollout.adaptive_lengths.max_token_len={need} if you know better",
        ("rollout.max_response_len", "data.max_prompt_len", "rollout.adaptive_lengths.max_token_len"),
    )


def _model(config: Config, model: ModelFacts) -> Iterator[Problem]:
    parallel, context = config.parallel, config.model.max_context
    divided = math.gcd(model.heads, model.kv_heads, model.ffn, model.hidden if parallel.sequence else 0)
    if divided % parallel.tensor:
        works = either(t for t in range(1, divided + 1) if divided % t == 0)
        yield Problem(
            "parallel.tensor",
            f"{parallel.tensor} does not divide the model's {model.heads} attention heads, {model.kv_heads} key-value "
            f"heads and {model.ffn} feed-forward columns; set parallel.tensor={works}",
        )
    tp = config.rollout.tp
    if model.heads % tp or (model.kv_heads % tp and tp % model.kv_heads):
        text = f"{tp} does not divide the model's {model.heads} attention heads and {model.kv_heads} key-value heads"
        fits = [
            t for t in range(1, model.heads + 1) if not (model.heads % t or (model.kv_heads % t and t % model.kv_heads))
        ]
        yield Problem("rollout.tp", f"{text}; set {either(fits)}")
    stages = parallel.pipeline * parallel.virtual_pipeline
    if model.layers % stages:
        works = either(s for s in range(1, model.layers + 1) if model.layers % s == 0)
        yield Problem(
            "parallel.pipeline",
            f"the model's {model.layers} layers do not divide by parallel.pipeline x parallel.virtual_pipeline = "
            f"{parallel.pipeline} x {parallel.virtual_pipeline} = {stages}; a product of {works} would",
            ("parallel.virtual_pipeline",),
        )
    if context > model.max_positions:
        yield Problem(
            "model.max_context",
            f"{context} is more than the {model.max_positions} positions of the model; set at most those",
        )


def _notes(config: Config, model: ModelFacts | None, micro_batches: int) -> Iterator[str]:
    parallel, data = config.parallel, config.data
    if model is not None and model.vocab % parallel.tensor:
        padded = -(-model.vocab // parallel.tensor) * parallel.tensor
        yield f"the vocabulary is padded from {model.vocab} to {padded} rows to divide by parallel.tensor"
    if parallel.virtual_pipeline > 1:
        yield f"the number of micro-batches is rounded up to a multiple of parallel.pipeline ({parallel.pipeline})"
    elif micro_batches < parallel.pipeline:
        yield f"{micro_batches} micro-batches do not fill {parallel.pipeline} pipeline stages"
    if parallel.distributed_optimizer is False:
        yield "parallel.distributed_optimizer=false: every data-parallel rank holds the whole optimizer"
    asked = data.gen_batch_size or data.train_prompt_bsz
    if asked < data.train_prompt_bsz:
        yield f"a step takes at least {-(-data.train_prompt_bsz // asked)} generation rounds"
    yield from _staleness(config)
    if config.actor.lr_decay == "constant" and config.actor.min_lr > 0:
        yield "actor.min_lr does nothing with actor.lr_decay=constant"
    if config.algorithm.kl.enable and config.algorithm.kl.coef == 0:
        yield "algorithm.kl.coef=0: the reference model runs, its KL is only reported"
    adaptive = config.rollout.adaptive_lengths
    if adaptive.enable and config.rollout.max_turns <= adaptive.turns_above:
        yield (
            f"rollout.max_turns={config.rollout.max_turns} never averages more than "
            f"rollout.adaptive_lengths.turns_above={adaptive.turns_above:g}: lengths never grow"
        )
    if not data.val_files:
        yield "no data.val_files: nothing is evaluated"


def _staleness(config: Config) -> Iterator[str]:
    filters, rollout, correction = config.algorithm.filter_groups, config.rollout, config.algorithm.rollout_correction
    if filters.enable and filters.carry_over and rollout.max_staleness == 0:
        yield "rollout.max_staleness=0: surplus groups are too old by the next step, none is kept"
    corrected = correction.rollout_is is not None or correction.rollout_rs is not None
    if filters.carry_over and rollout.max_staleness > 0 and not corrected:
        what = "surplus groups" if rollout.mode == "sync" else f"rollout.mode={rollout.mode}: groups"
        yield (
            f"{what} are trained on when the weights are newer, up to rollout.max_staleness={rollout.max_staleness} "
            "versions, uncorrected (algorithm.rollout_correction.rollout_is=null)"
        )
