"""Step wall-clock of ``rollout.mode`` partial and async against sync, at equal accepted samples, on a simulated clock.

What plans is mdapo's own code (`DynamicBatch`, `AheadBatch`, the filter, the prompt stream, episodes); what is
simulated is the clock, the engine (`simulated.SimulatedEngine`), the time that training takes, and the lengths of
answers: log-normal with a heavy tail, cut at a limit, as reasoning models have them. A token here stands for 16.

    python benchmarks/simulate_rollout.py --seeds 5
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from simulated import SimulatedEngine, simulated

from mdapo.config.schema import Config
from mdapo.data.prompts import PromptStream
from mdapo.environments.base import Observation, Tools
from mdapo.rollout.ahead import AheadBatch
from mdapo.rollout.dynamic_batch import DynamicBatch
from mdapo.rollout.engine import Request
from mdapo.rollout.seeds import seed_of, uniform
from mdapo.types import Episode, Message, Prompt, Score

STOP, ASK, WORD = 1, 2, 20
TRAIN_SHARE = 0.5  # of sync's rollout time: rollout is two thirds of a step


@dataclass(frozen=True)
class World:
    """Lengths in tokens, times in seconds. ``useless``: share of prompts that are always or never solved."""

    seed: int
    groups: int = 128
    n: int = 8
    slots: int = 512
    median: float = 64.0
    sigma: float = 1.1
    limit: int = 1024
    token_s: float = 0.32  # 16 tokens at 50 a second
    useless: float = 0.4

    @property
    def wave(self) -> int:
        return math.ceil(1.05 * self.groups / (1.0 - self.useless))

    def length(self, session: str) -> int:
        drawn = NormalDist().inv_cdf(min(max(uniform(seed_of(self.seed, session), 0), 1e-9), 1 - 1e-9))
        return min(max(int(self.median * math.exp(self.sigma * drawn)), 2), self.limit)

    def outcome(self, episode: Episode) -> float:
        difficulty = uniform(seed_of(self.seed, "difficulty", episode.prompt.uid), 0)
        if difficulty < self.useless:
            return float(difficulty < self.useless / 2)
        return float(uniform(seed_of(self.seed, "outcome", episode.prompt.uid), episode.index) < 0.5)


class Talker:
    """The chat format: one word of prompt, no template."""

    stop_ids, close_ids = (STOP,), (STOP,)

    def ids_with(self, texts: tuple[str, ...]) -> list[int]:
        return []

    def prompt_ids(self, messages: Sequence[Message], *, tools: Tools = ()) -> list[int]:
        return [ASK]

    def observation_ids(self, messages: Sequence[Message], *, after_stop: bool) -> list[int]:
        raise AssertionError("conversations here have one turn")

    def decode(self, ids: Sequence[int]) -> str:
        return "word"


class OneTurn:
    def __init__(self, prompt: Prompt, *, seed: int) -> None:
        self.prompt = prompt

    def opening(self) -> tuple[Message, ...]:
        return self.prompt.messages

    def observe(self, messages: Sequence[Message]) -> Observation:
        return Observation(end="done")


class Outcomes:
    """Rewards that take no time."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def score(self, episode: Episode) -> Score:
        outcome = self.world.outcome(episode)
        return Score(outcome, outcome)

    def check_step(self, *, at_least: int = 0) -> None: ...

    def end_step(self) -> Counter[str]:
        return Counter()


class Inline:
    """Calls of the environment on the spot: threads have no part in a simulated clock."""

    async def call(self, work):
        return work()


@dataclass(frozen=True)
class Found:
    """Means over the steps measured: seconds, and what the steps trained on."""

    step_s: float
    collect_s: float
    staleness: float
    staleness_tokens: float
    staleness_max: float
    dropped_stale: float
    length: float


def build(world: World, mode: str, max_staleness: int, over_sampling: float) -> tuple[DynamicBatch, SimulatedEngine]:
    config = Config.model_validate(
        {
            "run": {"seed": world.seed},
            "model": {"path": "simulated", "max_context": world.limit + 1},
            "data": {"train_files": ["x"], "train_prompt_bsz": world.groups, "gen_batch_size": world.wave},
            "rollout": {
                "mode": mode,
                "max_staleness": max_staleness,
                "over_sampling": over_sampling,
                "n_resp_per_prompt": world.n,
                "max_response_len": world.limit,
                "episode_timeout_s": 86400.0,
            },
        }
    )

    def turn(request: Request) -> list[int]:
        left = world.length(request.session) - (len(request.ids) - 1)
        return [*[WORD] * (left - 1), STOP]

    engine = SimulatedEngine(turn, slots=world.slots, token_s=world.token_s)
    prompts = [Prompt(f"p{i}", i, (Message("user", "ask"),)) for i in range(200 * world.groups)]
    stream = PromptStream(prompts, seed=world.seed, shuffle=False)
    kind = AheadBatch if mode == "async" else DynamicBatch
    return kind(engine, Talker(), OneTurn, Outcomes(world), stream, config, calls=Inline()), engine  # type: ignore[arg-type]


