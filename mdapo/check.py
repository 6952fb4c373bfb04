"""What ``mdapo check`` shows: the resolved configuration, the plan, and one rendered conversation with its mask.

Errors of the configuration, layout and files are told before anything heavy is imported. The conversation runs through
the very code of a rollout; only the engine is a stand-in that always says the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mdapo.config.load import Loaded, load
from mdapo.config.model_facts import read_model
from mdapo.config.placement import server_group, sharing_problems, starts_servers
from mdapo.config.plan import file_problems, plan
from mdapo.config.problems import lines
from mdapo.config.render import render_plan
from mdapo.config.weight_files import weight_problems
from mdapo.errors import EXIT_USER, UserError

if TYPE_CHECKING:
    import torch

    from mdapo.config.model_facts import ModelFacts
    from mdapo.config.schema import Config
    from mdapo.data.chat import ChatFormat
    from mdapo.data.prompts import Kind
    from mdapo.environments.calling import Environments
    from mdapo.rollout.engine import Completion, Request
    from mdapo.types import Episode, Prompt, Score

T = TypeVar("T")
REPLY = "I am sorry to hear that. Could you tell me more?"
TURNS_SHOWN = 2
WIDTH = 110


@dataclass(frozen=True)
class Report:
    """``text`` to print; ``problems`` are in it, one line each."""

    text: str
    problems: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return EXIT_USER if self.problems else 0


def check(path: str | Path, overrides: Sequence[str] = (), *, world_size: int | None = None) -> Report:
    """Everything that can be known before a run; never raises ``UserError``, its problems are in the report."""
    try:
        loaded = load(path, overrides)
    except UserError as error:
        return _report([], error.problems)
    config = loaded.config
    model, problems = read_model(config.model.path)
    found = plan(config, world_size=world_size, model=model, device_bytes=_rank_bytes_here(config))
    blocks = ["# configuration\n" + loaded.resolved_yaml().rstrip(), "# plan\n" + render_plan(found, config, model)]
    if model is not None and not problems:
        problems = weight_problems(config.model.path, model)
    group = server_group(config)
    if starts_servers(config) and (group is None or group.device is None):  # else the rules know their kind
        problems = [*problems, *sharing_problems(config, _device_here())]
    told = lines([*problems, *file_problems(config), *found.problems], loaded.sources)
    if config.rollout.engine == "sglang" and model is not None and not told:
        try:
            blocks.append(_servers(config, model))
        except UserError as error:
            told = error.problems
    if told or config.debug.mode == "train":
        return _report(blocks, told)
    try:
        blocks.append(_conversation(loaded))
    except UserError as error:
        told = error.problems
    return _report(blocks, told)


def _report(blocks: Sequence[str], problems: Sequence[str]) -> Report:
    verdict = [f"# {len(problems)} problem{'s' * (len(problems) > 1)}\n" + "\n".join(problems)] if problems else []
    return Report("\n\n".join([*blocks, *verdict]), tuple(problems))


def _servers(config: Config, model: ModelFacts) -> str:
    from mdapo.trainer.report import aligned
    from mdapo.trainer.servers_report import server_rows

    return f"# servers\n{aligned(server_rows(config, model))}"


def _device_here() -> str:
    """The kind of device that a run would choose here."""
    from mdapo import device

    return device.current().kind


def _rank_bytes_here(config: Config) -> Callable[[int], int] | None:
    """The memory that adaptive lengths end at, where they do: looking for it takes time."""
    if not config.rollout.adaptive_lengths.enable:
        return None
    from mdapo import device

    return device.current().rank_bytes


def _conversation(loaded: Loaded) -> str:
    """Load chat format, data, environment and reward as a run does; show the first prompt's conversation."""
    from mdapo.data.prompts import load_prompts
    from mdapo.environments.calling import load_environment
    from mdapo.rewards.runner import RewardRunner, told

    config, problems = loaded.config, []
    chat = _tried(problems, lambda: _chat_format(config))
    environment = _tried(problems, lambda: load_environment(config.environment))
    train = _tried(problems, lambda: load_prompts(config.data.train_files, config.data))
    val = _tried(problems, lambda: load_prompts(config.data.val_files, config.data)) if config.data.val_files else []
    rewards = _tried(problems, lambda: RewardRunner(config.reward, default=config.environment.name))
    try:
        if chat is None or environment is None or train is None or val is None or rewards is None:
            raise UserError(problems)
        fitting = [_fitting("training", train, chat, environment, config)] if train else []
        fitting += [_fitting("validation", val, chat, environment, config)] if val else []
        first = fitting[0][0][0]
        episode = asyncio.run(_talk(config, chat, environment, first))
        if episode.end in ("error", "aborted"):
            raise UserError(f"environment.name={config.environment.name}: the conversation failed (see above)")
        score = asyncio.run(rewards.score(episode))
    finally:
        for part in (rewards, environment):
            if part is not None:
                part.close()
    title = f"# one conversation: {first.uid}, the model's words are a stand-in"
    data = ["# data", *(line for _, line in fitting)]
    return "\n".join(
        [
            *data,
            "",
            "# chat",
            *chat.check().lines,
            "",
            title,
            *_show(chat, episode),
            "",
            *_end(episode, score, told(rewards.errors)),
        ]
    )


