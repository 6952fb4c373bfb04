"""The world of `simulate_dynamic_batch.py`: prompts whose pass rates drift, lengths, and conversations on slots."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
from simulated import Slots

from mdapo.rollout.pause import Pause
from mdapo.rollout.seeds import mix
from mdapo.types import UNFINISHED, Episode, Group, Message, Prompt, Score, Turn

TICK = 64  # tokens
LONGEST = 16384 // TICK
IDS, MASK, LOGPS = np.zeros(LONGEST, np.int32), np.ones(LONGEST, bool), np.zeros(LONGEST, np.float32)
NOTHING = np.zeros(0, np.int32)
QUANTILES = [NormalDist().inv_cdf((i + 0.5) / 2**16) for i in range(2**16)]
LENGTHS = [min(max(round(2000 * math.exp(0.9 * q) / TICK), 1), LONGEST) for q in QUANTILES]  # in ticks, equally likely


@dataclass(frozen=True)
class World:
    """``scale`` 1 is the world of the goals; a smaller one has fewer prompts, groups and slots."""

    seed: int
    n: int
    scale: float = 1.0

    @property
    def prompts(self) -> int:
        return int(17_000 * self.scale)

    @property
    def groups(self) -> int:
        return int(512 * self.scale)

    @property
    def slots(self) -> int:
        return int(2048 * self.scale)


class Policy:
    """The model that is trained: pass rates of all prompts, as of its version; lengths."""

    def __init__(self, world: World) -> None:
        self.world, self.random = world, np.random.default_rng([world.seed, 1, 2])  # not the stream's bits
        kind = self.random.choice(3, world.prompts, p=(0.3, 0.3, 0.4))
        shapes = ((0.25, 12.0), (25.0, 0.4), (1.5, 1.5))
        rates = np.choose(kind, [self.random.beta(a, b, world.prompts) for a, b in shapes]).clip(1e-4, 1 - 1e-4)
        self.logits = np.log(rates / (1.0 - rates))
        self.learn()

    def learn(self) -> None:
        """A step was trained."""
        self.logits = (self.logits + self.random.normal(0.015, 0.05, len(self.logits))).clip(-9.2, 9.2)
        self.rates = 1.0 / (1.0 + np.exp(-self.logits))

    @property
    def expected_yield(self) -> float:
        """Of prompts as the data has them."""
        n = self.world.n
        return float(np.mean(1.0 - self.rates**n - (1.0 - self.rates) ** n))

    def ticks(self, name: str) -> int:
        return LENGTHS[self.drawn(name) >> 48]

    def passes(self, row: int, name: str) -> float:
        return float(self.drawn(name) * 2.0**-64 < self.rates[row])

    def drawn(self, name: str) -> int:
        """64 bits that depend on the name."""
        return mix(mix(self.world.seed) ^ zlib.crc32(name.encode()))


class Engine:
    """As far as the batch deals with it directly."""

    def __init__(self, slots: Slots) -> None:
        self.slots, self.version = slots, 0

    async def abort(self, session: str | None = None) -> None:
        self.slots.abort(session)


class NoFailures:
    def check_step(self, *, at_least: int = 0) -> None: ...

    def end_step(self) -> Counter[str]:
        return Counter()


class Talks:
    """In the place of `Conversations`: a conversation is one stay in a slot, and passes or not."""

    def __init__(self, policy: Policy, slots: Slots) -> None:
        self.policy, self.slots, self.engine = policy, slots, Engine(slots)
        self.rewards, self.sampling, self.failures = NoFailures(), None, []
        self.progress: Callable[[str], None] = lambda _: None

    async def talk(
        self,
        prompt: Prompt,
        index: int,
        *,
        name: str,
        begun: Episode | None = None,
        pause: Pause | None = None,
        **_: Any,
    ) -> Episode:
        turn = begun.turns[-1] if begun is not None and begun.turns else None
        had, session = len(turn.ids) if turn else 0, f"{name}/{index}"
        left = self.policy.ticks(session) - had
        ticks = await self.slots.hold(left, session)
        end = UNFINISHED if ticks < left else "done"
        if ticks:
            whole, pieces = had + ticks, turn.runs if turn else ()
            finish = "abort" if end == UNFINISHED else "stop"
            turn = Turn("assistant", IDS[:whole], MASK[:whole], LOGPS[:whole], self.engine.version, finish, pieces)
        return Episode(prompt, index, NOTHING, (turn,) if turn else (), (), end)

    async def scored(self, episode: Episode) -> Episode:
        name = f"{self.engine.version}/{episode.prompt.uid}/{episode.index}"
        passes = self.policy.passes(episode.prompt.row, name)
        return Episode(episode.prompt, episode.index, NOTHING, episode.turns, (), episode.end, Score(passes, passes))

    async def groups(
        self, prompts: Sequence[Prompt], names: Sequence[str], *, n: int, version: int, **_: Any
    ) -> list[Group]:
        async def run(prompt: Prompt, name: str, index: int) -> Episode:
            return await self.scored(await self.talk(prompt, index, name=name))

        pairs = zip(prompts, names, strict=True)
        episodes = await asyncio.gather(*(run(p, name, i) for p, name in pairs for i in range(n)))
        return [Group(p, tuple(episodes[k * n : (k + 1) * n]), version) for k, p in enumerate(prompts)]

    def told(self) -> list[str]:
        return []


@dataclass
class Step:
    """What one step trained on and what it cost. ``asked``: groups begun, counted at their first token."""

    groups: list[Group]
    asked: int
    stats: dict[str, float] = field(default_factory=dict)


Collect = Callable[[int], Awaitable[Step]]


def data(world: World) -> list[Prompt]:
    return [Prompt(f"p{i}", i, (Message("user", "ask"),)) for i in range(world.prompts)]
