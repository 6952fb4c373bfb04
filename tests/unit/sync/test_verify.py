"""What a stream must hold, and what servers must give back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from recording import MODEL, SHAPES, RecordingServer, weights
from torch import Tensor

from mdapo.rollout.engine import EngineError
from mdapo.sync.verify import LARGEST, LAST, MOST_ELEMENTS, SAMPLED, TELLING, Expected, check

LLAMA = "LlamaForCausalLM"


def watched(seed: int = 0) -> Expected:
    expected = Expected.choose(SHAPES, architecture=LLAMA, seed=seed)
    assert dict(expected.watch(weights())).keys() == SHAPES.keys()
    return expected


def serving(stores: torch.dtype = torch.float32) -> RecordingServer:
    server = RecordingServer(stores=stores)
    server.held = {name: tensor.to(stores) for name, tensor in weights()}
    server.version = "3"
    return server


def verdict(server: RecordingServer, expected: Expected) -> None:
    asyncio.run(check(server, expected, version=3, deadline_s=1.0))


@pytest.mark.parametrize("stores", [torch.float32, torch.bfloat16, torch.float16])
def test_a_server_that_holds_what_was_sent_passes_whatever_dtype_it_keeps(stores: torch.dtype) -> None:
    server, expected = serving(stores), watched()
    verdict(server, expected)
    assert server.paths().count("/get_weights_by_name") == len(expected.sampled) >= SAMPLED + 1


def test_over_many_seeds_every_readable_weight_is_looked_at_and_those_that_tell_the_shape_always() -> None:
    seen: set[str] = set()
    for seed in range(40):
        sampled = Expected.choose(SHAPES, architecture=LLAMA, seed=seed).sampled
        layer = max(int(name.split(".")[2]) for name in SHAPES if ".layers." in name)
        assert {LAST, *(f"model.layers.{layer}.{part}" for part in TELLING)} <= sampled
        assert sampled == Expected.choose(SHAPES, architecture=LLAMA, seed=seed).sampled
        seen |= sampled
    fused_later = {f"model.layers.0.{part}.weight" for part in ("self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj")}
    assert seen == SHAPES.keys() - {"model.embed_tokens.weight"} - fused_later


def test_of_the_weights_that_a_server_would_write_out_whole_one_is_sampled_and_no_giant() -> None:
    large = {f"model.layers.{n}.mlp.down_proj.weight": (MOST_ELEMENTS, 2) for n in range(2)}
    giant = {"model.layers.1.self_attn.q_proj.weight": (LARGEST, 2)}
    samples = [
        Expected.choose({**SHAPES, **large, **giant}, architecture=LLAMA, seed=seed).sampled for seed in range(40)
    ]
    assert {len(sampled & large.keys()) for sampled in samples} == {1}
    assert set().union(*samples) >= large.keys() and not set().union(*samples) & giant.keys()


def test_of_a_model_of_eight_billion_weights_matrices_are_read_back_and_not_its_norms_alone() -> None:
    facts = replace(MODEL, architecture=LLAMA, layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256)
    sampled = Expected.choose(replace(facts, head_dim=128).weight_shapes(), architecture=LLAMA, seed=0).sampled
    assert [name for name in sampled if "proj" in name]


def test_of_a_model_class_that_gives_nothing_back_only_the_version_is_asked() -> None:
    server, expected = serving(), Expected.choose(SHAPES, architecture="Qwen3ForCausalLM", seed=0)
    verdict(server, expected)
    assert server.paths() == []
    server.version = "2"
    with pytest.raises(EngineError, match="says it has weights '2', after a sync to 3"):
        verdict(server, expected)


@pytest.mark.parametrize("name", sorted(Expected.choose(SHAPES, architecture=LLAMA, seed=0).sampled))
def test_one_changed_value_in_a_sampled_row_is_noticed(name: str) -> None:
    server = serving()
    server.held[name].view(-1)[3] += 1e-3
    with pytest.raises(EngineError, match=f"{name}: holds other values than were sent"):
        verdict(server, watched())


def test_rounding_must_be_that_of_one_dtype_for_all_weights() -> None:
    expected = watched()
    server = serving()
    for i, name in enumerate(sorted(expected.sampled)):
        server.held[name] = server.held[name].to([torch.bfloat16, torch.float16][i % 2]).float()
    with pytest.raises(EngineError, match="holds other values"):
        verdict(server, expected)


def test_columns_of_zeros_by_which_a_servers_matrix_is_wider_are_none_of_its_values() -> None:
    """SGLang's on a CPU pads a feed-forward of 48 columns to 64."""
    server, expected = serving(), watched()
    matrices = [name for name in expected.sampled if server.held[name].dim() == 2]
    assert matrices
    for name in matrices:
        server.held[name] = torch.nn.functional.pad(server.held[name], (0, 4))
    verdict(server, expected)
    server.held[matrices[0]][0, -1] = 1e-3
    with pytest.raises(EngineError, match=f"{matrices[0]}: .* values came back, not"):
        verdict(server, expected)


@pytest.mark.parametrize("answer", [None, {}, "no", [], [1.0], [[None]], [[1.0, 2.0], [3.0]]])
def test_an_answer_that_is_no_such_tensor_is_a_failure(answer: object) -> None:
    server = serving()
    server._get_weights_by_name = lambda body: answer
    with pytest.raises(EngineError, match="http://server"):
        verdict(server, watched())


def test_a_stream_that_lacks_invents_or_misshapes_a_weight_is_refused() -> None:
    def with_change(change: str) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights():
            if name != LAST:
                yield name, tensor
            elif change == "misshapen":
                yield name, tensor[:4]
            elif change == "unknown":
                yield "model.extra.weight", tensor

    for change, message in {"missing": "1 weights never came", "unknown": "extra", "misshapen": r"\(4,\)"}.items():
        with pytest.raises(ValueError, match=message):
            list(Expected.choose(SHAPES, architecture=LLAMA, seed=0).watch(with_change(change)))
