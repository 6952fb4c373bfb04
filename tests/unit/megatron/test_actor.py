"""The actor on one rank: against transformers, its learning rate, non-finite steps, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import config, filler, loss_fn, pack, sequences
from torch import Tensor

from mdapo.errors import UserError
from mdapo.megatron.actor import Actor
from mdapo.megatron.layout import Layout
from mdapo.megatron.optimizer import _square
from mdapo.types import MicroBatch

TEMPERATURE = 0.7


def build(folder: Path, layout: Layout, **sections: Any) -> Actor:
    actor = Actor(config(folder, **sections), layout)
    actor.load_hf(str(folder))
    return actor


def reference(folder: Path, batch: MicroBatch, seqs: list[Any]) -> tuple[Any, Tensor, Tensor]:
    """transformers on each sequence alone: model, log-probs and entropies of the scored tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logps, entropies = [], []
    for tokens, mask in seqs:
        ids = torch.from_numpy(tokens)
        logp = (model(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        at = torch.from_numpy(mask[1:]).nonzero()[:, 0]
        logps.append(logp[at].gather(1, ids[at + 1][:, None])[:, 0])
        entropies.append(-(logp[at].exp() * logp[at]).sum(-1))
    return model, torch.cat(logps), torch.cat(entropies)


@pytest.mark.parametrize("kind", ["llama", "untied", "qwen2", "qwen3"])
def test_log_probs_and_gradients_are_those_of_transformers(kind: str, models: dict[str, Path], layout: Layout) -> None:
    seqs = sequences(3)
    batch = pack(seqs, total=40)
    actor = build(models[kind], layout, rollout={"temperature": TEMPERATURE})
    model, logps, entropies = reference(models[kind], batch, seqs)
    (got,), (got_entropies,) = actor.score([batch])
    torch.testing.assert_close(got, logps, rtol=0, atol=2e-5)
    torch.testing.assert_close(got_entropies, entropies, rtol=0, atol=2e-5)
    loss, _ = loss_fn(logps, entropies, batch)
    loss.backward()
    sums = actor.accumulate_gradients([batch], loss_fn)
    assert sums["loss"] == pytest.approx(loss.item(), rel=1e-5)
    named = dict(model.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in named.values())
    for slot, tensors in actor.gathered(lambda parameter: parameter.main_grad):
        for name, grad in zip(slot.hf_names, tensors, strict=True):
            assert float((grad - named[name].grad).abs().max()) <= 1e-5 * largest, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_gives_back_what_was_loaded(dtype: str, models: dict[str, Path], layout: Layout) -> None:
    actor = build(models["qwen3"], layout, model={"path": str(models["qwen3"]), "dtype": dtype})
    model = transformers.AutoModelForCausalLM.from_pretrained(models["qwen3"], dtype=getattr(torch, dtype))
    original, got = model.state_dict(), dict(actor.export())
    assert got.keys() == original.keys() - {"lm_head.weight"}
    for name, tensor in got.items():
        assert tensor.dtype == original[name].dtype
        assert torch.equal(tensor, original[name]), name


def test_gradient_does_not_depend_on_fillers(models: dict[str, Path], layout: Layout) -> None:
    """Cases 9 and 10: a zero-weight filler runs forward and backward and adds exactly nothing."""
    batch = pack(sequences(2), total=20)
    actor = build(models["llama"], layout)

    def grads(batches: list[MicroBatch]) -> list[Tensor]:
        actor.accumulate_gradients(batches, loss_fn)
        return [t.clone() for _, tensors in actor.gathered(lambda p: p.main_grad) for t in tensors]

    alone, filled = grads([batch]), grads([batch, filler(), filler()])
    assert all(torch.equal(a, b) for a, b in zip(alone, filled, strict=True))


def test_loss_is_a_sum_and_not_an_average_over_micro_batches(models: dict[str, Path], layout: Layout) -> None:
    """Case 14: sample A 2 tokens of loss 1, sample B 8 tokens of loss 0: 0.2 however they are cut."""
    import numpy as np

    short, long = (np.arange(5), np.array([0, 0, 0, 1, 1], bool)), (np.arange(5, 15), np.array([0, 0, *[1] * 8], bool))
    actor = build(models["llama"], layout)

    def loss(logps_R: Tensor, entropies_R: Tensor, mb: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        value_R = (mb.targets_R < 5).float() + 0.0 * logps_R
        return (mb.loss_weights_R * value_R).sum(), {}

    together = actor.update([pack([short, long], total=10)], loss)
    apart = actor.update([pack([short], total=10), pack([long], total=10)], loss)
    assert together.loss == pytest.approx(0.2) and apart.loss == pytest.approx(0.2)


def state(actor: Actor) -> list[Tensor]:
    inner = actor.optimizer.chained_optimizers[0].optimizer
    moments = [value for entry in inner.state.values() for value in entry.values() if isinstance(value, Tensor)]
    masters = [p for group in inner.param_groups for p in group["params"]]
    return [t.detach().clone() for t in [*(p for c in actor.chunks for p in c.parameters()), *masters, *moments]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_non_finite_step_is_skipped_and_changes_nothing(
    bad: str, sharded: bool, dtype: str, models: dict[str, Path], layout: Layout
) -> None:
    sections = {"model": {"path": str(models["llama"]), "dtype": dtype}, "parallel": {"distributed_optimizer": sharded}}
    actor = build(models["llama"], layout, **sections)
    batch = pack(sequences(2), total=20)
    assert not actor.update([batch], loss_fn).skipped
    before, steps = state(actor), actor.scheduler.num_steps

    def poisoned(logps_R: Tensor, entropies_R: Tensor, mb: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if bad == "loss":
            return logps_R.sum() * float("nan"), {}
        finite = logps_R.sum()
        return finite + (finite - finite.detach()).abs().sqrt(), {}  # finite value, infinite slope

    skipped = actor.update([batch], poisoned)
    assert skipped.skipped
    assert all(torch.equal(a, b) for a, b in zip(before, state(actor), strict=True))
    assert actor.scheduler.num_steps == steps
    after = actor.update([batch], loss_fn)
    assert not after.skipped and after.grad_norm > 0


@pytest.mark.parametrize(
    ("decay", "wanted"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.5, 1.0, 0.1 + 0.45 * (1 + 0.5**0.5), 0.55, 0.1 + 0.45 * (1 - 0.5**0.5), 0.1]),
    ],
)
def test_learning_rate_warms_up_and_decays(
    decay: str, wanted: list[float], models: dict[str, Path], layout: Layout
) -> None:
    """Two warm-up steps of six; the first update already moves, the last reaches the minimum."""
    schedule = {"lr": 1e-3, "lr_warmup_steps": 2, "lr_decay": decay, "min_lr": 1e-4}
    actor = build(models["llama"], layout, actor=schedule, run={"total_steps": 6})
    batch = pack(sequences(1), total=20)
    rates = [actor.update([batch], loss_fn).lr for _ in range(6)]
    assert rates == pytest.approx([1e-3 * x for x in wanted], rel=1e-6)


def test_norm_of_a_large_gradient_is_exact() -> None:
    """Plain float32 accumulation loses 0.1 % and more, and other amounts with other thread counts."""
    grad = torch.rand(3_000_001, generator=torch.Generator().manual_seed(0))
    assert float(_square(grad)) == pytest.approx(float(grad.double().square().sum()), rel=1e-7)


def test_gradients_are_clipped_to_the_limit(models: dict[str, Path], layout: Layout) -> None:
    actor = build(models["llama"], layout, actor={"clip_grad": 0.25, "lr": 0.0})
    norm = actor.update([pack(sequences(2), total=2)], loss_fn).grad_norm
    assert norm > 0.25
    moments = actor.optimizer.chained_optimizers[0].optimizer.state.values()
    first = sum(float((entry["exp_avg"].double() ** 2).sum()) for entry in moments) ** 0.5
    assert first == pytest.approx((1 - 0.9) * 0.25, rel=1e-4)


def test_norms_and_biases_do_not_decay(models: dict[str, Path], layout: Layout) -> None:
    actor = build(models["qwen2"], layout, actor={"lr": 1e-3, "weight_decay": 1.0})
    before = {name: tensor.clone() for name, tensor in actor.export()}
    actor.update([filler()], loss_fn)
    for name, after in actor.export():
        expected = before[name] * (1 - 1e-3) if after.dim() > 1 else before[name]
        torch.testing.assert_close(after, expected, rtol=1e-6, atol=1e-7, msg=name)


def test_reference_model_has_no_gradients_and_no_optimizer(models: dict[str, Path], layout: Layout) -> None:
    batch = pack(sequences(2), total=20)
    actor = build(models["llama"], layout)
    frozen = Actor(actor.cfg, layout, trainable=False)
    frozen.load_hf(str(models["llama"]))
    assert frozen.optimizer is None and not any(p.requires_grad for c in frozen.chunks for p in c.parameters())
    assert torch.equal(frozen.logprobs([batch])[0], actor.logprobs([batch])[0])


def test_only_scored_positions_go_through_the_vocabulary(
    models: dict[str, Path], layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mdapo.ops import token_logprob

    rows: list[int] = []
    plain = token_logprob.forward_partials
    monkeypatch.setattr(
        token_logprob,
        "forward_partials",
        lambda hidden, *a, **k: rows.append(hidden.shape[0]) or plain(hidden, *a, **k),
    )
    batch = pack(sequences(3), total=20)
    build(models["llama"], layout).score([batch])
    assert rows == [len(batch.targets_R)] and rows[0] < batch.num_tokens


def test_micro_batch_without_a_scored_token_is_harmless(models: dict[str, Path], layout: Layout) -> None:
    batch = pack(sequences(1), total=10)
    scored = {name: value[:0] for name, value in vars(batch).items() if name.endswith("_R") and value is not None}
    empty = replace(batch, **scored)
    actor = build(models["llama"], layout)
    assert actor.score([batch, empty])[0][1].shape == (0,)
    one = actor.accumulate_gradients([batch], loss_fn)["loss"]
    assert actor.accumulate_gradients([batch, empty], loss_fn)["loss"] == pytest.approx(one)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"transformer": {"num_layers": 3}}, r"megatron\.transformer\.num_layers: set by mdapo itself"),
        ({"transformer": {"num_layerz": 3}}, r"megatron\.transformer: refused"),
        ({"ddp": {"overlap_param_gather": True}}, "overlap_param_gather: not supported"),
        ({"ddp": {"no_such": 1}}, r"megatron\.ddp: refused"),
        ({"optimizer": {"no_such": 1}}, r"megatron\.optimizer: refused"),
    ],
)
def test_refuses_options_it_cannot_honour(
    section: dict[str, Any], says: str, models: dict[str, Path], layout: Layout
) -> None:
    with pytest.raises(UserError, match=says):
        Actor(config(models["llama"], megatron=section), layout)