def _tried(problems: list[str], make: Callable[[], T]) -> T | None:
    """What ``make`` returns; None when it raises, its problems added to ``problems``."""
    try:
        return make()
    except UserError as error:
        problems += error.problems
        return None


def _chat_format(config: Config) -> ChatFormat:
    from mdapo.data.chat import ChatFormat

    return ChatFormat.from_folder(config.model.tokenizer_path or config.model.path, config.model.chat_template)


def _fitting(
    kind: Kind, prompts: Sequence[Prompt], chat: ChatFormat, environment: Environments, config: Config
) -> tuple[list[Prompt], str]:
    """The prompts that are short enough, and a line that counts them."""
    from mdapo.rollout.short_prompts import short_prompts

    calls = environment.calls(config.environment)
    work = short_prompts(kind, prompts, environment, chat, config, seed=config.run.seed, calls=calls)
    kept, dropped = asyncio.run(work)
    left_out = f"; {dropped:,} longer than data.max_prompt_len={config.data.max_prompt_len} left out" if dropped else ""
    return kept, f"{kind} prompts: {len(kept):,}{left_out}"


async def _talk(config: Config, chat: ChatFormat, environment: Environments, prompt: Prompt) -> Episode:
    from mdapo.rollout.engine import SamplingParams
    from mdapo.rollout.episode import Limits, run_episode

    limits = Limits.of(config)
    return await run_episode(
        _StandIn(chat),
        lambda: environment(prompt, seed=config.run.seed),
        chat,
        prompt,
        0,
        limits=replace(limits, max_turns=min(limits.max_turns, TURNS_SHOWN)),
        sampling=SamplingParams(max_new_tokens=1),
        session="check",
        group="check",
        seed=config.run.seed,
        calls=environment.calls(config.environment),
    )


class _StandIn:
    """An engine that always says `REPLY` and ends its turn."""

    version, description = 0, "a stand-in"

    def __init__(self, chat: ChatFormat) -> None:
        self._ids = [*chat.tokenizer(REPLY, add_special_tokens=False).input_ids, chat.stop_ids[0]]

    async def generate(self, request: Request) -> Completion:
        from mdapo.rollout.engine import Completion

        ids = tuple(self._ids[: request.params.max_new_tokens])
        finish = "stop" if len(ids) == len(self._ids) else "length"
        return Completion(ids=ids, logps=(0.0,) * len(ids), finish=finish, version=self.version)

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None: ...

    async def abort(self, session: str | None = None) -> None: ...

    async def release(self, session: str) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    async def close(self) -> None: ...


def _show(chat: ChatFormat, episode: Episode) -> list[str]:
    """Every token, apart by a middle dot, after its mask; a new line where the mask changes or the text breaks."""
    result = [f"mask 1: the policy wrote it ({episode.num_model_tokens} of {len(episode.ids)} tokens); · parts tokens"]
    parts = [("prompt", episode.prompt_ids, [False] * len(episode.prompt_ids))]
    parts += [(t.role, t.ids, t.mask) for t in episode.turns]
    for role, ids, mask in parts:
        result.append(f"{role}, {len(ids)} tokens")
        row, row_mask = "", None
        for token, written in zip(ids, mask, strict=True):
            text = str(chat.tokenizer.decode([int(token)])).replace("\n", "⏎")
            if row and (row_mask != written or len(row) + len(text) > WIDTH or row.endswith("⏎")):
                result.append(f"  {int(row_mask or 0)} │ {row}")
                row = ""
            row, row_mask = (f"{row}·{text}" if row else text), written
        if row:
            result.append(f"  {int(row_mask or 0)} │ {row}")
    return result


def _end(episode: Episode, score: Score, failures: Sequence[str]) -> list[str]:
    shown = len([m for m in episode.messages if m.role == "assistant"])
    parts = ", ".join(f"{name} {value:g}" for name, value in score.parts.items())
    worth = (
        f"{score.value:g}" + (f" ({parts})" if parts else "")
        if score.valid
        else f"none: the reward failed ({'; '.join(failures)})"
    )
    return [f"end: {episode.end} (at most {TURNS_SHOWN} turns are shown; {shown} here)", f"reward: {worth}"]
