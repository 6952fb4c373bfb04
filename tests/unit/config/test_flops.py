"""What a sequence costs: against torch's own count of a real forward pass, and by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from mdapo.config.flops import ATTENTION, LINEAR, VOCABULARY, WorkModel, model_flops, work_model
from mdapo.config.model_facts import Experts, ModelFacts, read_model

SHAPE = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 512,
}  # fmt: skip


def facts_of(folder: Path, config: transformers.PretrainedConfig) -> ModelFacts:
    config.save_pretrained(folder)
    facts, _ = read_model(folder)
    assert facts is not None
    return facts


def counted(config: transformers.PretrainedConfig, tokens: int) -> int:
    """FLOPs of one forward pass over a sequence, all tokens through the vocabulary, eager attention."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize("tokens", [7, 64, 200])
def test_a_forward_pass_is_what_torch_counts(tokens: int, tmp_path: Path) -> None:
    """Eager attention computes all pairs of tokens, causal attention half of them."""
    config = transformers.Qwen3Config(**SHAPE)
    model = work_model(facts_of(tmp_path, config))
    forward = model.per_token / LINEAR * tokens + 2 * model.per_token2 / ATTENTION * tokens**2
    forward += model.per_scored / VOCABULARY * tokens
    rotation = 2 * tokens * 24 // 2  # of the frequencies, a product in transformers' code
    assert abs(counted(config, tokens) - forward) <= rotation


def test_a_known_model_by_hand() -> None:
    """Qwen2.5-7B: 6 FLOPs a parameter of the layers and token."""
    model = ModelFacts("Qwen2ForCausalLM", 28, 3584, 18944, 28, 4, 128, 152064, 32768, False, "bfloat16", True, False)
    work = work_model(model)
    matrices = 28 * (3584 * (28 + 2 * 4) * 128 + 28 * 128 * 3584 + 3 * 3584 * 18944)
    assert work.per_token == 6 * matrices
    assert work.per_token2 == 7 * 28 * 28 * 128
    assert work.per_scored == 8 * 3584 * 152064
    assert model_flops(model) == WorkModel(6 * matrices, 6 * 28 * 28 * 128, 6 * 3584 * 152064)
    np.testing.assert_array_equal(
        work.of(np.array([1, 1000]), np.array([0, 10])),
        [work.per_token + work.per_token2, 1e3 * work.per_token + 1e6 * work.per_token2 + 10 * work.per_scored],
    )


@pytest.mark.parametrize(
    ("recompute", "linear", "attention"), [("none", 3, 3.5), ("selective", 3, 4.5), ("full", 4, 4.5)]
)
def test_recomputation_costs_a_forward_pass(recompute: str, linear: float, attention: float, tmp_path: Path) -> None:
    facts = facts_of(tmp_path, transformers.Qwen3Config(**SHAPE))
    plain, again = work_model(facts), work_model(facts, recompute=recompute)
    assert again.per_token / plain.per_token == pytest.approx(linear / 3)
    assert again.per_token2 / plain.per_token2 == pytest.approx(attention / 3.5)
    assert again.per_scored == plain.per_scored


MOE = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("keys", "experts"),
    [
        (MOE, Experts(layers=3, count=60, active=4, ffn=32, shared_ffn=0)),
        (MOE | {"shared_expert_intermediate_size": 128}, Experts(3, 60, 4, 32, 128)),
        (MOE | {"mlp_only_layers": [0], "decoder_sparse_step": 2}, Experts(1, 60, 4, 32, 0)),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, Experts(3, 8, 2, 96, 0)),
        (
            {"n_routed_experts": 256, "n_shared_experts": 2, "num_experts_per_tok": 8, "moe_intermediate_size": 16,
             "first_k_dense_replace": 1},
            Experts(2, 256, 8, 16, 32),
        ),
    ],
)  # fmt: skip
def test_experts_are_read_and_only_the_active_ones_cost(keys: dict[str, Any], experts: Experts, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"architectures": ["LlamaForCausalLM"]} | keys))
    facts, _ = read_model(tmp_path)
    assert facts is not None and facts.experts == experts
    dense = work_model(ModelFacts(**{**vars(facts), "experts": None}))
    columns = experts.active * experts.ffn + experts.shared_ffn
    feed_forward = experts.layers * 64 * (3 * columns + experts.count - 3 * 96)
    assert work_model(facts).per_token - dense.per_token == 6 * feed_forward
    assert work_model(facts).per_token2 == dense.per_token2


def test_a_tree_costs_what_its_nodes_cost() -> None:
    """A beginning of 10 tokens under two rows of 12 and 14: each node's tokens, each pair of tokens that attends."""
    work = WorkModel(per_token=5.0, per_token2=2.0, per_scored=3.0)
    squares = 10**2 + (12**2 - 10**2) + (14**2 - 10**2)
    assert work.of(16, 6, squares) == 5.0 * 16 + 2.0 * squares + 3.0 * 6
    assert work.of(12, 6, 12**2) == work.of(12, 6)
