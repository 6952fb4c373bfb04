"""Conversations from their parts: engine, chat format, environments and rewards; one at a time, or groups of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from mdapo.config.schema import Config
from mdapo.environments.aside import Aside
from mdapo.environments.base import EnvironmentFactory
from mdapo.rollout.engine import Engine, SamplingParams
from mdapo.rollout.episode import Chat, Limits, run_episode
from mdapo.rollout.lengths import Lengths
from mdapo.rollout.pause import Pause
from mdapo.rollout.seeds import seed_of
from mdapo.types import Episode, Group, Prompt, Score

FAILURES_TOLD = 3
LEAST_S = 0.001  # of a deadline that earlier steps have used up


class Rewards(Protocol):
    """What is needed of ``rewards/runner.py``: scores one episode, judges and closes a step's count of failures."""

    async def score(self, episode: Episode) -> Score: ...

    def check_step(self, *, at_least: int = 0) -> None: ...

    def end_step(self) -> Counter[str]: ...


class Conversations:
    """``environment(prompt, seed=...)`` makes the counterpart of one episode (its configured arguments are bound
    already); the n episodes of a group meet the same one, with samplings of their own; it runs in ``calls``.
    ``progress`` gets a few words at each finished episode. Seeds follow from a group's name."""

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        environment: EnvironmentFactory,
        rewards: Rewards,
        config: Config,
        *,
        calls: Aside | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.engine, self.chat, self.environment, self.rewards = engine, chat, environment, rewards
        self.config, self.calls, self.progress = config, calls or Aside(), progress
        self.lengths = Lengths(config)
        self.failures: list[str] = []  # of this step or evaluation, why conversations ended with ``error``

    @property
    def sampling(self) -> SamplingParams:
        """Of training."""
        rollout = self.config.rollout
        return SamplingParams(1, temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k)

    def told(self) -> list[str]:
        """The first ``FAILURES_TOLD`` of ``failures``, and how many more."""
        more = len(self.failures) - FAILURES_TOLD
        return [*self.failures[:FAILURES_TOLD], *([f"... and {more} more"] if more > 0 else [])]

    async def groups(
        self,
        prompts: Sequence[Prompt],
        names: Sequence[str],
        *,
        n: int,
        sampling: SamplingParams,
        version: int,
        length_scale: float = 1.0,
    ) -> list[Group]:
        """All episodes of all prompts at once, scored; groups in order of ``prompts``. One exception ends them all."""
        finished = 0

        async def run(prompt: Prompt, index: int, name: str) -> Episode:
            nonlocal finished
            episode = await self.talk(prompt, index, name=name, sampling=sampling, length_scale=length_scale)
            episode = await self.scored(episode)
            finished += 1
            self.progress(f"{finished} of {len(prompts) * n} conversations")
            return episode

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    [tasks.create_task(run(p, i, name)) for i in range(n)]
                    for p, name in zip(prompts, names, strict=True)
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        episodes = [tuple(task.result() for task in group) for group in running]
        return [Group(p, group, version, length_scale) for p, group in zip(prompts, episodes, strict=True)]

    async def talk(
        self,
        prompt: Prompt,
        index: int,
        *,
        name: str,
        sampling: SamplingParams,
        begun: Episode | None = None,
        spent_s: float = 0.0,
        length_scale: float = 1.0,
        pause: Pause | None = None,
    ) -> Episode:
        """One episode, not scored yet; ``unfinished`` when ``pause`` came. ``begun``: what it goes on from, after
        ``spent_s`` seconds of its deadline. ``length_scale`` is that of its budgets."""
        seed, limits = self.config.run.seed, Limits.of(self.config, length_scale)
        left_s = max(limits.timeout_s - spent_s, LEAST_S)
        return await run_episode(
            self.engine,
            lambda: self.environment(prompt, seed=seed_of(seed, "environment", name)),
            self.chat,
            prompt,
            index,
            limits=replace(limits, timeout_s=left_s),
            sampling=sampling,
            session=f"{name}/{index}",
            group=name,
            seed=seed_of(seed, "sampling", name, index),
            calls=self.calls,
            failed=self.failures.append,
            begun=begun,
            pause=pause,
        )

    async def scored(self, episode: Episode) -> Episode:
        return replace(episode, score=await self.rewards.score(episode))
