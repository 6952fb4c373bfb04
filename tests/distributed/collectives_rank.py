"""Four ranks: bytes and numbers between ranks, and a step that is bad on one rank only. Raises where one is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tiny_models import config, loss_fn, pack, sequences

from mdapo.megatron import layout as layouts
from mdapo.megatron.actor import Actor
from mdapo.types import MicroBatch


def check_bytes(layout: layouts.Layout) -> None:
    for size in (0, 1, 70_001):
        shares = [bytes([65 + rank]) * (size + rank) for rank in range(layout.dp)]
        own = layouts.scatter_shares(shares if layout.rank == 0 else None)
        assert own == shares[layout.dp_rank]
        assert layouts.broadcast_bytes(shares[-1] if layout.rank == 0 else None) == shares[-1]


def check_numbers(layout: layouts.Layout) -> None:
    reduced = layouts.reduce_metrics({"sum": 2.0**40 + layout.dp_rank, "worst_max": float(layout.dp_rank)})
    replicas = layout.dp * 2.0**40 + sum(range(layout.dp))  # exact in float64; TP and PP peers count once
    assert reduced == {"sum": replicas, "worst_max": layout.dp - 1.0}
    last = layouts.from_last_stage({"x": 0.1} if layout.is_last_stage else None)
    assert last == {"x": 0.1}


def check_one_bad_rank(layout: layouts.Layout, model: Path) -> None:
    """Case 8 of the promises: a gradient that is not finite on one replica makes all ranks skip together."""
    actor = Actor(config(model, parallel=PARALLEL), layout)
    actor.load_hf(str(model))
    batch = pack(sequences(2, seed=layout.dp_rank), multiple=layout.token_multiple, total=40)
    before = [p.detach().clone() for chunk in actor.chunks for p in chunk.parameters()]

    def bad(logps_R: torch.Tensor, entropies_R: torch.Tensor, mb: MicroBatch):
        loss, metrics = loss_fn(logps_R, entropies_R, mb)
        return loss * (float("nan") if layout.dp_rank == layout.dp - 1 else 1.0), metrics

    stats = actor.update([batch], bad)
    assert stats.skipped
    after = [p.detach() for chunk in actor.chunks for p in chunk.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    good = actor.update([batch], loss_fn)
    assert not good.skipped and good.metrics["tokens"] > len(batch.targets_R) * 1.2


if __name__ == "__main__":
    PARALLEL = json.loads(sys.argv[1])
    here = layouts.init_distributed(config(Path(sys.argv[2]), parallel=PARALLEL, run={"threads": 1}), 60.0)
    check_bytes(here)
    check_numbers(here)
    check_one_bad_rank(here, Path(sys.argv[2]))
    layouts.destroy()
