"""The dynamic batch: rounds of conversations, scored and filtered, until the batch is full of groups that teach.

Every group generated is trained, carried to a later step, or dropped for a reason that is counted; nothing is lost and
nothing trained twice. The order of completion never changes the batch: groups are taken in the order of dispatch.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from mdapo.algorithms.filters import INVALID, keep, outcomes
from mdapo.config.schema import Config
from mdapo.environments.aside import Aside
from mdapo.environments.base import EnvironmentFactory
from mdapo.errors import NothingLearnableError, UserError
from mdapo.rollout.engine import Engine, SamplingParams
from mdapo.rollout.episode import Chat, Limits, run_episode
from mdapo.rollout.seeds import seed_of
from mdapo.types import Episode, Group, Prompt, Score

STALE, SURPLUS = "stale", "surplus"
FAILURES_TOLD = 3
ROUNDS_ALL_FAILED = 2  # in which every conversation failed, and a step is given up: each prompt was asked once more


class Rewards(Protocol):
    """What is needed of ``rewards/runner.py``: scores one episode, judges and closes a step's count of failures."""

    async def score(self, episode: Episode) -> Score: ...

    def check_step(self, *, at_least: int = 0) -> None: ...

    def end_step(self) -> Counter[str]: ...


class Stream(Protocol):
    """What is needed of ``data/prompts.py``."""

    @property
    def exhausted(self) -> bool: ...

    def next(self, n: int) -> list[Prompt]: ...

    def commit(self, uids: Iterable[str]) -> None: ...

    def put_back(self, uids: Iterable[str]) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any], *, held: Iterable[str] = ()) -> None: ...


@dataclass(frozen=True)
class Collected:
    """The groups to train on, at most ``train_prompt_bsz``; ``limit_reached``: the rounds ended before it was full;
    ``exhausted``: the prompts have, and nothing is carried."""

    groups: tuple[Group, ...]
    stats: dict[str, float]
    limit_reached: bool = False
    exhausted: bool = False


@dataclass
class _Ledger:
    """One step's books."""

    carried_in: int
    rounds: int = 0
    episodes: list[Episode] = field(default_factory=list)
    generated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    started: float = field(default_factory=time.perf_counter)


