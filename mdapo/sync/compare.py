"""``sync.check``: do the servers compute what the actor computes? They write a few tokens, which the actor scores.

Rank 0 asks (`probe`), the samples go the way of a step's samples to the ranks, and all of them compare
(`largest_gap`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mdapo.megatron.layout import reduce_metrics
from mdapo.rollout.engine import Completion, EngineError, Request, SamplingParams
from mdapo.types import Sample, Samples

if TYPE_CHECKING:
    from mdapo.megatron.actor import Actor
    from mdapo.types import MicroBatch

LIMIT = {"float32": 1e-4, "bfloat16": 0.5}  # largest gap of one token's log-prob, by the coarser of the two dtypes
TOKENS = 8  # written after each prompt
PROBE = "sync-check"


@dataclass(frozen=True)
class Asked:
    """One server, by its URL, and how to get a turn from just it."""

    url: str
    generate: Callable[[Request], Awaitable[Completion]]


async def probe(
    servers: Sequence[Asked], prompts: Sequence[Sequence[int]], *, params: SamplingParams, version: int
) -> Samples:
    """Every server continues every prompt by ``params``; a sample each, with the server's log-probs.

    ``EngineError``: one does not answer, or with tokens of other weights than ``version``.
    """
    found = []
    for server in servers:
        for number, prompt in enumerate(prompts):
            name = f"{PROBE}-{version}-{number}-{server.url}"
            answer = await server.generate(Request(prompt, params, session=name, group=name, seed=number))
            if answer.version != version or not answer.ids:
                raise EngineError(f"{server.url}: {len(answer.ids)} tokens of version {answer.version}, not {version}")
            found.append(_sample(server.url, len(found), prompt, answer))
    return Samples.of(found)


def _sample(url: str, number: int, prompt: Sequence[int], answer: Completion) -> Sample:
    ids = np.array([*prompt, *answer.ids], np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    logps, nothing = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.float32)
    logps[mask] = answer.logps
    versions = np.full(len(ids), answer.version, np.int32)
    return Sample(f"{url}/{number}", number, ids, mask, logps, versions, nothing, mask.astype(np.float32))


def largest_gap(actor: Actor, micro_batches: Sequence[MicroBatch]) -> float:
    """The largest difference between a log-prob of a server and the actor's, over all ranks; collective."""
    largest = 0.0
    for batch, logps_R in zip(micro_batches, actor.logprobs(micro_batches), strict=True):
        gap_R = (logps_R.cpu() - batch.rollout_logps_R.cpu()).abs()[batch.loss_weights_R.cpu() > 0]
        if len(gap_R):
            largest = max(largest, float(gap_R.max()))
    return reduce_metrics({"gap_max": largest})["gap_max"]
