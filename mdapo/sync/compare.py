"""``sync.check``: do the servers compute what the actor computes? They write a few tokens, which the actor scores.

Rank 0 asks (`probe`), the samples go the way of a step's samples to the ranks, and all of them compare
(`largest_gap`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mdapo.megatron.layout import reduce_metrics
from mdapo.rollout.engine import Completion, EngineError, Request, SamplingParams
from mdapo.types import Sample, Samples

if TYPE_CHECKING:
    from mdapo.config.schema import Config
    from mdapo.megatron.actor import Actor
    from mdapo.types import MicroBatch

# Largest gap of one token's log-prob, by the coarser of the two dtypes. In bfloat16 rounding alone gave up to 0.3 in
# twenty steps of the quickstart; a run must not end on that, and wrong weights are several nats off.
LIMIT = {"float32": 1e-4, "bfloat16": 1.0}
PROMPTS, PROMPT_TOKENS, TOKENS = 2, 64, 8  # of each server; at most so many of a prompt, and written after it
PROBE = "sync-check"


@dataclass(frozen=True)
class Asked:
    """One server, by its URL, and how to get a turn from just it."""

    url: str
    generate: Callable[[Request], Awaitable[Completion]]


@dataclass(frozen=True)
class Probed:
    """``by_url``: what each server wrote, a sample for each prompt; ``failed``: why one wrote nothing."""

    by_url: Mapping[str, Sequence[Sample]]
    failed: Mapping[str, str]

    def of(self, urls: Iterable[str]) -> Samples:
        """What those wrote; each sample is a group."""
        samples = [sample for url in urls for sample in self.by_url[url]]
        return Samples.of([replace(sample, group=number) for number, sample in enumerate(samples)])


async def probe(
    servers: Sequence[Asked],
    prompts: Sequence[Sequence[int]],
    *,
    params: SamplingParams,
    version: int,
    deadline_s: float,
) -> Probed:
    """Every server continues every prompt by ``params``, all of them at a time and within ``deadline_s``.

    Failed has one that does not answer, or with tokens of other weights than ``version``.
    """

    async def ask(server: Asked, number: int) -> Sample:
        name = f"{PROBE}-{version}-{number}-{server.url}"
        request = Request(prompts[number], params, session=name, group=name, seed=number)
        async with asyncio.timeout(deadline_s):
            answer = await server.generate(request)
        if answer.version != version or not answer.ids:
            raise EngineError(f"{len(answer.ids)} tokens of version {answer.version}, not {version}")
        return _sample(server.url, number, prompts[number], answer)

    async def ask_all(server: Asked) -> list[Sample] | str:
        found = await asyncio.gather(*(ask(server, i) for i in range(len(prompts))), return_exceptions=True)
        for error in found:
            if isinstance(error, EngineError):
                return str(error)
            if isinstance(error, TimeoutError):
                return f"no answer within {deadline_s:g} s"
            if isinstance(error, BaseException):
                raise error
        return [sample for sample in found if isinstance(sample, Sample)]

    answers = await asyncio.gather(*map(ask_all, servers))
    both = list(zip((server.url for server in servers), answers, strict=True))
    failed = {url: answer for url, answer in both if isinstance(answer, str)}
    return Probed({url: answer for url, answer in both if not isinstance(answer, str)}, failed)


def allowed_gap(config: Config) -> float:
    """The largest gap that rounding explains, for the dtypes of this run's actor and engine."""
    rollout = config.rollout
    engine = rollout.dtype if rollout.engine == "local" else rollout.engine_args.get("dtype")
    both_fine = config.model.dtype == "float32" and engine in (None, "float32", "float")
    return LIMIT["float32" if both_fine else "bfloat16"]


def _sample(url: str, number: int, prompt: Sequence[int], answer: Completion) -> Sample:
    ids = np.array([*prompt, *answer.ids], np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    logps, nothing = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.float32)
    logps[mask] = answer.logps
    versions = np.full(len(ids), answer.version, np.int32)
    return Sample(f"{url}/{number}", number, ids, mask, logps, versions, nothing, mask.astype(np.float32))


def largest_gap(actor: Actor, micro_batches: Sequence[MicroBatch]) -> float:
    """The largest difference between a log-prob of a server and the actor's, over all ranks; collective. Infinite
    where one is no number."""
    largest = 0.0
    for batch, logps_R in zip(micro_batches, actor.logprobs(micro_batches), strict=True):
        gap_R = (logps_R.cpu() - batch.rollout_logps_R.cpu()).abs()[batch.loss_weights_R.cpu() > 0]
        if len(gap_R):
            largest = max(largest, float(gap_R.nan_to_num(nan=math.inf).max()))
    return reduce_metrics({"gap_max": largest})["gap_max"]
