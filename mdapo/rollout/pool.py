"""What becomes of groups: judged by the filter, waiting for the step that trains them, or dropped for a reason.

Here too is what is learned from them: the yield, what is known of each prompt, and a warning when next to nothing
teaches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mdapo.algorithms.filters import INVALID, Verdict
from mdapo.config.schema import Config
from mdapo.rollout.dealing import Dealer, Stream
from mdapo.rollout.ledger import STALE, SURPLUS, Ledger, reasons
from mdapo.rollout.low_yield import LowYield
from mdapo.rollout.sample import Need
from mdapo.rollout.stages import Stages
from mdapo.rollout.yields import Yield
from mdapo.types import Group, Prompt


class Pool:
    """``kept``: accepted and not trained yet. ``target``: groups of a step; ``wave``: prompts of a round, by the user's
    word. ``UserError`` when a stage cannot be loaded."""

    def __init__(self, stream: Stream, config: Config) -> None:
        self.config, self.cfg = config, config.algorithm.filter_groups
        self.target = config.data.train_prompt_bsz
        self.wave = config.data.gen_batch_size or self.target
        self.stream, self.dealer = stream, Dealer(stream, config)
        self.stages, self.yields, self.low_yield = Stages.of(config), Yield(), LowYield(self.wave)
        self.kept: list[Group] = []
        self.run: Counter[str] = Counter()  # groups of the whole run; see `Ledger`
        self._retried: set[str] = set()  # uids that came to nothing once

    @property
    def missing(self) -> int:
        """Groups that the step still needs."""
        return max(self.target - len(self.kept), 0)

    def open_step(self, version: int) -> None:
        self.yields.open_step()
        self.stages.filter.open_step()
        self.low_yield.open_step()
        if self.dealer.rates is not None:
            self.dealer.rates.open_step(version)

    def ask(self, missing: int, *, under_way: int = 0, ahead: bool = False) -> int:
        """Prompts to begin now, by the stage *sample*."""
        return self.stages.ask(Need(missing, under_way, self.yields, ahead))

    def next(self, count: int) -> list[Prompt]:
        return self.dealer.next(count)

    # ---- one group -----------------------------------------------------------------------------------------------

    def see(self, group: Group, ledger: Ledger) -> Verdict:
        """The word of the stage *filter* on a complete group, from which the yield is learned; once a group."""
        ledger.see(group)
        verdict = self.stages.filter.judge(group)
        self.stages.filter.saw(group, verdict)
        if verdict.reason != INVALID:  # says something of the engine, not of the data
            self.yields.saw(kept=verdict.kept)
        self.low_yield.saw(group, verdict)
        return verdict

    def book(self, group: Group, verdict: Verdict, ledger: Ledger) -> None:
        """It is accepted, or dropped; then its prompt is done with, unless it is ``invalid`` for the first time."""
        ledger.judge(group)
        if self.dealer.rates is not None:
            self.dealer.rates.saw(group)
        if verdict.kept:
            self.kept.append(group)
            return
        ledger.drop(verdict.reason)
        uid = group.prompt.uid
        if verdict.reason == INVALID and uid not in self._retried:  # an engine died, say: once more, then no more
            self._retried.add(uid)
            self.stream.put_back([uid])
        else:
            self._retried.discard(uid)
            self.stream.commit([uid])

    # ---- the step's groups ---------------------------------------------------------------------------------------

    def drop_stale(self, oldest: int, ledger: Ledger) -> None:
        """Those begun before version ``oldest``; their prompts come again."""
        self._drop([group for group in self.kept if group.version < oldest], STALE, ledger)

    def drop_surplus(self, ledger: Ledger) -> None:
        self._drop(self.kept, SURPLUS, ledger)

    def _drop(self, groups: Sequence[Group], reason: str, ledger: Ledger) -> None:
        if groups:
            ledger.drop(reason, len(groups))
            self.stream.put_back(g.prompt.uid for g in groups)
            self.kept = [g for g in self.kept if not any(g is gone for gone in groups)]

    def take(self, count: int, *, oldest: int) -> tuple[Group, ...]:
        """``count`` of those kept, or all: first those of version ``oldest``, which the next step could not train, then
        as the stage *fill* says; in the order of age and arrival."""
        self.kept.sort(key=lambda group: group.version)
        count, due = min(count, len(self.kept)), sum(group.version <= oldest for group in self.kept)
        if due >= count:
            chosen = self.stages.choose(self.kept[:due], count)
        else:
            chosen = [*range(due), *(due + i for i in self.stages.choose(self.kept[due:], count - due))]
        groups, taken = tuple(self.kept[i] for i in chosen), set(chosen)
        self.kept = [group for i, group in enumerate(self.kept) if i not in taken]
        return groups

    # ---- what is told --------------------------------------------------------------------------------------------

    def metrics(self, trained: Sequence[Group], accepted: Sequence[Group]) -> dict[str, float]:
        """``rollout/...`` of the stages; ``accepted``: what the stage *fill* chose from."""
        skipped = self.dealer.rates.metrics() if self.dealer.rates is not None else {}
        found = self.stages.filter.metrics() | self.stages.bias(trained, accepted) | skipped
        return found | {"rollout/yield": self.yields.mean}

    def line(self, asked: int, under_way: int, ledger: Ledger) -> str:
        """A round in words."""
        low, high = self.yields.bounds()
        skipped = self.dealer.rates.skipped if self.dealer.rates is not None else 0
        return (
            f"round {ledger.rounds}: asked {asked} prompts x {self.config.rollout.n_resp_per_prompt}"
            f"{f', skipped {skipped}' if skipped else ''}; finished so far {ledger.seen} groups"
            f"{f', {under_way} not complete' if under_way else ''}; {len(self.kept)} of {self.target} groups in hand; "
            f"dropped so far: {reasons(ledger.dropped)}; yield {self.yields.mean:.2f} ({low:.2f} to {high:.2f})"
        )

    # ---- restart -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain JSON data, without the groups."""
        return {
            "retried": sorted(self._retried),
            "groups": dict(self.run),
            "yield": self.yields.state(),
            "stages": self.stages.state(),
            "pass_rates": self.dealer.rates.state() if self.dealer.rates is not None else None,
        }

    def restore(self, state: Mapping[str, Any], kept: Sequence[Group]) -> None:
        self.kept, self._retried = list(kept), set(state["retried"])
        self.run.clear()
        self.run.update(state["groups"])
        self.yields.restore(state["yield"])
        self.stages.restore(state["stages"])
        if self.dealer.rates is not None and state["pass_rates"] is not None:
            self.dealer.rates.restore(state["pass_rates"])
