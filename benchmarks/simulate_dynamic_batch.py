"""Dynamic sampling's policies at equal batches, on a simulated clock: samples, seconds, busy slots, length bias.

Ours is mdapo's own code: the dynamic batch of `rollout/kinds.py` with its stages, filter, ledger, prompt stream and
pass rates. Simulated are the clock, an engine of 2,048 slots, first come first served, and the world:

* 17,000 prompts of mixed difficulty (mid training: 30 % hard, 30 % easy, 40 % in between), each with a pass rate whose
  logit drifts with every step, upwards on the whole; each conversation passes by chance at that rate;
* log-normal lengths (median 2,000 tokens, sigma 0.9, at most 16,384), independent of difficulty; one tick is 64 tokens;
* 512 groups a step. Training itself takes no time here: `simulate_rollout.py` is about that.

The peers are modelled after their public code:

* *verl* (its recipe ``dapo``): rounds of ``gen_batch_size`` = 1,536 prompts, each run to its end; groups without spread
  are thrown away; once there are 512, the first 512 train and the surplus is thrown away. After ``max_num_gen_batches``
  = 10 rounds it raises.
* *slime* (``generate_rollout``): waves of ``over_sampling_batch_size`` = 512 prompts; whenever fewer than 512 are
  finished and kept or under way, a whole wave more; the first 512 to finish train; the rest is aborted and thrown away.
* *slime, partial* (``partial_rollout``): the aborted go on, first, in the next step, however old they are by then.

    python benchmarks/simulate_dynamic_batch.py --out benchmarks/results/dynamic_batch
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import gc
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sampling_peers import slime, verl
from sampling_world import LENGTHS, Collect, Policy, Step, Talks, World, data
from simulated import Slots, simulated

from mdapo.config.schema import Config
from mdapo.data.prompts import PromptStream
from mdapo.errors import NothingLearnableError
from mdapo.rollout.kinds import batch_of

SHORT_WARM = 4  # steps


def ours(world: World, policy: Policy, slots: Slots, **keys: Any) -> Collect:
    skip, mode = keys.pop("skip", False), keys.pop("mode", "sync")
    filters = {"sample": "yield", "carry_over": mode != "sync", "skip_prompts": {"enable": skip}}
    filters |= keys.pop("filters", {})
    config = Config.model_validate(
        {
            "run": {"seed": world.seed},
            "model": {"path": "simulated"},
            "data": {"train_files": ["x"], "train_prompt_bsz": world.groups, "gen_batch_size": int(2.5 * world.groups)},
            "rollout": {"mode": mode, "n_resp_per_prompt": world.n, **keys},
            "algorithm": {"filter_groups": filters},
        }
    )
    talks: Any = Talks(policy, slots)
    stream = PromptStream(data(world), seed=world.seed, shuffle=True)
    batch = batch_of(config)(talks.engine, None, None, None, stream, config)  # type: ignore[arg-type]
    batch.talks = batch._running.talks = talks

    async def collect(version: int) -> Step:
        talks.engine.version = version
        collected = await batch.collect(version)
        batch.trained(collected)
        stats = collected.stats
        begun = stats["rollout/groups_begun"] + stats["rollout/groups_unfinished_in"]
        return Step(list(collected.groups), int(begun - stats["rollout/groups_unfinished"]), stats)

    return collect


POLICIES: dict[str, Callable[[World, Policy, Slots], Collect]] = {
    "verl": verl,
    "slime": partial(slime, goes_on=False),
    "slime, partial": partial(slime, goes_on=True),
    "sync": partial(ours, max_staleness=0),
    "sync, skip": partial(ours, max_staleness=0, skip=True),
    "partial 1": partial(ours, mode="partial", max_staleness=1),
    "partial 2": partial(ours, mode="partial", max_staleness=2),
    "partial 1, skip": partial(ours, mode="partial", max_staleness=1, skip=True),
    "partial 2, skip": partial(ours, mode="partial", max_staleness=2, skip=True),
}


@dataclass(frozen=True)
class Found:
    """Of one run, over the steps measured. ``samples``: generated for each one accepted; ``bound``: one over the yield
    of the data as it comes; ``busy``: share of the slots' time; ``length``: of trained conversations over that of all
    there are; ``older``, ``oldest``: share of trained groups that were begun before their step, and their age."""

    policy: str
    n: int
    seed: int
    samples: float
    bound: float
    step_s: float
    busy: float
    length: float
    older: float
    oldest: float
    stale: float  # groups a step that became too old
    skipped: float  # share of the prompts dealt


async def run(name: str, world: World, *, steps: int, warm: int) -> Found:
    policy, slots = Policy(world), Slots(world.slots, 1.0)
    first = 0 if "skip" in name else warm - SHORT_WARM  # who remembers no prompts needs no epoch to warm up
    for _ in range(first):
        policy.learn()
    collect, loop = POLICIES[name](world, policy, slots), asyncio.get_running_loop()
    rows, yields, begin, busy = [], [], 0.0, 0.0
    for version in range(first, steps):
        if version == warm:
            begin, busy = loop.time(), slots.busy_s
        step = await collect(version)
        assert len(step.groups) == world.groups
        if version >= warm:
            rows.append((version, step))
            yields.append(policy.expected_yield)
        policy.learn()
    spent, busy = loop.time() - begin, slots.busy_s - busy
    ages = [version - group.version for version, step in rows for group in step.groups]
    lengths = [len(e.turns[0].ids) for _, step in rows for group in step.groups for e in group.episodes]

    def mean(key: str) -> float:
        return statistics.fmean(step.stats.get(key, 0.0) for _, step in rows)

    return Found(
        policy=name,
        n=world.n,
        seed=world.seed,
        samples=sum(step.asked for _, step in rows) / (len(rows) * world.groups),
        bound=1.0 / statistics.fmean(yields),
        step_s=spent / len(rows),
        busy=busy / (spent * world.slots),
        length=statistics.fmean(lengths) / statistics.fmean(LENGTHS),
        older=statistics.fmean(age > 0 for age in ages),
        oldest=max(ages),
        stale=mean("rollout/dropped/stale") + mean("rollout/groups_given_up") * (mean("rollout/staleness_max") > 0),
        skipped=mean("rollout/skip/share"),
    )


def timed(name: str, world: World, *, steps: int, warm: int) -> Found:
    began = time.perf_counter()
    gc.collect()
    gc.disable()  # of the many objects of a run next to none are in cycles
    found = simulated(run(name, world, steps=steps, warm=warm))
    print(f"{name}, n={world.n}, seed {world.seed}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return found


def adversarial(count: int) -> None:
    """Small worlds in which next to nothing teaches; prints how many runs neither ended nor stopped as told."""
    ends, dead, most = Counter[str](), 0, 0.0
    for i in range(count):
        kind = ("all right", "all wrong", "one of 1,000 prompts")[i % 3]
        limit, sample = ("train_partial", "skip", "stop")[i // 3 % 3], ("yield", "wave")[i // 9 % 2]
        mode, skip = ("sync", "partial")[i // 18 % 2], bool(i // 36 % 2)
        world = World(i, n=4, scale=1 / 128)
        keys = {"mode": mode, "max_staleness": 1, "skip": skip, "filters": {"on_limit": limit, "sample": sample}}
        try:
            asked = simulated(no_hope(world, kind, keys))
            ends["ran to its last step"] += 1
            most = max(most, asked)
        except NothingLearnableError:
            ends["stopped, as on_limit says"] += 1
        except (AssertionError, TimeoutError) as error:
            dead += 1
            print(f"run {i} ({kind}, {keys}): {error!r}", file=sys.stderr)
    ended = ", ".join(f"{number} {end}" for end, number in sorted(ends.items()))
    print(f"dead loops: {dead} of {count} adversarial runs; {ended}; at most {most:.1f} waves asked in a step")


async def no_hope(world: World, kind: str, keys: dict[str, Any], *, steps: int = 3) -> float:
    """The most waves that a step asked."""
    policy, slots = Policy(world), Slots(world.slots, 1.0)
    policy.logits[:] = 99.0 if kind == "all right" else -99.0
    policy.rates = (policy.logits > 0).astype(float)
    policy.rates[:: 1000 if "one" in kind else len(policy.rates) + 1] = 0.5 if "one" in kind else policy.rates[0]
    collect, wave = ours(world, policy, slots, **keys), int(2.5 * world.groups)
    async with asyncio.timeout(1e6):
        return max([(await collect(version)).asked / wave for version in range(steps)])


def table(found: Sequence[Found]) -> list[dict[str, str]]:
    """A row a policy and n: means over the seeds, and the gain over verl of the same seeds, median and least."""
    rows = []
    for n in sorted({f.n for f in found}):
        base = {f.seed: f.step_s for f in found if f.n == n and f.policy == "verl"}
        for policy in dict.fromkeys(f.policy for f in found):
            runs = [f for f in found if (f.policy, f.n) == (policy, n)]
            of = {name: statistics.fmean(getattr(f, name) for f in runs) for name in MEANS}
            gains = [base[f.seed] / f.step_s for f in runs if f.seed in base] or [math.nan]
            row = {"n": str(n), "policy": policy, "samples per accepted": f"{of['samples']:.2f}"}
            row["over 1 / yield"] = f"{statistics.fmean(f.samples / f.bound for f in runs):.3f}"
            row["faster than verl (least of seeds)"] = f"{statistics.median(gains):.2f} ({min(gains):.2f})"
            row["slots busy"] = f"{of['busy']:.1%}"
            row["length of trained"] = f"{of['length']:.3f}"
            row["begun earlier"] = f"{of['older']:.0%}, at most {max(f.oldest for f in runs)}"
            row["too old a step"] = f"{of['stale']:.1f}"
            row["prompts skipped"] = f"{of['skipped']:.0%}"
            rows.append(row)
    return rows


MEANS = ("samples", "step_s", "busy", "length", "older", "stale", "skipped")


def plot(rows: Sequence[dict[str, str]]) -> str:
    """SVG: gain over verl, a bar a policy, by n."""
    bar, left, unit = 18, 170, 150
    parts = []
    for i, row in enumerate(rows):
        y, gain = 30 + i * (bar + 4), float(row["faster than verl (least of seeds)"].split()[0])
        colour = "#888" if row["policy"] in ("verl", "slime", "slime, partial") else "#27c"
        parts.append(f'<text x="{left - 6}" y="{y + 13}" text-anchor="end">{row["policy"]}, n={row["n"]}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{gain * unit:.0f}" height="{bar}" fill="{colour}"/>')
        label = f"{gain:.2f} x; {row['samples per accepted']} samples"
        parts.append(f'<text x="{left + gain * unit + 6:.0f}" y="{y + 13}">{label}</text>')
    height = 50 + len(rows) * (bar + 4)
    namespace = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12"'
    head = f'<svg {namespace} width="880" height="{height}">'
    title = '<text x="10" y="18">rollout of a step, faster than verl; samples generated per sample accepted</text>'
    return "\n".join([head, title, *parts, "</svg>", ""])


def write(found: Sequence[Found], out: Path) -> None:
    """One line a run, and the plot."""
    with out.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(asdict(found[0])))
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in asdict(f).items()} for f in found)
    out.with_suffix(".svg").write_text(plot(table(found)), encoding="utf-8")


def read(path: Path) -> list[Found]:
    kinds: dict[str, Any] = {"policy": str, "n": int, "seed": int, "oldest": int}
    with path.open(newline="", encoding="utf-8") as file:
        return [Found(**{k: kinds.get(k, float)(v) for k, v in row.items()}) for row in csv.DictReader(file)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES), metavar="POLICY")
    parser.add_argument("--scale", type=float, default=1.0, help="of groups, prompts and slots")
    parser.add_argument("--n", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--warm", type=int, default=20, help="steps before those measured: more than an epoch")
    parser.add_argument("--out", type=Path, help="writes OUT.csv and OUT.svg")
    parser.add_argument("--adversarial", type=int, default=0, help="so many runs in which next to nothing teaches")
    parser.add_argument("--read", type=Path, nargs="+", default=[], help="runs made before, CSV; none are made then")
    given = parser.parse_args()
    if given.adversarial:
        adversarial(given.adversarial)
        return
    names = ["verl", *(name for name in given.policies if name != "verl")]
    found: list[Found] = []
    for path in given.read:
        found += read(path)
    for seed in given.seeds if not given.read else ():
        for n in given.n:
            world = World(seed, n, given.scale)
            found += [timed(name, world, steps=given.steps, warm=given.warm) for name in names]
            if given.out is not None:
                write(found, given.out)
    if given.read and given.out is not None:
        write(found, given.out)
    rows = table(found)
    print("|", " | ".join(rows[0]), "|")
    print("|", " | ".join("---" for _ in rows[0]), "|")
    for row in rows:
        print("|", " | ".join(row.values()), "|")


if __name__ == "__main__":
    main()
