"""The local engine's forward against transformers, in fp32, for every family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mdapo.config.model_facts import require_facts
from mdapo.config.weight_files import require_weights
from mdapo.errors import UserError
from mdapo.rollout.local_model import LocalModel, packing_available
from mdapo.rollout.local_weights import read_weights

SaveTiny = Callable[..., Path]
CPU = torch.device("cpu")


def load(folder: Path, *, dtype: torch.dtype = torch.float32, slots: int = 6, max_context: int = 256) -> LocalModel:
    return LocalModel(
        require_facts(folder), weights_of(folder), dtype=dtype, device=CPU, slots=slots, max_context=max_context
    )


def weights_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    return read_weights(require_weights(folder, require_facts(folder)))


def step(model: LocalModel, *chunks: tuple[int, int, list[int]]) -> list[torch.Tensor]:
    """Logits of the last token of each ``(slot, start, ids)``."""
    plan, order = model.plan(chunks)
    logits = model.forward(plan)
    return [logits[order.index(i)] for i in range(len(chunks))]


def tokens(count: int, *, seed: int) -> list[int]:
    return torch.randint(0, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_prefill_chunks_and_decode_give_the_logits_of_transformers(
    tmp_path: Path, save_tiny: SaveTiny, family: str, tied: bool
) -> None:
    folder = save_tiny(tmp_path / family, family=family, tied=tied)
    reference = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    model = load(folder)
    a, b = tokens(40, seed=1), tokens(25, seed=2)
    with torch.no_grad():
        want_a, want_b = reference(torch.tensor([a])).logits[0], reference(torch.tensor([b])).logits[0]

    got_a, got_b = step(model, (3, 0, a[:17]), (1, 0, b[:20]))  # two prompts, packed
    torch.testing.assert_close(got_a, want_a[16], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(got_b, want_b[19], atol=2e-5, rtol=1e-5)
    got_a, got_b = step(model, (3, 17, a[17:30]), (1, 20, b[20:21]))  # a suffix beside a decode
    torch.testing.assert_close(got_a, want_a[29], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(got_b, want_b[20], atol=2e-5, rtol=1e-5)
    for i in range(4):  # decode together, with a resting slot between them
        got_a, got_b = step(model, (3, 30 + i, [a[30 + i]]), (1, 21 + i, [b[21 + i]]))
        torch.testing.assert_close(got_a, want_a[30 + i], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(got_b, want_b[21 + i], atol=2e-5, rtol=1e-5)


def test_the_cache_grows_past_its_first_size_and_keeps_what_it_holds(tmp_path: Path, save_tiny: SaveTiny) -> None:
    folder = save_tiny(tmp_path / "m")
    model = load(folder, max_context=700)
    ids = tokens(600, seed=3)
    step(model, (0, 0, ids[:200]))
    (got,) = step(model, (0, 200, ids[200:]))
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(folder).float().eval()(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)


def test_a_copied_prefix_serves_another_slot(tmp_path: Path, save_tiny: SaveTiny) -> None:
    model = load(save_tiny(tmp_path / "m"))
    ids = tokens(30, seed=4)
    step(model, (0, 0, ids[:29]))
    model.copy_prefix(0, 4, 29)
    (own,) = step(model, (0, 29, ids[29:]))
    (copied,) = step(model, (4, 29, ids[29:]))
    assert torch.equal(own, copied)


def test_bf16_errs_no_more_than_twice_transformers_in_bf16(tmp_path: Path, save_tiny: SaveTiny) -> None:
    """The numerics rule: error against fp32 at most twice that of plain PyTorch in the same precision."""
    folder = save_tiny(tmp_path / "m")
    ids = tokens(60, seed=5)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        want = exact(torch.tensor([ids])).logits[0, -1]
        plain_error = (plain(torch.tensor([ids])).logits[0, -1].float() - want).abs().mean()
    (got,) = step(load(folder, dtype=torch.bfloat16), (0, 0, ids))
    assert (got - want).abs().mean() <= 2 * plain_error


def test_loading_again_replaces_every_weight(tmp_path: Path, save_tiny: SaveTiny) -> None:
    one, two = save_tiny(tmp_path / "one", seed=1), save_tiny(tmp_path / "two", seed=2)
    model, ids = load(one), tokens(12, seed=6)
    (before,) = step(model, (0, 0, ids))
    model.load(weights_of(two))
    (after,) = step(model, (0, 0, ids))
    (fresh,) = step(load(two), (0, 0, ids))
    assert torch.equal(after, fresh)
    assert not torch.allclose(before, after)


def test_bad_weights_are_named(tmp_path: Path, save_tiny: SaveTiny) -> None:
    folder = save_tiny(tmp_path / "m", family="qwen2")
    model, weights = load(folder), dict(weights_of(folder))
    name = "model.layers.1.self_attn.k_proj.bias"
    with pytest.raises(ValueError, match="1 weights are missing: " + name):
        model.load((n, w) for n, w in weights.items() if n != name)
    with pytest.raises(ValueError, match=r"k_proj.bias' has shape \(3,\), this model needs \(16,\)"):
        model.load((n, w[:3] if n == name else w) for n, w in weights.items())
    with pytest.raises(ValueError, match=r"'model\.layers\.9\.x' is unknown"):
        model.load([("model.layers.9.x", torch.zeros(1))])


def test_a_file_damaged_since_it_was_looked_at_is_a_user_error(tmp_path: Path, save_tiny: SaveTiny) -> None:
    files = require_weights(folder := save_tiny(tmp_path / "m"), require_facts(folder))
    next(iter(files.values())).write_bytes(b"x")
    with pytest.raises(UserError, match="cannot be read"):
        next(read_weights(files))


def test_packing_is_used_on_this_cpu_whenever_onednn_is_there() -> None:
    assert packing_available(torch.float32, CPU) == torch.backends.mkldnn.is_available()
    assert not packing_available(torch.float32, torch.device("meta"))
