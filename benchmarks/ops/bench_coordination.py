"""What one rank does for all in a step, at scale: plan, pack and scatter 131,072 samples for 4,096 data-parallel ranks.

    python benchmarks/ops/bench_coordination.py

The trainer's own functions, in one process, two threads; the ranks are simulated: their shares are made to the byte,
not sent. The samples are there end to end, as `rows_of` leaves them: groups of 8 with a prompt of 40 tokens. Lengths
are log-normal, 100 tokens on average; 17 bytes a token. Planned without and with a common prompt computed once.
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np
import torch
from _goals import Goal, show

from mdapo import device
from mdapo.config.flops import WorkModel
from mdapo.data.bundles import plan_bundles
from mdapo.data.shares import FIELDS, FILLER_TOKENS, Rows, pack_shares, trimmed
from mdapo.data.unfold import unfold
from mdapo.data.wire import dump_share, load_share
from mdapo.ops.balance import Plan, plan_step

SAMPLES, RANKS, CAP, ROUNDS = 131_072, 4096, 4096, 5
GROUP, PROMPT = 8, 40
WORK = WorkModel(24576.0, 1.0, 0.0)


def rows() -> Rows:
    rng = np.random.default_rng(0)
    sizes_N = np.clip(rng.lognormal(np.log(80), 0.7, SAMPLES), 8, 2048).astype(np.int64)
    starts_N = sizes_N.cumsum() - sizes_N
    tokens = int(sizes_N.sum())
    within_P = np.arange(tokens) - np.repeat(starts_N, sizes_N)
    of_row = np.repeat(np.arange(SAMPLES), sizes_N)
    scored_P = (within_P >= PROMPT) | (within_P + 1 == sizes_N[of_row])
    drawn_P = rng.integers(0, 50000, tokens, dtype=np.int32)
    prompts = rng.integers(0, 50000, (SAMPLES // GROUP, PROMPT), dtype=np.int32)
    fields = {
        "ids": np.where(scored_P, drawn_P, prompts[of_row // GROUP, np.minimum(within_P, PROMPT - 1)]),
        "mask": scored_P,
        "advantages": np.repeat(rng.normal(size=SAMPLES).astype(np.float32), sizes_N) * scored_P,
        "loss_weights": scored_P / np.float32(tokens),
        "rollout_logps": rng.random(tokens, np.float32) * scored_P,
    }
    padded = {name: np.append(fields[name], np.zeros(FILLER_TOKENS)).astype(dtype) for name, dtype in FIELDS.items()}
    padded["mask"][-1] = True
    return trimmed(padded, sizes_N)


def plan_of(step: Rows, *, share_prefix: bool) -> Plan:
    if not share_prefix:
        return plan_step(step.lengths_N, costs_N=WORK.of(step.lengths_N, step.scored_N), dp=RANKS, cap=CAP)
    group_N, mini_N = np.arange(SAMPLES) // GROUP, np.zeros(SAMPLES, np.int64)
    columns = (step.starts_N, step.lengths_N, step.scored_N, group_N, mini_N)
    return plan_bundles(step.fields["ids"], *columns, dp=RANKS, cap=CAP, work=WORK)


def coordinate(step: Rows, *, share_prefix: bool) -> tuple[list[bytes], list[float]]:
    """What each rank would be sent, and the seconds of the three stages."""
    clock = [time.perf_counter()]
    plan = plan_of(step, share_prefix=share_prefix)
    groups = iter(plan.groups)
    cut = [[[next(groups) for _ in range(count)] for count in plan.counts_M] for _ in range(RANKS)]
    clock.append(time.perf_counter())
    shares = pack_shares(step, cut)
    clock.append(time.perf_counter())
    sent = [dump_share(share) for share in shares]
    clock.append(time.perf_counter())
    return sent, np.diff(clock).tolist()


def check(step: Rows, sent: list[bytes], *, share_prefix: bool) -> int:
    """Every rank unfolds what was planned for it, within the cap. Returns the tokens that they compute."""
    tokens = scored = 0
    for data in sent:
        [mini] = unfold(load_share(data), share_prefix=share_prefix)
        assert max(batch.num_tokens for batch in mini) <= CAP
        tokens += sum(batch.num_tokens for batch in mini)
        scored += sum(len(batch.targets_R) for batch in mini)
    assert scored == int(step.fields["mask"].sum()) - 1, "a scored token is lost"
    return tokens


def measure() -> list[Goal]:
    torch.set_num_threads(2)
    device.current().activate()
    step, goals = rows(), []
    for share_prefix in (False, True):
        sent, _ = coordinate(step, share_prefix=share_prefix)
        tokens = check(step, sent, share_prefix=share_prefix)
        seconds = [coordinate(step, share_prefix=share_prefix)[1] for _ in range(ROUNDS)]
        stages = zip(("plan", "pack", "scatter"), map(statistics.median, zip(*seconds, strict=True)), strict=True)
        note = ", ".join(f"{stage} {median:.3f} s" for stage, median in stages)
        note += f", {sum(map(len, sent)) / 1e6:.0f} MB, {tokens / 1e6:.1f} M tokens to compute"
        what = f"plan, pack, scatter {SAMPLES:,} samples for {RANKS:,} ranks" + ", shared prompts" * share_prefix
        goals.append(Goal(what, statistics.median(map(sum, seconds)), 0.5, at_most=True, unit="s", note=note))
    return goals


if __name__ == "__main__":
    sys.exit(show(measure(), title="coordination"))
