"""The dynamic batch: rounds of conversations, scored and filtered, until the batch is full of groups that teach.

Three stages that can be replaced decide: *sample*, how many prompts to ask next (`sample.py`); *filter*, which groups
teach (`filter.py`); *fill*, which of them to train now (`fill.py`). Every group generated is trained, carried to a
later step, or dropped for a reason that is counted; nothing is lost and nothing trained twice. The order of completion
never changes the batch: groups are taken in the order of dispatch.

With ``rollout.mode: partial`` a round begins more groups than it needs, ends as soon as enough are complete, and puts
the others off to the next; see `partial.py` for how many, and which must be waited for. A stage *sample* that streams
knows no such rounds: `streaming.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mdapo.config.schema import Config
from mdapo.environments.aside import Aside
from mdapo.environments.base import EnvironmentFactory
from mdapo.errors import NothingLearnableError, UserError
from mdapo.rollout.conversations import Conversations, Rewards
from mdapo.rollout.dealing import Stream
from mdapo.rollout.engine import Engine, SamplingParams
from mdapo.rollout.episode import Chat
from mdapo.rollout.ledger import Ledger, reasons
from mdapo.rollout.partial import Pacing
from mdapo.rollout.pool import Pool
from mdapo.rollout.running import Begun, Running
from mdapo.types import Episode, Group, Prompt

ROUNDS_ALL_FAILED = 2  # in which every conversation failed, and a step is given up: each prompt was asked once more


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
    line a round. ``UserError`` when a stage cannot be loaded."""

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
        self.cfg, self.n = config.algorithm.filter_groups, config.rollout.n_resp_per_prompt
        self.pool, self.pacing = Pool(stream, config), Pacing.of(config)
        self._running = Running(self.talks, on_scored=self._on_scored)
        self._dispatched = 0  # groups begun since the run began: part of every seed

    # ---- one step ------------------------------------------------------------------------------------------------

    async def collect(self, version: int) -> Collected:
        """Groups for the step that trains on weight version ``version``.

        Never endless: at most ``max_num_gen_batches`` rounds, then as ``on_limit`` says (``skip`` keeps the groups in
        hand for the next step). Raises ``NothingLearnableError`` with ``stop``, ``UserError`` when too many rewards
        failed or every conversation did. Groups kept so far survive both, and cancellation: they open the next step.
        """
        # Nothing of an earlier phase runs on or lends its cache: a resumed step is bit-equal.
        await self.talks.engine.abort()
        ledger = self._open_step(version)
        while ledger.rounds < self.cfg.max_num_gen_batches and (
            self.pool.missing or self.pacing.must_wait(self._running.unended(), version)
        ):
            asked, groups = await self._round(self.pool.missing, version, ledger)
            if not asked:
                break
            ledger.rounds += 1
            for group in groups:
                self.pool.book(group, self.pool.see(group, ledger), ledger)
            self._tell_round(asked, ledger)
            self._raise_if_broken(ledger, rounds=ledger.rounds)
        return self._hand_out(version, self._failures(ledger), ledger)

    def _hand_out(self, version: int, failures: Counter[str], ledger: Ledger) -> Collected:
        """At most ``train_prompt_bsz`` groups, as ``on_limit`` and the stage *fill* say; closes the books."""
        pool, kept = self.pool, len(self.pool.kept)
        limit_reached = pool.missing > 0 and ledger.rounds >= self.cfg.max_num_gen_batches
        if limit_reached and self.cfg.on_limit == "stop":
            raise NothingLearnableError(
                f"{kept} of {pool.target} groups after {ledger.rounds} rounds (algorithm.filter_groups."
                f"max_num_gen_batches); dropped: {reasons(ledger.dropped)}"
            )
        take = 0 if limit_reached and self.cfg.on_limit == "skip" else pool.target
        accepted = tuple(pool.kept)
        groups = pool.take(take, oldest=version - self.config.rollout.max_staleness)
        if not self.cfg.carry_over and take:
            pool.drop_surplus(ledger)
        running = self._running
        stats = ledger.stats(
            groups,
            version=version,
            carried=len(pool.kept),
            unfinished=len(running.begun),
            unfinished_tokens=running.model_tokens,
            failures=failures.total(),
        )
        exhausted = self.stream.exhausted and not pool.kept and not running.begun
        return Collected(groups, stats | pool.metrics(groups, accepted), limit_reached, exhausted)

    def trained(self, collected: Collected) -> None:
        """The step that trained on these groups is done: the prompt cursor moves past them."""
        self.stream.commit(group.prompt.uid for group in collected.groups)

    async def evaluate(self, prompts: Sequence[Prompt]) -> list[Episode]:
        """``rollout.val.n`` scored episodes of each prompt, with its sampling; the same seeds at every call."""
        val = self.config.rollout.val
        self.talks.failures.clear()
        await self.talks.engine.abort()
        sampling = SamplingParams(1, temperature=val.temperature, top_p=val.top_p)
        names, version = [f"val/{p.uid}" for p in prompts], self.talks.engine.version
        groups = await self.talks.groups(prompts, names, n=val.n, sampling=sampling, version=version)
        return [episode for group in groups for episode in group.episodes]

    async def pause(self) -> None:
        """Before the engine's weights change. Between steps nothing is under way."""

    async def resume(self) -> None:
        """The engine has its new weights."""

    async def close(self) -> None:
        """End what is under way."""
        await self._running.stop()

    # ---- rounds --------------------------------------------------------------------------------------------------

    async def _round(self, missing: int, version: int, ledger: Ledger) -> tuple[int, list[Group]]:
        """How many groups ran, and those that are complete, scored, in the order of dispatch."""
        wanted = self.pool.ask(missing)
        if self.config.rollout.mode != "sync":
            return await self._partial_round(wanted, version, ledger)
        prompts = self.pool.next(wanted)
        try:
            names, sampling = self._names(prompts), self.talks.sampling
            groups = await self.talks.groups(prompts, names, n=self.n, sampling=sampling, version=version)
        except BaseException:  # cancelled, or a user's error: the prompts come again, first
            self.stream.put_back(p.uid for p in prompts)
            raise
        self._dispatched += len(prompts)
        ledger.begin(len(prompts))
        return len(prompts), groups

    async def _partial_round(self, wanted: int, version: int, ledger: Ledger) -> tuple[int, list[Group]]:
        running = self._running
        count = self.pacing.to_begin(wanted, accepted=len(self.pool.kept), under_way=len(running.begun))
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
        prompts = self.pool.next(count)
        names = self._names(prompts)
        self._dispatched += len(prompts)
        ledger.begin(len(prompts))
        self._running.add(Begun.new(name, p, n=self.n, version=version) for name, p in zip(names, prompts, strict=True))

    def _names(self, prompts: Sequence[Prompt]) -> list[str]:
        return [f"{self._dispatched + i}/{p.uid}" for i, p in enumerate(prompts)]

    def _on_scored(self, begun: Begun) -> None:
        """A round takes its groups when it is over, in the order of dispatch."""

    def _give_up(self, begun: Sequence[Begun], ledger: Ledger) -> None:
        """No longer under way, and not judged: their prompts come again."""
        ledger.give_up(begun)
        self._running.take(begun)
        self.stream.put_back(b.prompt.uid for b in begun)

    # ---- the books -----------------------------------------------------------------------------------------------

    def _open_step(self, version: int) -> Ledger:
        self.talks.failures.clear()
        self.pool.open_step(version)
        ledger = self._open_books()
        self._drop_late(version, ledger)
        return ledger

    def _drop_late(self, version: int, ledger: Ledger) -> None:
        """Groups begun too many weight versions ago for this step, accepted or not complete."""
        oldest = version - self.config.rollout.max_staleness
        self.pool.drop_stale(oldest, ledger)
        if late := [begun for begun in self._running.begun if begun.version < oldest]:
            self._give_up(late, ledger)

    def _open_books(self) -> Ledger:
        return Ledger(
            self.pool.run,
            carried_in=len(self.pool.kept),
            unfinished_in=len(self._running.begun),
            tokens_in=self._running.model_tokens,
        )

    def _tell_round(self, asked: int, ledger: Ledger) -> None:
        self.notify(self.pool.line(asked, len(self._running.begun), ledger))
        if (warning := self.pool.low_yield.warning()) is not None:
            self.notify(warning)

    def _raise_if_broken(self, ledger: Ledger, *, rounds: int) -> None:
        """Not after the last round only: what is broken takes its deadline each time."""
        self.talks.rewards.check_step(at_least=self.pool.wave * self.n)
        if rounds == ROUNDS_ALL_FAILED:
            self._raise_if_all_failed(ledger)

    def _failures(self, ledger: Ledger) -> Counter[str]:
        """Of the step's rewards, by reason. ``UserError`` when they are too many, or every conversation failed."""
        self._raise_if_all_failed(ledger)
        failures = self.talks.rewards.end_step()
        if failures:
            self.notify(f"rewards that failed: {reasons(failures)}")
        return failures

    def _raise_if_all_failed(self, ledger: Ledger) -> None:
        if ledger.talked and ledger.failed == ledger.talked:
            told = (f"  {why}" for why in self.told())
            raise UserError([f"all {ledger.talked} conversations of this step failed:", *told])

    def told(self) -> list[str]:
        return self.talks.told()

    # ---- restart -------------------------------------------------------------------------------------------------

    @property
    def carried(self) -> tuple[Group, ...]:
        """Groups that open the next step; part of a checkpoint."""
        return tuple(self.pool.kept)

    async def held(self) -> Held:
        """All of it, for a checkpoint."""
        running = self._running.begun
        unfinished = [{"name": begun.name, "seconds": list(begun.seconds)} for begun in running]
        state = {"stream": self.stream.state(), "dispatched": self._dispatched, "unfinished": unfinished}
        return Held(state | self.pool.state(), self.carried, tuple(begun.group for begun in running))

    def restore(self, held: Held) -> None:
        """Go on where ``held`` was taken. In mode ``sync``, unfinished groups begin again."""
        state, unfinished = held.state, list(zip(held.state["unfinished"], held.unfinished, strict=True))
        self.pool.restore(state, held.carried)
        if unfinished and self.config.rollout.mode == "sync":
            self.notify(f"{len(unfinished)} groups that rollout.mode=partial or async had begun begin again")
            self.pool.run["given_up"] += len(unfinished)
            unfinished = []
        uids = [group.prompt.uid for group in (*held.carried, *(group for _, group in unfinished))]
        self.stream.restore(state["stream"], held=uids)
        self._dispatched = int(state["dispatched"])
        self._running.take(self._running.begun)
        self._running.add(
            Begun(entry["name"], group.prompt, group.version, list(group.episodes), list(entry["seconds"]))
            for entry, group in unfinished
        )
