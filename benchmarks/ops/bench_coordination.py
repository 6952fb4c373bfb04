"""What one rank does for all in a step, at scale: plan, pack and scatter 131,072 samples for 4,096 data-parallel ranks.

    python benchmarks/ops/bench_coordination.py

The trainer's own functions, in one process, two threads; the ranks are simulated: their shares are made to the byte,
not sent. It begins with `Samples` as `make_samples` leaves them: groups of 8 with a prompt of 40 tokens. Lengths are
log-normal, 100 tokens on average; 17 bytes a token. Planned without and with a common prompt computed once.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
from _goals import Goal, show

from mdapo import device
from mdapo.config.flops import WorkModel
from mdapo.config.schema import Config
from mdapo.data.batching import plan_shares
from mdapo.data.unfold import unfold
from mdapo.data.wire import dump_share, load_share
from mdapo.types import Sample, Samples

SAMPLES, RANKS, CAP, ROUNDS = 131_072, 4096, 4096, 5
GROUP, PROMPT = 8, 40
WORK = WorkModel(24576.0, 1.0, 0.0)


def configuration(*, share_prefix: bool) -> Config:
    sections: dict[str, Any] = {
        "model": {"path": "none"},
        "data": {"train_files": ["none.jsonl"], "train_prompt_bsz": SAMPLES // GROUP},
        "actor": {"ppo_max_token_len": CAP, "share_prefix": share_prefix},
    }
    return Config.model_validate(sections)


def drawn() -> Samples:
    rng = np.random.default_rng(0)
    prompts, samples = rng.integers(0, 50000, (SAMPLES // GROUP, PROMPT), dtype=np.int32), []
    for i, size in enumerate(np.clip(rng.lognormal(np.log(80), 0.7, SAMPLES), 8, 2048).astype(int).tolist()):
        prompt = prompts[i // GROUP]
        scored = np.arange(size) >= min(PROMPT, size - 1)
        samples.append(
            Sample(
                uid=str(i),
                group=i // GROUP,
                ids=np.append(prompt[: size - 1], rng.integers(0, 50000, max(size - PROMPT, 1), dtype=np.int32)),
                response_mask=scored,
                rollout_logps=scored * rng.random(size, np.float32),
                versions=np.zeros(size, np.int32),
                advantages=scored * np.float32(rng.normal()),
                loss_weights=scored * np.float32(1e-7),
            )
        )
    return Samples.of(samples)


def coordinate(samples: Samples, config: Config) -> tuple[list[bytes], list[float]]:
    """What each rank would be sent, and the seconds until it is planned and packed, and from there."""
    clock = [time.perf_counter()]
    shares = plan_shares(samples, config, dp=RANKS, work=WORK)
    clock.append(time.perf_counter())
    sent = [dump_share(share) for share in shares]
    clock.append(time.perf_counter())
    return sent, np.diff(clock).tolist()


def check(samples: Samples, sent: list[bytes], *, share_prefix: bool) -> int:
    """Every rank unfolds what was planned for it, within the cap. Returns the tokens that they compute."""
    tokens = scored = 0
    for data in sent:
        [mini] = unfold(load_share(data), share_prefix=share_prefix)
        assert max(batch.num_tokens for batch in mini) <= CAP
        tokens += sum(batch.num_tokens for batch in mini)
        scored += sum(int((batch.loss_weights_R > 0).sum()) for batch in mini)
    assert scored == int(samples.fields["response_mask"].sum()), "a scored token is lost"
    return tokens


def measure() -> list[Goal]:
    torch.set_num_threads(2)
    device.current().activate()
    samples, goals = drawn(), []
    for share_prefix in (False, True):
        config = configuration(share_prefix=share_prefix)
        sent, _ = coordinate(samples, config)
        tokens = check(samples, sent, share_prefix=share_prefix)
        seconds = [coordinate(samples, config)[1] for _ in range(ROUNDS)]
        stages = zip(("plan and pack", "scatter"), map(statistics.median, zip(*seconds, strict=True)), strict=True)
        note = ", ".join(f"{stage} {median:.3f} s" for stage, median in stages)
        note += f", {sum(map(len, sent)) / 1e6:.0f} MB, {tokens / 1e6:.1f} M tokens to compute"
        what = f"plan, pack, scatter {SAMPLES:,} samples for {RANKS:,} ranks" + ", shared prompts" * share_prefix
        goals.append(Goal(what, statistics.median(map(sum, seconds)), 0.5, at_most=True, unit="s", note=note))
    return goals


if __name__ == "__main__":
    sys.exit(show(measure(), title="coordination"))
