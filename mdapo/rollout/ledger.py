"""The books of one step's collection and of the whole run, and the numbers made of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mdapo.algorithms.filters import NO_SPREAD
from mdapo.types import Episode, Group, Turn

if TYPE_CHECKING:
    from mdapo.rollout.running import Begun

STALE, SURPLUS = "stale", "surplus"


@dataclass
class Ledger:
    """Counts groups, of a step and in ``run`` of the whole run. ``carried_in``: accepted in an earlier step;
    ``unfinished_in``: begun in one and not complete, with ``tokens_in`` tokens; ``begun``: in this step; ``given_up``:
    begun ones whose prompts come again before they were judged; ``generated``: complete and judged. ``seen``: scored,
    with ``talked`` conversations, ``failed`` ones among them; ``told``: begun ones that a round's line has named."""

    run: Counter[str]
    carried_in: int
    unfinished_in: int = 0
    tokens_in: int = 0
    begun: int = 0
    given_up: int = 0
    rounds: int = 0
    seen: int = 0
    talked: int = 0
    failed: int = 0
    told: int = 0
    episodes: list[Episode] = field(default_factory=list)
    generated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    started: float = field(default_factory=time.perf_counter)

    def begin(self, count: int) -> None:
        self.begun += count
        self.run["begun"] += count

    def give_up(self, begun: Sequence[Begun]) -> None:
        """Their tokens are no longer under way, and count as written by this step where it wrote them."""
        self.given_up += len(begun)
        self.run["given_up"] += len(begun)
        self.tokens_in -= sum(b.model_tokens for b in begun)

    def see(self, group: Group) -> None:
        """A group is complete."""
        self.seen += 1
        self.talked += len(group.episodes)
        self.failed += sum(episode.end == "error" for episode in group.episodes)

    def judge(self, group: Group) -> None:
        """It is accepted, or dropped next."""
        self.generated += 1
        self.run["generated"] += 1
        self.episodes += group.episodes

    def drop(self, reason: str, count: int = 1) -> None:
        self.dropped[reason] += count
        self.run["dropped"] += count

    def stats(
        self,
        groups: Sequence[Group],
        *,
        version: int,
        carried: int,
        unfinished: int,
        unfinished_tokens: int,
        failures: int,
    ) -> dict[str, float]:
        """The step that trains on ``groups`` with weights ``version``; closes its books.

        generated + carried_in == trained + carried + dropped, and begun + unfinished_in == generated + unfinished +
        given_up, always; over the run nothing comes in.
        """
        dropped, run = self.dropped.total(), self.run
        run["trained"] += len(groups)
        assert self.generated + self.carried_in == len(groups) + carried + dropped
        assert self.begun + self.unfinished_in == self.generated + unfinished + self.given_up
        assert run["generated"] == run["trained"] + carried + run["dropped"], run
        assert run["begun"] == run["generated"] + unfinished + run["given_up"], run
        seconds = time.perf_counter() - self.started
        tokens = sum(e.num_model_tokens for e in self.episodes) + unfinished_tokens - self.tokens_in
        uniform = sum(count for reason, count in self.dropped.items() if reason.startswith(NO_SPREAD))
        stats: dict[str, float] = {
            "rollout/groups_generated": self.generated,
            "rollout/groups_trained": len(groups),
            "rollout/groups_carried": carried,
            "rollout/groups_carried_in": self.carried_in,
            "rollout/groups_dropped": dropped,
            "rollout/groups_begun": self.begun,
            "rollout/groups_unfinished": unfinished,
            "rollout/groups_unfinished_in": self.unfinished_in,
            "rollout/groups_given_up": self.given_up,
            "rollout/rounds": self.rounds,
            "rollout/episodes": len(self.episodes),
            "rollout/tokens": tokens,
            "rollout/tokens_per_s": tokens / seconds,
            "rollout/reward_failures": failures,
        }
        stats |= {f"rollout/dropped/{slug(reason)}": count for reason, count in sorted(self.dropped.items())}
        stats |= {f"rollout/run/groups_{name}": count for name, count in sorted(run.items())}
        if groups:
            stats |= staleness(groups, version)
        if self.generated:
            stats["rollout/uniform_share"] = uniform / self.generated
        return stats | episode_stats(self.episodes)


def slug(reason: str) -> str:
    return reason.replace(":", "").replace(" ", "_")


def reasons(dropped: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items())) or "none"


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Weight versions between writing and training: of groups by their first token, the mean and the largest, and the
    mean over the policy's tokens."""
    of_groups = [version - group.version for group in groups]
    runs = [
        (version - written, tokens)
        for group in groups
        for episode in group.episodes
        for turn in episode.turns
        if turn.version >= 0
        for written, tokens in _written(turn)
    ]
    tokens = sum(count for _, count in runs)
    return {
        "rollout/staleness": float(np.mean(of_groups)),
        "rollout/staleness_max": max(of_groups),
        "rollout/staleness_tokens": sum(age * count for age, count in runs) / tokens if tokens else 0.0,
    }


def _written(turn: Turn) -> list[tuple[int, int]]:
    """The runs of a turn of the policy without the close that was added to it."""
    *earlier, (version, tokens) = turn.runs
    return [*earlier, (version, tokens - int((~turn.mask).sum()))]


def episode_stats(episodes: Sequence[Episode]) -> dict[str, float]:
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
