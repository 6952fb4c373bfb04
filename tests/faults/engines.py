"""An engine over hostile servers, quick to lose patience, and what must hold of everything that it hands out."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from mdapo.config.model_facts import ModelFacts
from mdapo.rollout.engine import Completion, Request, SamplingParams
from mdapo.rollout.health import HealthLimits
from mdapo.rollout.sglang_client import open_session
from mdapo.rollout.sglang_engine import SGLangEngine
from mdapo.rollout.sglang_servers import Address
from mdapo.rollout.sglang_timing import Timing
from mdapo.sync.disk import DiskTransport
from mdapo.sync.memory import Occupation
from mdapo.sync.push import Pusher

from .hostile_server import KEY, STOP, VOCAB, logp_of, tokens_of

PARAMS = SamplingParams(20, stop_ids=(STOP,))
QUICK = Timing(
    turn_s=60.0,
    attempt_s=20.0,
    attempts=4,
    backoff_s=0.01,
    backoff_max_s=0.05,
    probe_every_s=0.1,
    probe_s=5.0,
    down_s=2.0,
    start_s=10.0,
    abort_s=20.0,
    abort_again_s=0.05,
)
LIMITS = HealthLimits(restart_wait_s=0.05, restart_wait_max_s=0.2)
MODEL = ModelFacts(
    "A", layers=1, hidden=4, ffn=4, heads=1, kv_heads=1, head_dim=4, vocab=VOCAB, max_positions=64,
    tied=True, dtype="float32", qkv_bias=False, qk_norm=False,
)  # fmt: skip
WEIGHTS = [(name, torch.ones(shape)) for name, shape in MODEL.weight_shapes().items()]


@asynccontextmanager
async def engine_over(
    urls: Sequence[str],
    *,
    timing: Timing = QUICK,
    limits: HealthLimits = LIMITS,
    resync: bool = True,
    version: int | None = 0,
    occupation: Occupation | None = None,
    **more: Any,
) -> AsyncGenerator[SGLangEngine]:
    """With weights of ``version`` brought by way of the disk."""
    with tempfile.TemporaryDirectory() as folder:
        transport = DiskTransport(Path(folder), timeout_s=10.0)
        pusher = Pusher(transport, MODEL, bucket_bytes=1 << 20, timeout_s=10.0, occupation=occupation)
        engine = SGLangEngine(
            [Address(url, KEY) for url in urls],
            session=open_session(),
            vocab_size=VOCAB,
            sync=pusher.send,
            resync=pusher.again if resync else None,
            timing=timing,
            limits=limits,
            rng=random.Random(1),
            **{"share_prompts": False} | more,  # what a test counts are its own turns
        )
        try:
            if version is not None:
                await engine.update_weights(WEIGHTS, version)
            yield engine
        finally:
            async with asyncio.timeout(30):
                await engine.close()
                await pusher.close()


def request(number: int = 0, *, group: int | None = None, prompt: Sequence[int] = (5, 6, 7)) -> Request:
    group = number // 4 if group is None else group
    return Request([*prompt, 2 + group % 90], PARAMS, f"{group}/{number}", f"g{group}", 1000 + number)


def is_right(asked: Request, found: Completion, version: int = 0) -> bool:
    """Every token and log-prob is the one that a good server gives for this request, and of these weights."""
    expected = tokens_of(asked.ids, asked.seed, asked.params.max_new_tokens)
    return (
        list(found.ids) == expected
        and list(found.logps) == [logp_of(token) for token in expected]
        and found.finish == "stop"
        and found.version == version
    )
