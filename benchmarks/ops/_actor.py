"""The quickstart's model behind the trainer's own plan, shares and actor, for benchmarks of whole forwards."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from _goals import MODEL

from mdapo.config.presets import resolve_algorithm
from mdapo.config.schema import Config
from mdapo.data.batching import micro_batches, plan_shares
from mdapo.megatron import layout as layouts
from mdapo.megatron.actor import Actor
from mdapo.types import MicroBatch, Sample, Samples


def configuration(*, dtype: str = "float32", **actor: Any) -> Config:
    sections: dict[str, Any] = {
        "model": {"path": str(MODEL), "dtype": dtype},
        "data": {"train_files": ["none.jsonl"]},
        "actor": actor,
        "run": {"threads": 2},
    }
    config = Config.model_validate(sections)
    return config.model_copy(update={"algorithm": resolve_algorithm(config.algorithm)})


@contextmanager
def opened(config: Config) -> Generator[Actor]:
    """On one rank, with the model's weights."""
    layout = layouts.init_distributed(config, 60.0)
    try:
        actor = Actor(config, layout)
        actor.load_hf(str(MODEL))
        yield actor
    finally:
        layouts.destroy()


def group(prompt: np.ndarray, responses: Sequence[np.ndarray], rng: np.random.Generator) -> Samples:
    """One group's samples: ids of a prompt, then of what the policy wrote; all else drawn."""
    tokens, samples = sum(map(len, responses)), []
    for i, response in enumerate(responses):
        ids = np.append(prompt, response).astype(np.int32)
        mask = np.arange(len(ids)) >= len(prompt)
        samples.append(
            Sample(
                uid=str(i),
                group=0,
                ids=ids,
                response_mask=mask,
                rollout_logps=np.where(mask, -rng.exponential(size=len(ids)), 0.0).astype(np.float32),
                versions=np.zeros(len(ids), np.int32),
                advantages=np.where(mask, rng.normal(), 0.0).astype(np.float32),
                loss_weights=np.where(mask, 1.0 / tokens, 0.0).astype(np.float32),
            )
        )
    return Samples.of(samples)


def laid_out(samples: Samples, config: Config) -> list[MicroBatch]:
    """The micro-batches of the one mini-batch."""
    [share] = plan_shares(samples, config, dp=1)
    [mini] = micro_batches(share, config)
    return mini
