"""What one rank does for all in a step, at scale: plan, pack and scatter 131,072 samples for 4,096 data-parallel ranks.

    python benchmarks/ops/bench_coordination.py

The trainer's own functions, in one process, two threads; the ranks are simulated: their shares are made to the byte,
not sent. The samples are there end to end, as `rows_of` leaves them. Lengths are log-normal, 100 tokens on average,
half of them scored; 17 bytes a token.
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np
import torch
from _goals import Goal, show

from mdapo import device
from mdapo.data.shares import FIELDS, FILLER_TOKENS, Rows, pack_shares, trimmed
from mdapo.data.unfold import unfold
from mdapo.data.wire import dump_share, load_share
from mdapo.ops.balance import Plan, plan_micro_batches

SAMPLES, RANKS, CAP, ROUNDS = 131_072, 4096, 4096, 5


def rows() -> Rows:
    rng = np.random.default_rng(0)
    sizes_N = np.clip(rng.lognormal(np.log(80), 0.7, SAMPLES), 8, 2048).astype(np.int64)
    starts_N = sizes_N.cumsum() - sizes_N
    tokens = int(sizes_N.sum())
    within_P = np.arange(tokens) - np.repeat(starts_N, sizes_N)
    scored_P = within_P >= np.repeat(sizes_N // 2, sizes_N)
    fields = {
        "ids": rng.integers(0, 50000, tokens, dtype=np.int32),
        "mask": scored_P,
        "advantages": np.repeat(rng.normal(size=SAMPLES).astype(np.float32), sizes_N) * scored_P,
        "loss_weights": scored_P / np.float32(tokens),
        "rollout_logps": rng.random(tokens, np.float32) * scored_P,
    }
    padded = {name: np.append(fields[name], np.zeros(FILLER_TOKENS)).astype(dtype) for name, dtype in FIELDS.items()}
    padded["mask"][-1] = True
    return trimmed(padded, sizes_N)


def coordinate(step: Rows) -> tuple[Plan, list[bytes], list[float]]:
    """The plan, what each rank would be sent, and the seconds of the three stages."""
    clock = [time.perf_counter()]
    plan = plan_micro_batches(step.lengths_N, dp=RANKS, cap=CAP)
    clock.append(time.perf_counter())
    shares = pack_shares(step, [[rank] for rank in plan.ranks])
    clock.append(time.perf_counter())
    sent = [dump_share(share) for share in shares]
    clock.append(time.perf_counter())
    return plan, sent, np.diff(clock).tolist()


def check(step: Rows, plan: Plan, sent: list[bytes]) -> None:
    """The first ranks unfold what was planned for them."""
    for rank, data in zip(plan.ranks[:3], sent, strict=False):
        [mini] = unfold(load_share(data))
        assert [b.num_tokens for b in mini] == [int(step.lengths_N[list(micro)].sum()) for micro in rank]


def measure() -> list[Goal]:
    torch.set_num_threads(2)
    device.current().activate()
    step = rows()
    plan, sent, _ = coordinate(step)
    check(step, plan, sent)
    seconds = [coordinate(step)[2] for _ in range(ROUNDS)]
    stages = zip(("plan", "pack", "scatter"), map(statistics.median, zip(*seconds, strict=True)), strict=True)
    note = ", ".join(f"{stage} {median:.3f} s" for stage, median in stages)
    note += f", {sum(map(len, sent)) / 1e6:.0f} MB"
    what = f"plan, pack, scatter {SAMPLES:,} samples for {RANKS:,} ranks"
    return [Goal(what, statistics.median(map(sum, seconds)), 0.5, at_most=True, unit="s", note=note)]


if __name__ == "__main__":
    sys.exit(show(measure(), title="coordination"))
