"""Rules between keys that need neither the model nor the number of ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mdapo.config.lengths import scaled, token_len
from mdapo.config.placement import placement_rules
from mdapo.config.problems import Problem, either
from mdapo.config.schema import MIN_TEMPERATURE, Config

MOST_GROUPS = 10_000  # that a suggestion looks through: no optimizer step has more
LONGEST_NAME = 240  # bytes; file systems take 255, and folders that are moved aside get a number
_URL = re.compile(r"https?://[^\s/]+/?")
_LOCAL = re.compile(r"https?://(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:|/|$)")


def check_rules(config: Config) -> list[Problem]:
    """Everything that contradicts itself."""
    lengths = (_lengths, _adaptive_lengths)
    checks = (_run, *lengths, _batch, _rollout, _algorithm, _actor, _sync, _parallel, placement_rules, _debug)
    return [problem for check in checks for problem in check(config)]


def _run(config: Config) -> Iterator[Problem]:
    run = config.run
    if not re.fullmatch(r"[\w\-.+=]+", run.name) or run.name.strip(".") == "":
        yield Problem("run.name", f"names a folder: letters, digits, - _ . + = only, not {run.name!r}")
    elif _bytes(run.name) > LONGEST_NAME:
        yield Problem("run.name", f"is longer than {LONGEST_NAME} bytes, which no file system takes as a name")
    if any(_bytes(part) > LONGEST_NAME for part in Path(run.dir).parts):
        yield Problem("run.dir", f"has a folder whose name is longer than {LONGEST_NAME} bytes")
    if not run.dir:
        yield Problem("run.dir", "must not be empty")
    if not config.model.path:
        yield Problem("model.path", "must not be empty")
    if run.eval_every > 0 and not config.data.val_files:
        yield Problem("run.eval_every", f"is {run.eval_every}, but data.val_files is empty", ("data.val_files",))


def _bytes(name: str) -> int:
    return len(name.encode(errors="replace"))


def _lengths(config: Config) -> Iterator[Problem]:
    prompt, response = config.data.max_prompt_len, config.rollout.max_response_len
    context, cap = config.model.max_context, config.actor.ppo_max_token_len
    length_keys = ("data.max_prompt_len", "rollout.max_response_len", "model.max_context")
    if prompt + response > context:
        yield Problem(
            "model.max_context",
            f"{context} is less than data.max_prompt_len + rollout.max_response_len = {prompt} + {response} = "
            f"{prompt + response}; set model.max_context={prompt + response} or more, or shorten those",
            length_keys[:2],
        )
    elif config.actor.use_dynamic_bsz and config.actor.over_cap == "error" and cap < prompt + response:
        yield Problem(
            "actor.ppo_max_token_len",
            f"{cap} is less than the longest sample, {prompt} + {response} = {prompt + response} tokens; "
            f"set actor.ppo_max_token_len={prompt + response} or more, or actor.over_cap=alone",
            (*length_keys, "actor.over_cap", "actor.use_dynamic_bsz"),
        )
    if config.rollout.max_turn_len is not None and config.rollout.max_turn_len > response:
        yield Problem(
            "rollout.max_turn_len",
            f"{config.rollout.max_turn_len} is more than rollout.max_response_len={response}; set at most that",
            length_keys[1:2],
        )
    if config.actor.share_prefix is True and not config.actor.use_remove_padding:
        yield Problem("actor.share_prefix", "true needs actor.use_remove_padding=true", ("actor.use_remove_padding",))
    buffer = config.reward.overlong_buffer_cfg
    if buffer.enable and buffer.len != "auto" and buffer.len > response:
        yield Problem(
            "reward.overlong_buffer_cfg.len",
            f"{buffer.len} is more than rollout.max_response_len={response}; set at most that",
            length_keys[1:2],
        )


def _adaptive_lengths(config: Config) -> Iterator[Problem]:
    adaptive, base = config.rollout.adaptive_lengths, config.actor.ppo_max_token_len
    if not adaptive.enable:
        return
    at = "rollout.adaptive_lengths"
    if adaptive.turns_below + adaptive.hysteresis > adaptive.turns_above:
        yield Problem(
            f"{at}.hysteresis",
            f"turns_below + hysteresis = {adaptive.turns_below:g} + {adaptive.hysteresis:g} is more than turns_above="
            f"{adaptive.turns_above:g}: lengths would go from one end to the other at once",
            (f"{at}.turns_below", f"{at}.turns_above"),
        )
    if not config.actor.use_dynamic_bsz:
        text = "true needs actor.use_dynamic_bsz=true: micro-batches of so many samples grow with them past any cap"
        yield Problem(f"{at}.enable", text, ("actor.use_dynamic_bsz",))
    response = scaled(config.rollout.max_response_len, adaptive.longer)
    longest, context = config.data.max_prompt_len + response, config.model.max_context
    if longest > context:
        yield Problem(
            f"{at}.longer",
            f"{adaptive.longer:g} x rollout.max_response_len={config.rollout.max_response_len} is {response}; with "
            f"data.max_prompt_len={config.data.max_prompt_len} that is more than model.max_context={context}; set "
            f"model.max_context={longest} or more, or shorten those",
            ("rollout.max_response_len", "data.max_prompt_len", "model.max_context"),
        )
    most = adaptive.max_token_len
    if most is not None and most < base:
        text = f"{most} is less than actor.ppo_max_token_len={base}, which it lets grow; set at least that"
        yield Problem(f"{at}.max_token_len", text, ("actor.ppo_max_token_len",))
    elif most is not None and config.actor.over_cap == "error" and token_len(config, adaptive.longer) < longest:
        text = f"{most} is less than the longest sample, {longest} tokens; set at least that"
        yield Problem(f"{at}.max_token_len", text, (f"{at}.longer", "rollout.max_response_len", "data.max_prompt_len"))


def _batch(config: Config) -> Iterator[Problem]:
    data, groups = config.data, config.data.train_prompt_bsz
    filters = config.algorithm.filter_groups
    asked, rounds = data.gen_batch_size or groups, filters.max_num_gen_batches
    if not data.train_files and config.debug.mode != "train":
        yield Problem("data.train_files", "names no file", ("debug.mode",))
    if filters.enable and asked * rounds < groups:
        yield Problem(
            "data.gen_batch_size",
            f"{rounds} rounds (algorithm.filter_groups.max_num_gen_batches) of {asked} prompts never fill "
            f"data.train_prompt_bsz={groups}; set data.gen_batch_size={-(-groups // rounds)} or more",
            ("data.train_prompt_bsz", "algorithm.filter_groups.max_num_gen_batches", "algorithm.filter_groups.enable"),
        )
    mini = config.actor.ppo_mini_batch_size
    if mini is not None and groups % mini:
        yield Problem(
            "actor.ppo_mini_batch_size",
            f"{mini} does not divide data.train_prompt_bsz={groups}; "
            f"set actor.ppo_mini_batch_size={_divisors(groups, mini)}",
            ("data.train_prompt_bsz",),
        )


def _divisors(whole: int, near: int) -> str:
    """The divisors of ``whole`` next to ``near``, below and above; of those that a batch can have."""
    found = [d for d in range(1, min(whole, MOST_GROUPS) + 1) if whole % d == 0]
    return either([*[d for d in found if d < near][-1:], *[d for d in found if d > near][:1]])


def _rollout(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.engine == "local":
        if rollout.urls:
            yield Problem(
                "rollout.urls",
                "are for rollout.engine=sglang; the local engine runs in the trainer",
                ("rollout.engine",),
            )
        if rollout.engine_args:
            yield Problem("rollout.engine_args", "are SGLang's options; the local engine has none", ("rollout.engine",))
    elif rollout.dtype is not None:
        yield Problem(
            "rollout.dtype", "is for the local engine; for SGLang set rollout.engine_args.dtype", ("rollout.engine",)
        )
    if rollout.engine == "sglang" and rollout.top_k == 1 and rollout.temperature != 1.0:
        text = f"1 is greedy to SGLang, whose log-probs are then at temperature 1, not {rollout.temperature:g}"
        yield Problem("rollout.top_k", f"{text}; set rollout.temperature=1 or another top_k", ("rollout.temperature",))
    if not rollout.urls:
        for key in ("router", "key_file"):
            if getattr(rollout, key) is not None:
                yield Problem(f"rollout.{key}", "is for the servers of rollout.urls, which is empty", ("rollout.urls",))
    if rollout.router is not None and not _URL.fullmatch(rollout.router):
        yield Problem("rollout.router", f"must look like http://host:port, not {rollout.router!r}")
    if 0.0 < rollout.val.temperature < MIN_TEMPERATURE:
        text = f"must be 0 (greedy) or at least {MIN_TEMPERATURE}, not {rollout.val.temperature:g}"
        yield Problem("rollout.val.temperature", text)
    if rollout.urls and rollout.engine_args:
        text = "are for servers that mdapo starts; with rollout.urls, give them to the servers (null takes them away)"
        yield Problem("rollout.engine_args", text, ("rollout.urls",))
    yield from _ahead(config)
    for i, url in enumerate(rollout.urls):
        if not _URL.fullmatch(url):
            yield Problem(f"rollout.urls.{i}", f"must look like http://host:port, not {url!r}", ("rollout.urls",))


def _ahead(config: Config) -> Iterator[Problem]:
    """What conversations that outlive a step need."""
    rollout, filters = config.rollout, config.algorithm.filter_groups
    if rollout.mode == "sync":
        return
    if rollout.max_staleness == 0:
        text = f"0 lets no conversation outlive a step, as rollout.mode={rollout.mode} does; set at least 1"
        yield Problem("rollout.max_staleness", text, ("rollout.mode",))
    if not filters.carry_over:
        text = f"false drops groups that rollout.mode={rollout.mode} has completed before their step; set it to true"
        yield Problem("algorithm.filter_groups.carry_over", text, ("rollout.mode",))
    if rollout.mode == "async" and rollout.engine == "local":
        text = "async needs servers beside the trainer (rollout.engine=sglang): the local engine shares its cores"
        yield Problem("rollout.mode", f"{text}; set partial, or sync", ("rollout.engine",))
    if rollout.mode == "partial" and 0 < rollout.max_staleness < rollout.over_sampling - 1:
        text = (
            f"{rollout.over_sampling:g} begins more groups than rollout.max_staleness={rollout.max_staleness} steps use"
        )
        yield Problem(
            "rollout.over_sampling", f"{text}; set at most {rollout.max_staleness + 1}", ("rollout.max_staleness",)
        )


def _algorithm(config: Config) -> Iterator[Problem]:
    algorithm, n = config.algorithm, config.rollout.n_resp_per_prompt
    correction = algorithm.rollout_correction
    if correction.rollout_rs is not None and correction.rollout_rs_threshold is None:
        yield Problem(
            "algorithm.rollout_correction.rollout_rs_threshold",
            f"must be set with rollout_rs={correction.rollout_rs}: ratios above it are masked; 2 is usual, 1.001 for "
            "geometric",
            ("algorithm.rollout_correction.rollout_rs",),
        )
    advantage = algorithm.advantage
    if advantage.credit == "turn" and advantage.turn_share == 1.0 and algorithm.gamma != 1.0:
        yield Problem(
            "algorithm.gamma",
            f"{algorithm.gamma:g} is the discount of the episode's part, of which algorithm.advantage.turn_share=1 "
            "leaves nothing; set algorithm.advantage.turn_gamma, or a smaller share",
            ("algorithm.advantage.credit", "algorithm.advantage.turn_share"),
        )
    n_key = "rollout.n_resp_per_prompt"
    if n == 1 and algorithm.advantage_estimator != "reinforce++":
        yield Problem(
            n_key,
            f"1 leaves {algorithm.advantage_estimator} nothing to compare; set at least 2",
            ("algorithm.advantage_estimator", "algorithm.name"),
        )
    elif n == 1 and algorithm.filter_groups.enable:
        yield Problem(
            "algorithm.filter_groups.enable",
            f"true would drop every group of one ({n_key}=1); set it to false",
            (n_key,),
        )
    if (
        algorithm.policy_loss == "token_clip"
        and algorithm.clip_ratio_low is not None
        and algorithm.clip_ratio_low >= 1.0
    ):
        yield Problem(
            "algorithm.clip_ratio_low",
            f"{algorithm.clip_ratio_low:g} clips nothing: a ratio is never below 0; it must be below 1",
            ("algorithm.policy_loss",),
        )


def _actor(config: Config) -> Iterator[Problem]:
    actor = config.actor
    if actor.min_lr > actor.lr:
        yield Problem("actor.min_lr", f"{actor.min_lr:g} is more than actor.lr={actor.lr:g}", ("actor.lr",))
    if not all(0.0 <= beta < 1.0 for beta in actor.betas):
        yield Problem("actor.betas", f"must be two numbers from 0 to below 1, not {list(actor.betas)}")
    if actor.lr_decay != "constant" and actor.lr_warmup_steps >= config.run.total_steps:
        yield Problem(
            "actor.lr_warmup_steps",
            f"{actor.lr_warmup_steps} leaves no step to decay: run.total_steps={config.run.total_steps}",
            ("run.total_steps", "actor.lr_decay"),
        )


def _sync(config: Config) -> Iterator[Problem]:
    sync = config.sync
    if config.rollout.engine == "sglang" and sync.timeout_s > config.run.init_timeout_s:
        yield Problem(
            "sync.timeout_s",
            f"{sync.timeout_s:g} is more than run.init_timeout_s={config.run.init_timeout_s:g}: the other ranks would "
            "give up on rank 0 first; set at most that",
            ("run.init_timeout_s", "rollout.engine"),
        )
    if sync.dir is not None and sync.mode != "disk":
        yield Problem("sync.dir", "is where sync.mode=disk writes; set that, or leave the folder out", ("sync.mode",))
    elif sync.dir == "":
        yield Problem("sync.dir", "must not be empty")
    remote = [url for url in config.rollout.urls if _URL.fullmatch(url) and not _LOCAL.match(url)]
    if sync.mode == "tensor" and remote:
        yield Problem(
            "sync.mode",
            f"tensor passes weights in this machine's memory, {remote[0]} is on another; set sync.mode=distributed, or "
            "disk and sync.dir on a file system that both see",
            ("rollout.urls",),
        )


def _parallel(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield Problem(
            "parallel.virtual_pipeline",
            f"{parallel.virtual_pipeline} needs parallel.pipeline of at least 2",
            ("parallel.pipeline",),
        )
    if parallel.sequence and parallel.tensor == 1:
        yield Problem("parallel.sequence", "true needs parallel.tensor of at least 2", ("parallel.tensor",))


def _debug(config: Config) -> Iterator[Problem]:
    debug = config.debug
    if debug.mode == "train" and debug.replay is None:
        yield Problem("debug.replay", "must name a run's replay/ folder when debug.mode=train", ("debug.mode",))
    own = Path(config.run.dir, config.run.name)
    if debug.replay is not None and Path(debug.replay) in (own, own / "replay"):
        yield Problem(
            "run.name", f"{config.run.name} is the run that debug.replay recorded; choose another", ("debug.replay",)
        )
    if debug.mode != "train" and debug.replay is not None:
        yield Problem("debug.replay", f"is read only with debug.mode=train, not {debug.mode}", ("debug.mode",))