class DynamicBatch:
    """Collects one step's groups after the other, from the parts it is given.

    ``environment(prompt, seed=...)`` makes the counterpart of one episode (its configured arguments are bound already);
    the n episodes of a group meet the same one, with samplings of their own; it runs in ``calls``. ``notify`` gets a
    line a round, ``progress`` a few words at each finished episode.
    """

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        environment: EnvironmentFactory,
        rewards: Rewards,
        stream: Stream,
        config: Config,
        *,
        calls: Aside | None = None,
        notify: Callable[[str], None] = lambda _: None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.engine, self.chat, self.environment, self.rewards = engine, chat, environment, rewards
        self.stream, self.config, self.notify, self.progress = stream, config, notify, progress
        self.limits, self.calls = Limits.of(config), calls or Aside()
        self._kept: list[Group] = []  # accepted and not trained yet, oldest first
        self._dispatched = 0  # groups begun since the run began: part of every seed
        self._retried: set[str] = set()  # uids that came to nothing once
        self.failures: list[str] = []  # of this step or evaluation, why conversations ended with ``error``

    # ---- one step ------------------------------------------------------------------------------------------------

    async def collect(self, version: int) -> Collected:
        """Groups for the step that trains on weight version ``version``.

        Never endless: at most ``max_num_gen_batches`` rounds, then as ``on_limit`` says (``skip`` keeps the groups in
        hand for the next step). Raises ``NothingLearnableError`` with ``stop``, ``UserError`` when too many rewards
        failed or every conversation did. Groups kept so far survive both, and cancellation: they open the next step.
        """
        cfg, target = self.config.algorithm.filter_groups, self.config.data.train_prompt_bsz
        self.failures.clear()
        await self.engine.abort()  # nothing of an earlier phase runs on or lends its cache: a resumed step is bit-equal
        ledger = _Ledger(carried_in=len(self._kept))
        self._drop_stale(version, ledger)
        while len(self._kept) < target and ledger.rounds < cfg.max_num_gen_batches:
            prompts = self.stream.next(self._to_ask(target - len(self._kept)))
            if not prompts:
                break
            ledger.rounds += 1
            for group in await self._round(prompts, version):
                self._judge(group, ledger)
            if ledger.dropped or len(self._kept) < target:  # an uneventful step needs no line but its own
                self.notify(self._summary(len(prompts), ledger))
            # Not after the last round only: what is broken takes its deadline each time.
            self.rewards.check_step(at_least=self._to_ask(target) * self.config.rollout.n_resp_per_prompt)
            if ledger.rounds == ROUNDS_ALL_FAILED:
                self._raise_if_all_failed(ledger)
        self._raise_if_all_failed(ledger)
        failures = self.rewards.end_step()
        if failures:
            self.notify(f"rewards that failed: {_reasons(failures)}")
        return self._hand_out(version, failures, ledger)

    async def evaluate(self, prompts: Sequence[Prompt]) -> list[Episode]:
        """``rollout.val.n`` scored episodes of each prompt, with its sampling; the same seeds at every call."""
        val = self.config.rollout.val
        self.failures.clear()
        await self.engine.abort()
        sampling = SamplingParams(1, temperature=val.temperature, top_p=val.top_p)
        names = [f"val/{p.uid}" for p in prompts]
        groups = await self._run(prompts, names, n=val.n, sampling=sampling, version=self.engine.version)
        return [episode for group in groups for episode in group.episodes]

    def trained(self, collected: Collected) -> None:
        """The step that trained on these groups is done: the prompt cursor moves past them."""
        self.stream.commit(group.prompt.uid for group in collected.groups)

    def told(self) -> list[str]:
        """The first ``FAILURES_TOLD`` of ``failures``, and how many more."""
        more = len(self.failures) - FAILURES_TOLD
        return [*self.failures[:FAILURES_TOLD], *([f"... and {more} more"] if more > 0 else [])]

    def _raise_if_all_failed(self, ledger: _Ledger) -> None:
        if ledger.episodes and all(episode.end == "error" for episode in ledger.episodes):
            count = len(ledger.episodes)
            raise UserError([f"all {count} conversations of this step failed:", *(f"  {w}" for w in self.told())])

    # ---- rounds --------------------------------------------------------------------------------------------------

    def _to_ask(self, missing: int) -> int:
        """Prompts of the next round: ``gen_batch_size``, scaled down to what is missing."""
        data = self.config.data
        wave = data.gen_batch_size or data.train_prompt_bsz
        return min(wave, -(-missing * wave // data.train_prompt_bsz))

    async def _round(self, prompts: Sequence[Prompt], version: int) -> list[Group]:
        rollout = self.config.rollout
        sampling = SamplingParams(1, temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k)
        names = [f"{self._dispatched + i}/{p.uid}" for i, p in enumerate(prompts)]
        try:
            groups = await self._run(prompts, names, n=rollout.n_resp_per_prompt, sampling=sampling, version=version)
        except BaseException:  # cancelled, or a user's error: the prompts come again, first
            self.stream.put_back(p.uid for p in prompts)
            raise
        self._dispatched += len(prompts)
        return groups

    async def _run(
        self, prompts: Sequence[Prompt], names: Sequence[str], *, n: int, sampling: SamplingParams, version: int
    ) -> list[Group]:
        """All episodes of all prompts at once; groups in the order of ``prompts``. One exception ends them all."""
        finished = 0

        async def run(prompt: Prompt, index: int, name: str) -> Episode:
            nonlocal finished
            episode = await self._episode(prompt, index, name=name, sampling=sampling)
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
        return [Group(p, group, version) for p, group in zip(prompts, episodes, strict=True)]

    async def _episode(self, prompt: Prompt, index: int, *, name: str, sampling: SamplingParams) -> Episode:
        seed = self.config.run.seed
        episode = await run_episode(
            self.engine,
            lambda: self.environment(prompt, seed=seed_of(seed, "environment", name)),
            self.chat,
            prompt,
            index,
            limits=self.limits,
            sampling=sampling,
            session=f"{name}/{index}",
            group=name,
            seed=seed_of(seed, "sampling", name, index),
            calls=self.calls,
            failed=self.failures.append,
        )
        return replace(episode, score=await self.rewards.score(episode))

    # ---- what becomes of a group ---------------------------------------------------------------------------------

    def _judge(self, group: Group, ledger: _Ledger) -> None:
        cfg = self.config.algorithm.filter_groups
        ledger.generated += 1
        ledger.episodes += group.episodes
        verdict = keep(outcomes(group, cfg.metric), cfg)
        if verdict.kept:
            self._kept.append(group)
            return
        ledger.dropped[verdict.reason] += 1
        uid = group.prompt.uid
        if verdict.reason == INVALID and uid not in self._retried:  # an engine died, say: once more, then no more
            self._retried.add(uid)
            self.stream.put_back([uid])
        else:
            self._retried.discard(uid)
            self.stream.commit([uid])

    def _drop_stale(self, version: int, ledger: _Ledger) -> None:
        """Carried groups begun too many weight versions ago; their prompts come again."""
        oldest = version - self.config.rollout.max_staleness
        self._drop([g for g in self._kept if g.version < oldest], STALE, ledger)

    def _drop(self, groups: Sequence[Group], reason: str, ledger: _Ledger) -> None:
        if groups:
            ledger.dropped[reason] += len(groups)
            self.stream.put_back(g.prompt.uid for g in groups)
            self._kept = [g for g in self._kept if not any(g is gone for gone in groups)]

    def _hand_out(self, version: int, failures: Counter[str], ledger: _Ledger) -> Collected:
        cfg, target = self.config.algorithm.filter_groups, self.config.data.train_prompt_bsz
        limit_reached = len(self._kept) < target and ledger.rounds >= cfg.max_num_gen_batches
        if limit_reached and cfg.on_limit == "stop":
            raise NothingLearnableError(
                f"{len(self._kept)} of {target} groups after {ledger.rounds} rounds (algorithm.filter_groups."
                f"max_num_gen_batches); dropped: {_reasons(ledger.dropped)}"
            )
        take = 0 if limit_reached and cfg.on_limit == "skip" else target
        groups, self._kept = tuple(self._kept[:take]), self._kept[take:]
        if not cfg.carry_over and take:
            self._drop(self._kept, SURPLUS, ledger)
        return Collected(
            groups=groups,
            stats=self._stats(groups, version, failures, ledger),
            limit_reached=limit_reached,
            exhausted=self.stream.exhausted and not self._kept,
        )

    # ---- numbers -------------------------------------------------------------------------------------------------

    def _stats(
        self, groups: Sequence[Group], version: int, failures: Counter[str], ledger: _Ledger
    ) -> dict[str, float]:
        """generated + carried_in == trained + carried + dropped, always."""
        dropped, carried = ledger.dropped.total(), len(self._kept)
        assert ledger.generated + ledger.carried_in == len(groups) + carried + dropped
        seconds = time.perf_counter() - ledger.started
        tokens = sum(e.num_model_tokens for e in ledger.episodes)
        uniform = dropped - sum(ledger.dropped[reason] for reason in (INVALID, STALE, SURPLUS))
        stats: dict[str, float] = {
            "rollout/groups_generated": ledger.generated,
            "rollout/groups_trained": len(groups),
            "rollout/groups_carried": carried,
            "rollout/groups_carried_in": ledger.carried_in,
            "rollout/groups_dropped": dropped,
            "rollout/rounds": ledger.rounds,
            "rollout/episodes": len(ledger.episodes),
            "rollout/tokens": tokens,
            "rollout/tokens_per_s": tokens / seconds,
            "rollout/reward_failures": failures.total(),
        }
        stats |= {f"rollout/dropped/{_slug(reason)}": count for reason, count in sorted(ledger.dropped.items())}
        if groups:
            stats["rollout/staleness"] = float(np.mean([version - g.version for g in groups]))
        if ledger.generated:
            stats["rollout/uniform_share"] = uniform / ledger.generated
        return stats | _episode_stats(ledger.episodes)

    def _summary(self, asked: int, ledger: _Ledger) -> str:
        n, target = self.config.rollout.n_resp_per_prompt, self.config.data.train_prompt_bsz
        return (
            f"round {ledger.rounds}: asked {asked} prompts x {n}; {len(self._kept)} of {target} groups in hand"
            f"; dropped so far: {_reasons(ledger.dropped)}"
        )

    # ---- restart -------------------------------------------------------------------------------------------------

    @property
    def carried(self) -> tuple[Group, ...]:
        """Groups that open the next step; part of a checkpoint."""
        return tuple(self._kept)

    def state(self) -> dict[str, Any]:
        """Plain JSON data; ``carried`` is saved beside it."""
        return {"stream": self.stream.state(), "dispatched": self._dispatched, "retried": sorted(self._retried)}

    def restore(self, state: Mapping[str, Any], carried: Sequence[Group]) -> None:
        """Go on where ``state`` and ``carried`` were taken."""
        self.stream.restore(state["stream"], held=[g.prompt.uid for g in carried])
        self._kept, self._dispatched = list(carried), int(state["dispatched"])
        self._retried = set(state["retried"])


def _slug(reason: str) -> str:
    return reason.replace(":", "").replace(" ", "_")


def _reasons(dropped: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items())) or "none"


def _episode_stats(episodes: Sequence[Episode]) -> dict[str, float]:
    """Means over everything generated: what the policy does, before the filter chose what to train on."""
    scores = [e.score for e in episodes if e.score is not None and e.score.valid]
    stats: dict[str, float] = {}
    if episodes:
        stats["rollout/response_mean"] = float(np.mean([e.num_model_tokens for e in episodes]))
        stats["rollout/turns_mean"] = float(np.mean([e.num_agent_turns for e in episodes]))
        stats["rollout/truncated"] = float(np.mean([e.truncated for e in episodes]))
        stats["rollout/errors"] = sum(e.end == "error" for e in episodes)
    if scores:
        stats["rollout/outcome_mean"] = float(np.mean([s.outcome for s in scores]))
        stats["rollout/reward_mean"] = float(np.mean([s.value for s in scores]))
    return stats
