"""Seconds and bytes of a weight sync into a running SGLang server, for each mode: medians, verification included.

    MDAPO_KEY=... python benchmarks/bench_sync.py --url http://127.0.0.1:30000 [--dtype float32] [--repeats 7]

The actor is one rank of Megatron; the server serves the same model. The first sync of a mode, which makes its group or
folder, is shown apart. Exit code 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from pathlib import Path

from _harness import MODEL, hardware

from mdapo.config.model_facts import require_facts
from mdapo.config.schema import Config
from mdapo.megatron import layout as layouts
from mdapo.megatron.actor import Actor
from mdapo.rollout.sglang_client import Client, open_session
from mdapo.sync.build import build_pusher

GOALS_S = {"tensor": 1.0, "distributed": 1.0, "disk": None}


async def measure(config: Config, actor: Actor, *, url: str, repeats: int) -> list[tuple[float, int]]:
    """(seconds, bytes) of each sync. An error where one fails."""
    facts = require_facts(config.model.path)
    pusher = build_pusher(
        config, facts, device=actor.layout.device, servers_on="cpu", urls=[url], ranks=1, colocated=False
    )
    found = []
    async with open_session() as session:
        client = Client(url, os.environ.get("MDAPO_KEY", ""), session=session, vocab_size=facts.vocab)
        for version in range(1, repeats + 2):
            outcome = await pusher.push([client], actor.export(), version)
            assert not outcome.failed, outcome.failed
            found.append((outcome.seconds, outcome.bytes_sent))
        await pusher.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the actor's weights")
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", default="/tmp/mdapo-bench-sync", help="of mode disk")
    args = parser.parse_args()
    base = {"model": {"path": str(args.model), "dtype": args.dtype}, "data": {"train_files": ["none.jsonl"]}}
    layout = layouts.init_distributed(Config.model_validate(base), 600.0)
    actor = Actor(Config.model_validate(base), layout, trainable=False)
    actor.load_hf(str(args.model))
    print(f"{hardware()}, {args.model.name}, {args.dtype}, buckets of {args.bucket_mb} MiB")
    missed = False
    for mode, goal in GOALS_S.items():
        sync = {"mode": mode, "bucket_mb": args.bucket_mb, **({"dir": args.folder} if mode == "disk" else {})}
        config = Config.model_validate({**base, "sync": sync})
        (first, _), *rest = asyncio.run(measure(config, actor, url=args.url, repeats=args.repeats))
        median = statistics.median(seconds for seconds, _ in rest)
        missed |= goal is not None and median > goal
        spread = f"{min(s for s, _ in rest):.3f} to {max(s for s, _ in rest):.3f}"
        wanted = "" if goal is None else f", goal {goal:.1f}"
        print(f"{mode:12} {median:.3f} s ({spread}; the first {first:.3f}){wanted}; {rest[0][1]:,} bytes each")
    layouts.destroy()
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
