"""``sync.check``: what the servers wrote becomes samples, and the largest gap to the actor's scores is found."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mdapo.data.shares import pack_shares, rows_of
from mdapo.data.unfold import unfold
from mdapo.rollout.engine import Completion, EngineError, Request, SamplingParams
from mdapo.sync import compare
from mdapo.sync.compare import Asked, largest_gap, probe

PROMPTS = [[5, 6, 7], [8, 9]]
LOGPS = (-0.5, -1.5)


def server(url: str, *, version: int = 3) -> Asked:
    async def generate(request: Request) -> Completion:
        assert request.params.max_new_tokens == 2
        return Completion((1, 2), LOGPS, "length", version)

    return Asked(url, generate)


def asked(*servers: Asked) -> Any:
    return asyncio.run(probe(servers, PROMPTS, params=SamplingParams(max_new_tokens=2), version=3))


def test_every_server_continues_every_prompt_and_only_what_it_wrote_is_scored() -> None:
    samples = asked(server("http://a"), server("http://b"))
    assert len(samples) == 4
    assert samples[0].ids.tolist() == [5, 6, 7, 1, 2]
    assert samples[0].response_mask.tolist() == [False, False, False, True, True]
    assert samples[3].ids.tolist() == [8, 9, 1, 2]
    assert samples[3].rollout_logps.tolist() == [0.0, 0.0, *LOGPS]
    assert samples[3].uid.startswith("http://b/")


def test_tokens_of_other_weights_are_no_comparison() -> None:
    with pytest.raises(EngineError, match="http://a: 2 tokens of version 2, not 3"):
        asked(server("http://a", version=2))


def test_the_largest_gap_of_a_scored_token_is_found_and_fillers_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "reduce_metrics", lambda values: values)
    samples = asked(server("http://a"))
    [share] = pack_shares(rows_of(samples), [[[[0, 1]]]])
    [batch] = unfold(share)[0]
    filler = replace(batch, loss_weights_R=torch.zeros_like(batch.loss_weights_R))

    class Actor:
        def logprobs(self, batches: list[Any]) -> list[torch.Tensor]:
            off = torch.tensor([0.0, 0.25, 0.0, -0.125])
            return [batches[0].rollout_logps_R + off, batches[1].rollout_logps_R + 9.0]

    assert np.isclose(largest_gap(Actor(), [batch, filler]), 0.25)
