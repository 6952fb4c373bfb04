"""Seconds, bytes and memory of a weight sync into a running SGLang server, for each mode; verification included.

    python benchmarks/bench_sync.py --server-python ENV/bin/python [--repeats 7] [--out FILE.csv]

The actor is one rank of Megatron; the server, started here, serves the same model in the same dtype. Memory is the most
that this process held during a sync beyond what it held before, the bucket included. The first sync of a mode, which
makes its group or folder, is shown apart, its memory counts. Exit code 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from _harness import MODEL, ROOT, forget_peak, hardware, most_held

from mdapo.config.model_facts import require_facts
from mdapo.config.schema import Config
from mdapo.megatron import layout as layouts
from mdapo.megatron.actor import Actor
from mdapo.rollout.sglang_client import Client, open_session
from mdapo.rollout.sglang_options import ServerOptions
from mdapo.rollout.sglang_server import Server
from mdapo.sync.build import build_pusher

GOALS_S = {"tensor": 1.0, "distributed": 1.0, "disk": None}
GOAL_MEMORY = 1.1  # of a bucket
DTYPES: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16", "float32")
START_S = 300.0


@dataclass(frozen=True)
class Sync:
    seconds: float
    bytes_sent: int
    memory: int


async def syncs(config: Config, actor: Actor, server: Server, *, repeats: int) -> list[Sync]:
    """The first and ``repeats`` more. An error where one fails."""
    facts = require_facts(config.model.path)
    pusher = build_pusher(
        config, facts, device=actor.layout.device, servers_on="cpu", urls=[server.url], ranks=1, colocated=False
    )
    found = []
    async with open_session() as session:
        client = Client(server.url, server.key, session=session, vocab_size=facts.vocab)
        for version in range(1, repeats + 2):
            before = forget_peak()
            outcome = await pusher.push([client], actor.export(), version)
            assert not outcome.failed, outcome.failed
            found.append(Sync(outcome.seconds, outcome.bytes_sent, most_held() - before))
        await pusher.close()
    return found


async def measure(base: dict[str, Any], args: argparse.Namespace, folder: Path) -> list[list[Any]]:
    """A row for each mode, printed as it is known."""
    dtype = base["model"]["dtype"]
    config = Config.model_validate(base)
    actor = Actor(config, layouts.init_distributed(config, 600.0), trainable=False)
    actor.load_hf(str(MODEL))
    options = ServerOptions(
        str(MODEL), dtype=dtype, max_context=512, python=args.server_python, engine_args={"max_total_tokens": 4096}
    )
    server, rows = Server(options, log=folder / "server.log"), []
    try:
        await server.start(START_S)
        for mode, goal in GOALS_S.items():
            sync = {"mode": mode, "bucket_mb": args.bucket_mb, **({"dir": str(folder)} if mode == "disk" else {})}
            first, *rest = await syncs(
                Config.model_validate({**base, "sync": sync}), actor, server, repeats=args.repeats
            )
            rows.append(row(dtype, mode, goal, first, rest, bucket=args.bucket_mb << 20))
    finally:
        await server.stop()
        layouts.destroy()
    return rows


def row(dtype: str, mode: str, goal: float | None, first: Sync, rest: Sequence[Sync], *, bucket: int) -> list[Any]:
    median = statistics.median(one.seconds for one in rest)
    spread = f"{min(one.seconds for one in rest):.2f} to {max(one.seconds for one in rest):.2f}"
    memory = max(one.memory for one in (first, *rest))
    sent = first.bytes_sent
    assert all(one.bytes_sent == sent for one in rest)
    met = (goal is None or median <= goal) and memory <= GOAL_MEMORY * bucket
    print(
        f"{dtype:9} {mode:12} {median:.3f} s ({spread}; the first {first.seconds:.2f}), {sent:,} bytes, memory "
        f"+ {memory / 2**20:.0f} MiB{'' if met else '  MISSED'}",
        flush=True,
    )
    return [hardware(), dtype, mode, f"{median:.3f}", spread, sent, f"{memory / 2**20:.0f}", "yes" if met else "no"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server-python", required=True, help="interpreter with SGLang")
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "sync.csv")
    args = parser.parse_args()
    print(f"{hardware()}, {MODEL.name}, buckets of {args.bucket_mb} MiB; goals: 1 s, 1.1 buckets", flush=True)
    rows: list[list[Any]] = []
    for dtype in DTYPES:
        base = {"model": {"path": str(MODEL), "dtype": dtype}, "data": {"train_files": ["none.jsonl"]}}
        with tempfile.TemporaryDirectory() as folder:
            rows += asyncio.run(measure(base, args, Path(folder)))
    names = ["hardware", "dtype", "mode", "median_s", "spread_s", "bytes", "memory_mib", "met"]
    with args.out.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([names, *rows])
    return int(any(found[-1] == "no" for found in rows))


if __name__ == "__main__":
    raise SystemExit(main())
