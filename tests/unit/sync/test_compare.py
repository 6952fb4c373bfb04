"""``sync.check``: what the servers wrote becomes samples, and the largest gap to the actor's scores is found."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mdapo.config.schema import Config
from mdapo.data.shares import pack_shares, rows_of
from mdapo.data.unfold import unfold
from mdapo.rollout.engine import Completion, EngineError, Request, SamplingParams
from mdapo.sync import compare
from mdapo.sync.compare import Asked, Probed, allowed_gap, largest_gap, probe

PROMPTS = [[5, 6, 7], [8, 9]]
LOGPS = (-0.5, -1.5)


def server(url: str, *, version: int = 3) -> Asked:
    async def generate(request: Request) -> Completion:
        assert request.params.max_new_tokens == 2
        return Completion((1, 2), LOGPS, "length", version)

    return Asked(url, generate)


def asked(*servers: Asked, deadline_s: float = 30.0) -> Probed:
    params = SamplingParams(max_new_tokens=2)
    return asyncio.run(probe(servers, PROMPTS, params=params, version=3, deadline_s=deadline_s))


def test_every_server_continues_every_prompt_and_only_what_it_wrote_is_scored() -> None:
    found = asked(server("http://a"), server("http://b"))
    assert (list(found.by_url), found.failed) == (["http://a", "http://b"], {})
    samples = found.of(found.by_url)
    assert len(samples) == 4
    assert samples.group_N.tolist() == [0, 1, 2, 3]
    assert samples[0].ids.tolist() == [5, 6, 7, 1, 2]
    assert samples[0].response_mask.tolist() == [False, False, False, True, True]
    assert samples[3].ids.tolist() == [8, 9, 1, 2]
    assert samples[3].rollout_logps.tolist() == [0.0, 0.0, *LOGPS]
    assert [sample.uid for sample in found.of(["http://b"])] == ["http://b/0", "http://b/1"]
    assert found.of(["http://b"]).group_N.tolist() == [0, 1]


def test_what_is_no_comparison_is_told_and_the_other_servers_are_compared() -> None:
    async def dead(request: Request) -> Completion:
        raise EngineError("it is dead")

    async def hangs(request: Request) -> Completion:
        await asyncio.sleep(3600)
        raise AssertionError

    servers = [server("http://a", version=2), Asked("http://b", dead), Asked("http://c", hangs), server("http://d")]
    found = asked(*servers, deadline_s=0.05)
    assert list(found.by_url) == ["http://d"]
    assert found.failed == {
        "http://a": "2 tokens of version 2, not 3",
        "http://b": "it is dead",
        "http://c": "no answer within 0.05 s",
    }


def test_an_error_of_ours_is_not_a_servers() -> None:
    async def broken(request: Request) -> Completion:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asked(Asked("http://a", broken))


@pytest.mark.parametrize(
    ("model", "rollout", "limit"),
    [
        ("float32", {}, 1e-4),
        ("bfloat16", {}, 1.0),
        ("float32", {"dtype": "bfloat16"}, 1.0),
        ("bfloat16", {"dtype": "float32"}, 1.0),
        ("float32", {"engine": "sglang", "engine_args": {"dtype": "float32"}}, 1e-4),
        ("float32", {"engine": "sglang", "engine_args": {"dtype": "half"}}, 1.0),
    ],
)
def test_the_coarser_dtype_says_what_rounding_explains(model: str, rollout: dict[str, Any], limit: float) -> None:
    values = {"model": {"path": "m", "dtype": model}, "data": {"train_files": ["a"]}, "rollout": rollout}
    assert allowed_gap(Config.model_validate(values)) == limit


def test_the_largest_gap_of_a_scored_token_is_found_and_fillers_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "reduce_metrics", lambda values: values)
    samples = asked(server("http://a")).of(["http://a"])
    [share] = pack_shares(rows_of(samples), [[[[0, 1]]]])
    [batch] = unfold(share)[0]
    filler = replace(batch, loss_weights_R=torch.zeros_like(batch.loss_weights_R))

    class Actor:
        off = torch.tensor([0.0, 0.25, 0.0, -0.125])

        def logprobs(self, batches: list[Any]) -> list[torch.Tensor]:
            off = self.off
            return [batches[0].rollout_logps_R + off, batches[1].rollout_logps_R + 9.0]

    assert np.isclose(largest_gap(Actor(), [batch, filler]), 0.25)
    Actor.off = torch.tensor([0.0, float("nan"), 0.0, 0.5])
    assert largest_gap(Actor(), [batch, filler]) == float("inf"), "no number is no agreement"
