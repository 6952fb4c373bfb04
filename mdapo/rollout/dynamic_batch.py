"""The dynamic batch: rounds of conversations, scored and filtered, until the batch is full of groups that teach.

Every group generated is trained, carried to a later step, or dropped for a reason that is counted; nothing is lost and
nothing trained twice. The order of completion never changes the batch: groups are taken in the order of dispatch.

With ``rollout.mode: partial`` a round begins more groups than it needs, ends as soon as enough are complete, and puts
the others off to the next; see `partial.py` for how many, and which must be waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mdapo.algorithms.filters import INVALID, keep, outcomes
from mdapo.config.schema import Config
from mdapo.environments.aside import Aside
from mdapo.environments.base import EnvironmentFactory
from mdapo.errors import NothingLearnableError, UserError
from mdapo.rollout.conversations import Conversations, Rewards
from mdapo.rollout.engine import Engine, SamplingParams
from mdapo.rollout.episode import Chat
from mdapo.rollout.ledger import STALE, SURPLUS, Ledger, reasons
from mdapo.rollout.partial import Pacing
from mdapo.rollout.running import Begun, Running
from mdapo.types import Episode, Group, Prompt

ROUNDS_ALL_FAILED = 2  # in which every conversation failed, and a step is given up: each prompt was asked once more


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


@dataclass(frozen=True)
class Held:
    """What a batch holds between steps: plain JSON data, ``carried`` groups that open the next step, and
    ``unfinished`` ones, to go on with."""

    state: dict[str, Any]
    carried: tuple[Group, ...] = ()
    unfinished: tuple[Group, ...] = ()


class DynamicBatch:
    """Collects one step's groups after the other, from the parts it is given (see `Conversations`). ``notify`` gets a
    line a round."""

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
        self.talks = Conversations(engine, chat, environment, rewards, config, calls=calls, progress=progress)
        self.stream, self.config, self.notify = stream, config, notify
        self.pacing = Pacing.of(config)
        self._running = Running(self.talks, on_scored=self._on_scored)
        self._kept: list[Group] = []  # accepted and not trained yet, oldest first
        self._dispatched = 0  # groups begun since the run began: part of every seed
        self._retried: set[str] = set()  # uids that came to nothing once

    # ---- one step ------------------------------------------------------------------------------------------------

    async def collect(self, version: int) -> Collected:
        """Groups for the step that trains on weight version ``version``.

        Never endless: at most ``max_num_gen_batches`` rounds, then as ``on_limit`` says (``skip`` keeps the groups in
        hand for the next step). Raises ``NothingLearnableError`` with ``stop``, ``UserError`` when too many rewards
        failed or every conversation did. Groups kept so far survive both, and cancellation: they open the next step.
        """
        cfg, target = self.config.algorithm.filter_groups, self.config.data.train_prompt_bsz
        self.talks.failures.clear()
        # Nothing of an earlier phase runs on or lends its cache: a resumed step is bit-equal.
        await self.talks.engine.abort()
        ledger = self._open_books()
        self._drop_stale(version, ledger)
        while ledger.rounds < cfg.max_num_gen_batches and (
            len(self._kept) < target or self.pacing.must_wait(self._running.unended(), version)
        ):
            asked, groups = await self._round(target - len(self._kept), version, ledger)
            if not asked:
                break
            ledger.rounds += 1
            for group in groups:
                self._judge(group, ledger)
            if ledger.dropped or len(self._kept) < target:  # an uneventful step needs no line but its own
                self.notify(self._summary(asked, ledger))
            # Not after the last round only: what is broken takes its deadline each time.
            self.talks.rewards.check_step(at_least=self._to_ask(target) * self.config.rollout.n_resp_per_prompt)
            if ledger.rounds == ROUNDS_ALL_FAILED:
                self._raise_if_all_failed(ledger)
        self._raise_if_all_failed(ledger)
        failures = self.talks.rewards.end_step()
        if failures:
            self.notify(f"rewards that failed: {reasons(failures)}")
        return self._hand_out(version, failures, ledger)

    async def evaluate(self, prompts: Sequence[Prompt]) -> list[Episode]:
        """``rollout.val.n`` scored episodes of each prompt, with its sampling; the same seeds at every call."""
        val = self.config.rollout.val
        self.talks.failures.clear()
        await self.talks.engine.abort()
        sampling = SamplingParams(1, temperature=val.temperature, top_p=val.top_p)
        names, version = [f"val/{p.uid}" for p in prompts], self.talks.engine.version
        groups = await self.talks.groups(prompts, names, n=val.n, sampling=sampling, version=version)
        return [episode for group in groups for episode in group.episodes]

    def trained(self, collected: Collected) -> None:
        """The step that trained on these groups is done: the prompt cursor moves past them."""
        self.stream.commit(group.prompt.uid for group in collected.groups)
        if changed := self.talks.lengths.trained():
            self.notify(changed)

    async def pause(self) -> None:
        """Before the engine's weights change. Between steps nothing is under way."""

    async def resume(self) -> None:
        """The engine has its new weights."""

    async def close(self) -> None:
        """End what is under way."""
        await self._running.stop()

    def told(self) -> list[str]:
        return self.talks.told()

    def _raise_if_all_failed(self, ledger: Ledger) -> None:
        if ledger.episodes and all(episode.end == "error" for episode in ledger.episodes):
            count = len(ledger.episodes)
            raise UserError([f"all {count} conversations of this step failed:", *(f"  {w}" for w in self.told())])

    # ---- rounds --------------------------------------------------------------------------------------------------

    def _to_ask(self, missing: int) -> int:
        """Prompts of the next round: ``gen_batch_size``, scaled down to what is missing."""
        data = self.config.data
        wave = data.gen_batch_size or data.train_prompt_bsz
        return min(wave, -(-missing * wave // data.train_prompt_bsz))

    async def _round(self, missing: int, version: int, ledger: Ledger) -> tuple[int, list[Group]]:
        """How many groups ran, and those that are complete, scored, in the order of dispatch."""
        if self.config.rollout.mode != "sync":
            return await self._partial_round(missing, version, ledger)
        prompts = self.stream.next(self._to_ask(missing))
        names = [f"{self._dispatched + i}/{p.uid}" for i, p in enumerate(prompts)]
        n, sampling = self.config.rollout.n_resp_per_prompt, self.talks.sampling
        try:
            scale = self.talks.lengths.scale
            groups = await self.talks.groups(
                prompts, names, n=n, sampling=sampling, version=version, length_scale=scale
            )
        except BaseException:  # cancelled, or a user's error: the prompts come again, first
            self.stream.put_back(p.uid for p in prompts)
            raise
        self._dispatched += len(prompts)
        ledger.begun += len(prompts)
        return len(prompts), groups

    async def _partial_round(self, missing: int, version: int, ledger: Ledger) -> tuple[int, list[Group]]:
        running, wanted = self._running, self._to_ask(max(missing, 0))
        count = self.pacing.to_begin(wanted, accepted=len(self._kept), under_way=len(running.begun))
        self._begin(count, version, ledger)
        asked = len(running.begun)
        enough = min(wanted, asked) if self.stream.exhausted else self.pacing.enough(wanted, asked)

        def done() -> bool:
            return running.ended >= enough and not self.pacing.must_wait(running.unended(), version)

        try:
            running.start()
            await running.wait(lambda: done() or running.ended == asked)
            await running.pause()
            await running.settle()
        except BaseException:  # each conversation is as it was before the round, or over
            await running.stop()
            raise
        complete = [begun for begun in running.begun if begun.scored]
        running.take(complete)
        return asked, [begun.group for begun in complete]

    def _begin(self, count: int, version: int, ledger: Ledger) -> None:
        """Groups of the next ``count`` prompts, or of as many as there are."""
        n, prompts = self.config.rollout.n_resp_per_prompt, self.stream.next(count)
        names = [f"{self._dispatched + i}/{p.uid}" for i, p in enumerate(prompts)]
        self._dispatched += len(prompts)
        ledger.begun += len(prompts)
        scale, pairs = self.talks.lengths.scale, zip(names, prompts, strict=True)
        self._running.add(Begun.new(name, p, n=n, version=version, length_scale=scale) for name, p in pairs)

    def _on_scored(self, begun: Begun) -> None:
        """A round takes its groups when it is over, in the order of dispatch."""

    # ---- what becomes of a group ---------------------------------------------------------------------------------

    def _open_books(self) -> Ledger:
        running = self._running
        return Ledger(len(self._kept), unfinished_in=len(running.begun), tokens_in=running.model_tokens)

    def _judge(self, group: Group, ledger: Ledger) -> None:
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

    def _drop_stale(self, version: int, ledger: Ledger) -> None:
        """Groups begun too many weight versions ago, accepted or not complete; their prompts come again."""
        oldest = version - self.config.rollout.max_staleness
        self._drop([g for g in self._kept if g.version < oldest], STALE, ledger)
        if late := [begun for begun in self._running.begun if begun.version < oldest]:
            ledger.given_up += len(late)
            ledger.tokens_in -= sum(begun.model_tokens for begun in late)
            self._running.take(late)
            self.stream.put_back(begun.prompt.uid for begun in late)

    def _drop(self, groups: Sequence[Group], reason: str, ledger: Ledger) -> None:
        if groups:
            ledger.dropped[reason] += len(groups)
            self.stream.put_back(g.prompt.uid for g in groups)
            self._kept = [g for g in self._kept if not any(g is gone for gone in groups)]

    def _hand_out(self, version: int, failures: Counter[str], ledger: Ledger) -> Collected:
        """The oldest groups first; of equally old ones, those that were judged first."""
        cfg, target = self.config.algorithm.filter_groups, self.config.data.train_prompt_bsz
        limit_reached = len(self._kept) < target and ledger.rounds >= cfg.max_num_gen_batches
        if limit_reached and cfg.on_limit == "stop":
            raise NothingLearnableError(
                f"{len(self._kept)} of {target} groups after {ledger.rounds} rounds (algorithm.filter_groups."
                f"max_num_gen_batches); dropped: {reasons(ledger.dropped)}"
            )
        take = 0 if limit_reached and cfg.on_limit == "skip" else target
        self._kept.sort(key=lambda group: group.version)
        groups, self._kept = tuple(self._kept[:take]), self._kept[take:]
        if not cfg.carry_over and take:
            self._drop(self._kept, SURPLUS, ledger)
        running = self._running
        stats = ledger.stats(
            groups,
            version=version,
            carried=len(self._kept),
            unfinished=len(running.begun),
            unfinished_tokens=running.model_tokens,
            failures=failures.total(),
        ) | self.talks.lengths.measure(ledger.episodes)
        exhausted = self.stream.exhausted and not self._kept and not running.begun
        return Collected(groups=groups, stats=stats, limit_reached=limit_reached, exhausted=exhausted)

    def _summary(self, asked: int, ledger: Ledger) -> str:
        n, target = self.config.rollout.n_resp_per_prompt, self.config.data.train_prompt_bsz
        put_off = f", {len(self._running.begun)} not complete" if self._running.begun else ""
        return (
            f"round {ledger.rounds}: asked {asked} prompts x {n}; {len(self._kept)} of {target} groups in hand"
            f"{put_off}; dropped so far: {reasons(ledger.dropped)}"
        )

    # ---- restart -------------------------------------------------------------------------------------------------

    @property
    def carried(self) -> tuple[Group, ...]:
        """Groups that open the next step; part of a checkpoint."""
        return tuple(self._kept)

    async def held(self) -> Held:
        """All of it, for a checkpoint."""
        running = self._running.begun
        state = {
            "stream": self.stream.state(),
            "dispatched": self._dispatched,
            "retried": sorted(self._retried),
            "lengths": self.talks.lengths.state(),
            "unfinished": [{"name": begun.name, "seconds": list(begun.seconds)} for begun in running],
        }
        return Held(state, self.carried, tuple(begun.group for begun in running))

    def restore(self, held: Held) -> None:
        """Go on where ``held`` was taken. In mode ``sync``, unfinished groups begin again."""
        state, unfinished = held.state, list(zip(held.state.get("unfinished", []), held.unfinished, strict=True))
        if unfinished and self.config.rollout.mode == "sync":
            self.notify(f"{len(unfinished)} groups that rollout.mode=partial or async had begun begin again")
            unfinished = []
        uids = [group.prompt.uid for group in (*held.carried, *(group for _, group in unfinished))]
        self.stream.restore(state["stream"], held=uids)
        self._kept, self._dispatched = list(held.carried), int(state["dispatched"])
        self._retried = set(state["retried"])
        if "lengths" in state:  # not in checkpoints of earlier versions
            self.talks.lengths.restore(state["lengths"])
        self._running.take(self._running.begun)
        self._running.add(
            Begun(
                entry["name"],
                group.prompt,
                group.version,
                list(group.episodes),
                list(entry["seconds"]),
                group.length_scale,
            )
            for entry, group in unfinished
        )