async def run(
    world: World, mode: str, *, train_s: float, steps: int, max_staleness: int = 1, over_sampling: float = 2.0
) -> Found:
    """``steps`` steps, the first two not counted. Each trains on exactly ``world.groups`` groups, none twice."""
    batch, engine = build(world, mode, max_staleness, over_sampling)
    loop, seen = asyncio.get_running_loop(), set()
    begins, waits, rows, lengths = [], [], [], []
    for version in range(steps):
        begins.append(loop.time())
        collected = await batch.collect(version)
        waits.append(loop.time() - begins[-1])
        assert len(collected.groups) == world.groups
        uids = {group.prompt.uid for group in collected.groups}
        assert len(uids) == world.groups and not uids & seen
        seen |= uids
        rows.append(collected.stats)
        assert collected.stats["rollout/staleness_max"] <= max_staleness
        lengths += [e.num_model_tokens for g in collected.groups for e in g.episodes]
        await asyncio.sleep(train_s)
        await batch.pause()
        await engine.update_weights((), version + 1)
        await batch.resume()
        batch.trained(collected)
    end = loop.time()
    await batch.close()
    counted = rows[2:]

    def mean(name: str) -> float:
        return statistics.fmean(row.get(name, 0.0) for row in counted)

    return Found(
        step_s=(end - begins[2]) / len(counted),
        collect_s=statistics.fmean(waits[2:]),
        staleness=mean("rollout/staleness"),
        staleness_tokens=mean("rollout/staleness_tokens"),
        staleness_max=max(row["rollout/staleness_max"] for row in counted),
        dropped_stale=mean("rollout/dropped/stale") + mean("rollout/groups_given_up"),
        length=statistics.fmean(lengths),
    )


VARIANTS = (
    ("sync", 1, 1.0),
    ("partial", 1, 2.0),
    ("partial", 2, 2.0),
    ("partial", 2, 3.0),
    ("async", 1, 1.0),
    ("async", 2, 1.0),
    ("async", 3, 1.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--groups", type=int, default=World.groups)
    parser.add_argument("--slots", type=int, default=World.slots)
    parser.add_argument("--sigma", type=float, default=World.sigma)
    parser.add_argument("--out", type=Path, help="the same as CSV")
    given = parser.parse_args()
    found: dict[tuple[str, int, float], list[Found]] = {variant: [] for variant in VARIANTS}
    for seed in range(given.seeds):
        world = World(seed, groups=given.groups, slots=given.slots, sigma=given.sigma)
        rollout_s = simulated(run(world, "sync", train_s=0.0, steps=given.steps)).collect_s
        for mode, max_staleness, over_sampling in VARIANTS:
            train_s = TRAIN_SHARE * rollout_s
            work = run(
                world,
                mode,
                train_s=train_s,
                steps=given.steps,
                max_staleness=max_staleness,
                over_sampling=over_sampling,
            )
            found[mode, max_staleness, over_sampling].append(simulated(work))
    print("| mode | max_staleness | over_sampling | step, s | waits for groups, s | faster than sync (least of seeds) |"
          " staleness of groups, of tokens, largest | too old a step | mean tokens of an answer |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    plain, rows = [f.step_s for f in found[VARIANTS[0]]], []
    for (mode, max_staleness, over_sampling), results in found.items():
        gains = [base / f.step_s for base, f in zip(plain, results, strict=True)]
        of = {name: statistics.fmean(getattr(f, name) for f in results) for name in vars(results[0])}
        gain, ages = f"{statistics.median(gains):.2f} ({min(gains):.2f})", ("staleness", "staleness_tokens")
        cells = [mode, f"{max_staleness}", f"{over_sampling:g}", f"{of['step_s']:.0f}", f"{of['collect_s']:.0f}", gain]
        cells += [", ".join([*(f"{of[name]:.2f}" for name in ages), f"{of['staleness_max']:.0f}"])]
        print("|", " | ".join([*cells, f"{of['dropped_stale']:.2f}", f"{of['length']:.0f}"]), "|", flush=True)
        key = {"mode": mode, "max_staleness": max_staleness, "over_sampling": over_sampling, "seeds": given.seeds}
        fast = {"faster_median": statistics.median(gains), "faster_least": min(gains)}
        rows.append({**key, **{name: f"{value:.4g}" for name, value in (fast | of).items()}})
    if given.out is not None:
        with given.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
