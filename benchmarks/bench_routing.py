"""One SGLang server against two, with sticky and with random routing: tokens/s, and the share of prompt tokens that
came from the caches, in the quickstart's conversations.

    python benchmarks/bench_routing.py --server-python ENV/bin/python [--repeats 5] [--groups 6] [--out FILE.csv]

Three servers run on this machine: one with all its cores, and two with half of them each. They are asked in turn, each
time for conversations over the same prompts (8 samples, up to 5 turns), with empty caches; the first round is warm-up.
Exit code 1 where a goal is missed: with sticky routing 80 % from the caches, and two servers no slower than one.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from _harness import MODEL, ROOT, hardware
from safetensors import safe_open

from mdapo.config.load import load
from mdapo.config.model_facts import require_facts
from mdapo.config.schema import Config
from mdapo.data.chat import ChatFormat
from mdapo.data.prompts import PromptStream, load_prompts
from mdapo.environments.calling import load_environment
from mdapo.rewards.runner import RewardRunner
from mdapo.rollout.dynamic_batch import DynamicBatch
from mdapo.rollout.sglang_client import open_session
from mdapo.rollout.sglang_engine import SGLangEngine
from mdapo.rollout.sglang_options import ServerOptions
from mdapo.rollout.sglang_routing import Routes
from mdapo.rollout.sglang_server import Server
from mdapo.rollout.sglang_servers import Address
from mdapo.sync.disk import DiskTransport
from mdapo.sync.push import Pusher

START_S = 900.0
GOAL_SHARE, GOAL_SPEED = 0.80, 1.0
ONE, STICKY, RANDOM = "one server", "two, sticky", "two, random"


class RandomRoutes(Routes):
    """Each turn anywhere, as a balancer does that knows nothing of prefixes."""

    def __init__(self, places: int) -> None:
        super().__init__(places)
        self.rng = random.Random(0)

    def pick(self, session: str, group: str, *, usable: Sequence[str], load: Mapping[str, int]) -> str:
        return self.rng.choice(usable)


def settings(groups: int) -> Config:
    changes = {
        "model.path": MODEL,
        "rollout.engine": "sglang",
        "data.train_prompt_bsz": groups,
        "data.gen_batch_size": groups,
        "actor.ppo_mini_batch_size": groups,
        "algorithm.filter_groups.max_num_gen_batches": 1,  # one round: the same conversations for all
    }
    return load(ROOT / "configs" / "quickstart.yaml", [f"{key}={value}" for key, value in changes.items()]).config


class Arm:
    """One way to be measured."""

    def __init__(self, name: str, engine: SGLangEngine) -> None:
        self.name, self.engine = name, engine
        self.speeds: list[float] = []
        self.shares: list[float] = []

    async def round(self, config: Config, number: int) -> None:
        """The conversations of round ``number``; its tokens/s and share are kept."""
        prompts = load_prompts(config.data.train_files, config.data)
        rewards = RewardRunner(config.reward, default=config.environment.name)
        batch = DynamicBatch(
            self.engine,
            ChatFormat.from_folder(str(MODEL)),
            load_environment(config.environment),
            rewards,
            PromptStream(prompts, seed=number, shuffle=True),
            config,
        )
        await self.engine.abort()
        self.engine.metrics()
        began = time.monotonic()
        collected = await batch.collect(self.engine.version)
        seconds = time.monotonic() - began
        rewards.close()
        found = self.engine.metrics()
        assert (found["engine/failures"], found["engine/retries"]) == (0.0, 0.0), found
        self.speeds.append(collected.stats["rollout/tokens"] / seconds)
        self.shares.append(found["engine/cached_share"])


async def engine_over(servers: Sequence[Server], config: Config, pusher: Pusher, *, sticky: bool) -> SGLangEngine:
    engine = SGLangEngine(
        [Address(server.url, server.key) for server in servers],
        session=open_session(),
        vocab_size=49152,
        sync=pusher.send,
        max_running=config.rollout.max_running,
    )
    if not sticky:
        engine.routes = RandomRoutes(config.rollout.max_running)
    return engine


async def measure(servers: Sequence[Server], config: Config, *, repeats: int) -> list[Arm]:
    weights = tempfile.TemporaryDirectory()
    transport = DiskTransport(Path(weights.name), timeout_s=120.0)
    pusher = Pusher(transport, require_facts(MODEL), bucket_bytes=128 << 20, timeout_s=120.0)
    arms = [
        Arm(ONE, await engine_over(servers[:1], config, pusher, sticky=True)),
        Arm(STICKY, await engine_over(servers[1:], config, pusher, sticky=True)),
        Arm(RANDOM, await engine_over(servers[1:], config, pusher, sticky=False)),
    ]
    try:
        with safe_open(MODEL / "model.safetensors", framework="pt") as held:
            for arm in arms:
                await arm.engine.update_weights(((name, held.get_tensor(name)) for name in held.keys()), 1)  # noqa: SIM118
        for number in range(repeats + 1):
            for arm in arms:
                await arm.round(config, number)
            told = ", ".join(f"{arm.name} {arm.speeds[-1]:.0f} tokens/s {arm.shares[-1]:.0%}" for arm in arms)
            print(f"  {'warm-up' if number == 0 else f'round {number}/{repeats}'}: {told}", flush=True)
    finally:
        for arm in arms:
            await arm.engine.close()
        await pusher.close()
        weights.cleanup()
    return arms


async def run(args: argparse.Namespace) -> list[Arm]:
    cores = len(os.sched_getaffinity(0))
    config = settings(args.groups)
    with tempfile.TemporaryDirectory() as folder:
        servers = [
            Server(
                ServerOptions(
                    str(MODEL),
                    max_context=config.model.max_context,
                    max_running=config.rollout.max_running,
                    python=args.server_python,
                    threads=max(threads, 1),
                    engine_args={"max_total_tokens": 24576},
                ),
                log=Path(folder, f"{number}.log"),
            )
            for number, threads in enumerate((cores, cores // 2, cores // 2))
        ]
        try:
            for server in servers:
                await server.start(START_S)
            return await measure(servers, config, repeats=args.repeats)
        finally:
            await asyncio.gather(*(server.stop() for server in servers))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server-python", required=True, help="interpreter with SGLang")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--groups", type=int, default=6, help="prompts of a round")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "routing.csv")
    args = parser.parse_args()
    print(f"{hardware()}, {MODEL.name}, bfloat16, {args.groups} prompts x 8 samples", flush=True)
    arms = asyncio.run(run(args))
    rows = []
    print(f"{'':14} {'tokens/s':>9} {'(lowest to highest)':>20} {'from caches':>12}")
    for arm in arms:
        speeds, share = arm.speeds[1:], statistics.median(arm.shares[1:])
        speed, spread = statistics.median(speeds), f"{min(speeds):.0f} to {max(speeds):.0f}"
        print(f"{arm.name:14} {speed:9.1f} {spread:>20} {share:12.1%}")
        rows.append([hardware(), arm.name, args.repeats, f"{speed:.1f}", spread, f"{share:.4f}"])
    with args.out.open("w", newline="") as file:
        csv.writer(file).writerows([["hardware", "arm", "rounds", "tokens_per_s", "spread", "cached_share"], *rows])
    by_name = {arm.name: arm for arm in arms}
    faster = [two / one for one, two in zip(by_name[ONE].speeds[1:], by_name[STICKY].speeds[1:], strict=True)]
    ratio, share = statistics.median(faster), statistics.median(by_name[STICKY].shares[1:])
    print(f"two servers over one: {ratio:.2f} x, goal {GOAL_SPEED:g}; from caches {share:.1%}, goal {GOAL_SHARE:.0%}")
    return int(ratio < GOAL_SPEED or share < GOAL_SHARE)


if __name__ == "__main__":
    raise SystemExit(main())
