"""Rank 0 plans what the parallel layout takes, and every rank unfolds its own share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mdapo import device
from mdapo.config.flops import TOKENS_ONLY
from mdapo.config.schema import Config
from mdapo.megatron.layout import Layout
from mdapo.trainer import flow
from mdapo.types import MicroBatch, Sample, Samples

DP = 2


def sample(index: int, group: int) -> Sample:
    """Nine tokens of a prompt that its group shares, then one to seven of the policy."""
    answer = 1 + index % 7
    ids = np.array([*[group] * 9, *range(100 * index, 100 * index + answer)], np.int32)
    mask = np.arange(len(ids)) >= 9
    nothing = np.zeros(len(ids), np.float32)
    weights = np.where(mask, 0.5, 0.0).astype(np.float32)
    return Sample(f"{group}/{index}", group, ids, mask, nothing, np.zeros(len(ids), np.int32), nothing, weights)


def scattered(
    samples: list[Sample], monkeypatch: pytest.MonkeyPatch, *, pp: int, vpp: int, actor: dict[str, Any]
) -> list[list[list[MicroBatch]]]:
    """[rank][mini-batch][micro-batch], by a trainer that has nothing but a configuration and a layout."""
    trainer = object.__new__(flow.Trainer)
    data = {"train_files": ["none.jsonl"], "train_prompt_bsz": 4}
    trainer.config = Config.model_validate({"model": {"path": "none"}, "data": data, "actor": actor})
    trainer.work = TOKENS_ONLY
    trainer.layout = Layout(
        rank=0,
        world=DP * pp,
        tp=1,
        pp=pp,
        vpp=vpp,
        dp=DP,
        tp_rank=0,
        pp_rank=0,
        dp_rank=0,
        sequence=False,
        device=device.current(),
    )
    monkeypatch.setattr(trainer, "share_errors", lambda work: work())
    found = []
    for rank in range(DP):
        monkeypatch.setattr(flow.ranks, "scatter_shares", lambda shares, rank=rank: shares[rank])
        found.append(trainer.scatter(Samples.of(samples)))
    return found


@pytest.mark.parametrize("per_mini", [1, 3, 5])
@pytest.mark.parametrize(
    "actor",
    [
        {"ppo_max_token_len": 20},
        {"ppo_max_token_len": 20, "share_prefix": False},
        {"ppo_max_token_len": 20, "use_remove_padding": False},
        {"use_dynamic_bsz": False, "ppo_micro_batch_size": 1},
    ],
    ids=["shared", "packed", "padded", "fixed"],
)
def test_a_virtual_pipeline_gets_multiples_of_its_stages(
    actor: dict[str, Any], per_mini: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few samples a mini-batch has: fillers without weight complete the last round of stages."""
    samples = [sample(mini * 10 + i, group=2 * mini) for mini in range(2) for i in range(per_mini)]
    keys = {"ppo_mini_batch_size": 2, **actor}
    shares = scattered(samples, monkeypatch, pp=4, vpp=2, actor=keys)
    counts = [[len(mini) for mini in rank] for rank in shares]
    assert counts[0] == counts[1] and len(counts[0]) == 2
    assert all(count > 0 and count % 4 == 0 for count in counts[0])
    weights = [float(batch.loss_weights_R.sum()) for rank in shares for mini in rank for batch in mini]
    assert sum(weights) == 0.5 * sum(int(s.response_mask.sum()) for s in samples)
    assert 0 < sum(weight > 0 for weight in weights) < len(weights)


def test_a_plain_pipeline_needs_no_fillers(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [sample(i, group=i // 2) for i in range(6)]
    actor = {"use_dynamic_bsz": False, "ppo_micro_batch_size": 1}
    shares = scattered(samples, monkeypatch, pp=4, vpp=1, actor=actor)
    assert [[len(mini) for mini in rank] for rank in shares] == [[3], [3]]
