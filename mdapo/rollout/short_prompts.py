"""Which prompts are short enough, measured on what their environment opens with; for a run and for its check alike."""

from __future__ import annotations

from collections.abc import Sequence

from mdapo.config.schema import Config
from mdapo.data.chat import ChatFormat
from mdapo.data.prompts import Kind, drop_overlong
from mdapo.environments.aside import Aside
from mdapo.environments.base import EnvironmentFactory
from mdapo.environments.calling import openings_of
from mdapo.types import Prompt


async def short_prompts(
    kind: Kind,
    prompts: Sequence[Prompt],
    make: EnvironmentFactory,
    chat: ChatFormat,
    config: Config,
    *,
    seed: int,
    calls: Aside,
) -> tuple[list[Prompt], int]:
    """The prompts of at most ``data.max_prompt_len`` tokens, and how many are longer. ``UserError``: see `openings_of`
    and `drop_overlong`."""
    name, timeout_s, data = config.environment.name, config.rollout.episode_timeout_s, config.data
    found = await openings_of(make, name, prompts, seed=seed, calls=calls, timeout_s=timeout_s)
    openings = dict(zip((p.uid for p in prompts), found, strict=True))

    def length(prompt: Prompt) -> int:
        opening = openings[prompt.uid]
        return len(chat.prompt_ids(opening.messages, tools=opening.tools))

    return drop_overlong(prompts, length, data.max_prompt_len, data.overlong_prompts, kind=kind)
