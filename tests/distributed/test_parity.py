"""Real ranks, real gloo, real megatron-core: every layout gives the gradients of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import LAYOUTS, LIMIT, Case, differences, run_cases

CASES = [
    *(Case(name, "qwen3", parallel) for name, parallel in LAYOUTS.items() if "TP2x" not in name),
    Case("TP2xPP2+SP", "qwen2", LAYOUTS["TP2xPP2+SP"]),
    Case("TP2xDP2", "qwen2", LAYOUTS["TP2xDP2"]),
    Case("TP2+SP", "llama", LAYOUTS["TP2+SP"]),
    Case("padded", "qwen2", spec={"actor": {"use_remove_padding": False}}),
    Case("padded TP2+SP", "qwen3", LAYOUTS["TP2+SP"], {"actor": {"use_remove_padding": False}}),
    Case("one sequence a micro-batch", "qwen3", spec={"cut": 1}),
    Case("all in one micro-batch", "qwen3", spec={"cut": 1000}),
    Case("odd count in a virtual pipeline", "qwen3", LAYOUTS["PP2xVPP2"], {"cut": 1}),
    Case("overlapped", "qwen3", LAYOUTS["DP2+dist-opt"], {"megatron": {"ddp": {"overlap_grad_reduce": True}}}),
    *(Case(f"shared prefixes {kind}", kind, spec={"share_prefix": True, "cut": 1000}) for kind in ("llama", "qwen2")),
    Case("shared TP2+SP", "qwen3", LAYOUTS["TP2+SP"], {"share_prefix": True, "cut": 1000}),
    Case("shared PP2xVPP2", "qwen3", LAYOUTS["PP2xVPP2"], {"share_prefix": True, "cut": 90}),
    Case("shared recompute full", "qwen3", spec={"share_prefix": True, "actor": {"recompute": "full"}}),
    Case("recompute full", "qwen3", LAYOUTS["TP2+SP"], {"actor": {"recompute": "full"}}),
    Case("recompute selective", "qwen3", LAYOUTS["TP2+SP"], {"actor": {"recompute": "selective"}}),
]
BF16 = Case("bf16", "qwen3", spec={"dtype": "bfloat16"})


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_cases([*CASES, BF16], tmp_path_factory.mktemp("parity"), timeout_s=240.0)


@pytest.mark.timeout(800)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_layout_gives_the_gradients_of_one_rank(case: Case, results: dict[str, dict[str, Any]]) -> None:
    """Cases 10 and 14: however the batch is cut, padded or spread, loss, norm and gradients are those of one rank."""
    delta = differences(results[case.key], results[f"{case.kind}-one"])
    assert max(delta.values()) <= LIMIT, delta


def test_metrics_are_sums_over_ranks_and_micro_batches(results: dict[str, dict[str, Any]]) -> None:
    one = results["qwen3-one"]["metrics"]
    for case in CASES:
        if case.kind == "qwen3":
            metrics = results[case.key]["metrics"]
            assert metrics["tokens"] == one["tokens"]
            assert metrics["entropy"] == pytest.approx(one["entropy"], rel=1e-5)


def test_log_probs_of_a_pipeline_reach_its_first_stage(results: dict[str, dict[str, Any]]) -> None:
    one = results["qwen3-one"]
    for name in ("TP2", "PP2", "PP2xVPP2"):
        got = results[f"qwen3-{name}"]
        torch.testing.assert_close(got["logps"], one["logps"], rtol=0, atol=2e-5)
        torch.testing.assert_close(got["entropies"], one["entropies"], rtol=0, atol=2e-5)


def test_shared_prefixes_were_really_shared(results: dict[str, dict[str, Any]]) -> None:
    tokens = {name: sum(results[f"qwen2-{name}"]["tokens"]) for name in ("one", "shared prefixes qwen2")}
    assert tokens["shared prefixes qwen2"] < 0.75 * tokens["one"]


def test_virtual_pipeline_was_really_given_an_odd_count(results: dict[str, dict[str, Any]]) -> None:
    assert results["qwen3-odd count in a virtual pipeline"]["micro_batches"] % 2 == 1


def test_export_after_the_step_is_that_of_one_rank(results: dict[str, dict[str, Any]]) -> None:
    """Adam turns rounding of a tiny gradient into a visible step: pipelines, which round alike, must be near-exact."""
    one = results["qwen3-one"]["weights"]
    for name in ("PP2", "PP2xVPP2"):
        got = results[f"qwen3-{name}"]["weights"]
        assert got.keys() == one.keys()
        for key, weight in got.items():
            torch.testing.assert_close(weight, one[key], rtol=0, atol=1e-5)


def test_bf16_with_fp32_masters_stays_near_fp32(results: dict[str, dict[str, Any]]) -> None:
    low, one = results["qwen3-bf16"], results["qwen3-one"]
    assert not low["skipped"]
    assert low["loss"] == pytest.approx(one["loss"], rel=0.02)
    for name, grad in one["grads"].items():
        assert torch.cosine_similarity(low["grads"][name].flatten(), grad.flatten(), dim=0) > 0.97, name
