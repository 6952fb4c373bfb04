"""One rank of a weight sync into a real server: ``torchrun sync_rank.py CASE.json``.

A Megatron actor makes a real optimizer step, brings its weights to the server, and compares log-probs: for each mode,
with buckets smaller than the model. Rank 0 writes what it found.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import torch
from plain_client import PlainClient
from tiny_models import config, loss_fn, pack, sequences

from mdapo.config.model_facts import require_facts
from mdapo.megatron import layout as layouts
from mdapo.megatron.actor import Actor
from mdapo.megatron.layout import broadcast_bytes
from mdapo.rollout.event_loop import EventLoop
from mdapo.sync.build import build_pusher
from mdapo.sync.memory import Colocated
from mdapo.sync.push import Pusher
from mdapo.sync.servers import Fleet
from mdapo.sync.weights import sync_weights


class Servers:
    """What ``sync_weights`` needs of the engine; the SGLang engine has its own tests."""

    def __init__(self, pusher: Pusher, servers: list[PlainClient]) -> None:
        self.pusher, self.servers = pusher, servers

    async def update_weights(self, weights: Any, version: int) -> None:
        await self.pusher.send(self.servers, weights, version)


class Watch(threading.Thread):
    """The largest resident set of this process while it runs, in bytes, shared memory included."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.peak = resident()
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.002):
            self.peak = max(self.peak, resident())

    def growth(self) -> int:
        self.done.set()
        self.join()
        return self.peak - self.before


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def step(actor: Actor, vocab: int, seed: int) -> None:
    batch = pack(sequences(4, seed=seed, longest=40, vocab=vocab), multiple=actor.layout.token_multiple, total=60)
    stats = actor.update([batch], loss_fn)
    assert not stats.skipped


def gap(actor: Actor, vocab: int, ask: Any) -> tuple[float, str]:
    """Largest difference of log-probs over some sequences; rank 0 asks the server, every rank scores."""
    seqs = [(ids, mask | True) for ids, mask in sequences(3, seed=99, longest=30, vocab=vocab)]
    largest, version = 0.0, ""
    for seq in seqs:
        [ours_R] = actor.logprobs([pack([seq], multiple=actor.layout.token_multiple)])
        if ask is not None:
            theirs, version = ask(seq[0].tolist())
            largest = max(largest, (ours_R - torch.tensor(theirs)).abs().max().item())
    return largest, version


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    cfg = config(
        Path(case["model"]),
        actor={"lr": case["lr"], "clip_grad": 1.0},
        parallel={"tensor": case["tp"]},
        run={"threads": 1},
    )
    layout = layouts.init_distributed(cfg, 120.0)
    actor = Actor(cfg, layout)
    actor.load_hf(case["model"])
    facts, lead = require_facts(case["model"]), layout.rank == 0
    runner = EventLoop() if lead else None
    session = runner.run(_session()) if runner is not None else None
    client = PlainClient(case["url"], case["key"], session) if session is not None else None
    ask = (lambda ids: runner.run(client.logprobs(ids))) if lead else None
    found: list[dict[str, Any]] = []
    version = case["version"]
    for mode in case["modes"]:
        sync = {"mode": mode, "bucket_mb": case["bucket_mb"], "timeout_s": 100.0}
        if mode == "disk":
            sync["dir"] = case["folder"]
        own = cfg.model_copy(update={"sync": cfg.sync.model_copy(update=sync)})
        pusher = build_pusher(
            own, facts, device=layout.device, servers_on="cpu", urls=[case["url"]], ranks=1, colocated=False
        ) if lead else None  # fmt: skip
        if pusher is not None and case["colocated"]:
            pusher.occupation = Colocated(timeout_s=100.0)
        engine = Servers(pusher, [client]) if pusher is not None and client is not None else None
        for repeat in range(case["repeats"]):
            version += 1
            step(actor, facts.vocab, seed=version)
            away_s = 0.0
            before, _ = gap(actor, facts.vocab, ask)
            if pusher is not None and runner is not None and client is not None and repeat > 0:
                fleet, began = Fleet.of([client]), time.monotonic()
                runner.run(pusher.occupation.give_back(fleet))
                away_s = time.monotonic() - began
                assert not fleet.failed, fleet.failed
            watch = Watch()
            watch.start()
            began = time.monotonic()
            sync_weights(actor, engine, version=version, loop=runner, pusher=pusher)
            seconds, growth = time.monotonic() - began, watch.growth()
            after, said = gap(actor, facts.vocab, ask)
            if pusher is not None and pusher.last is not None:
                found.append({
                    "mode": mode, "repeat": repeat, "before": before, "after": after, "said": said, "version": version,
                    "failed": dict(pusher.last.failed), "bytes": pusher.last.bytes_sent, "growth": growth,
                    "seconds": seconds, "away_s": away_s,
                })  # fmt: skip
        if pusher is not None and runner is not None:
            runner.run(pusher.close())
    if lead and runner is not None and session is not None:
        runner.run(session.close())
        runner.close()
        Path(case["result"]).write_text(json.dumps(found))
    broadcast_bytes(b"done" if lead else None)
    layouts.destroy()


async def _session() -> aiohttp.ClientSession:
    # The server closes connections that are idle for 5 s; nothing here would notice during an optimizer step.
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))


if __name__ == "__main__":
    main()
