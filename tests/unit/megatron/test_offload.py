"""What leaves the device between two trainings, and that it makes no difference."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from tiny_models import config, loss_fn, pack, sequences

from mdapo.megatron import offload as offload_module
from mdapo.megatron.actor import Actor
from mdapo.megatron.layout import Layout
from mdapo.megatron.offload import Offload


def build(folder: Path, layout: Layout, *, offload: str = "none", dtype: str = "bfloat16") -> Actor:
    actor = Actor(config(folder, actor={"offload": offload, "lr": 1e-2}, model={"dtype": dtype}), layout)
    actor.load_hf(str(folder))
    return actor


def weights(actor: Actor) -> list[torch.Tensor]:
    return [tensor.clone() for _, tensor in actor.export()]


def gradient_bytes(actor: Actor) -> int:
    return sum(buffer.grad_data.untyped_storage().size() for chunk in actor.chunks for buffer in chunk.buffers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("offload", ["gradients", "optimizer"])
def test_what_leaves_and_comes_back_changes_no_bit(
    models: dict[str, Path], layout: Layout, offload: str, dtype: str
) -> None:
    plain, moved = (build(models["llama"], layout, offload=what, dtype=dtype) for what in ("none", offload))
    whole = gradient_bytes(moved)
    for seed in range(3):
        batch = pack(sequences(3, seed=seed), total=40)
        moved.take_device()
        assert gradient_bytes(moved) == whole > 0
        found, expected = moved.update([batch], loss_fn), plain.update([batch], loss_fn)
        assert (found.loss, found.grad_norm, found.skipped) == (expected.loss, expected.grad_norm, False)
        moved.leave_device()
        plain.leave_device()
        assert (gradient_bytes(moved), gradient_bytes(plain)) == (0, whole)
        assert all(map(torch.equal, weights(moved), weights(plain))), "a sync reads the weights meanwhile"
        (ours,), (theirs,) = moved.logprobs([batch]), plain.logprobs([batch])
        assert torch.equal(ours, theirs)
    with pytest.raises(AssertionError, match="take_device comes first"):
        moved.update([batch], loss_fn)


@pytest.mark.parametrize(("dtype", "masters"), [("float32", False), ("bfloat16", True)])
def test_masters_and_moments_go_and_no_weight_does(
    models: dict[str, Path], layout: Layout, monkeypatch: pytest.MonkeyPatch, dtype: str, masters: bool
) -> None:
    """On a mock of a move, which copies: this machine has no device but the host. A float32 model has no masters."""
    gone: list[int] = []

    def copied(tensor: torch.Tensor, to: torch.device) -> torch.Tensor:
        gone.append(tensor.numel())
        return tensor.clone()

    monkeypatch.setattr(offload_module, "moved", copied)
    actor, plain = (build(models["llama"], layout, offload=what, dtype=dtype) for what in ("optimizer", "none"))
    batch = pack(sequences(3), total=40)
    parameters = sum(tensor.numel() for tensor in weights(actor))
    for _ in range(2):
        actor.take_device()
        actor.update([batch], loss_fn)
        plain.update([batch], loss_fn)
        gone.clear()
        actor.leave_device()
        assert sum(gone) == pytest.approx((2 + masters) * parameters, rel=0.01), "padding aside"
        assert all(map(torch.equal, weights(actor), weights(plain)))


def test_the_memory_of_gradients_is_given_back(tmp_path: Path, layout: Layout) -> None:
    """Resident bytes of this process; a block above 32 MiB goes back at once."""
    wide = torch.zeros(1 << 25)  # 128 MiB, as the gradients of a model of 34 million weights

    class Buffer:
        def __init__(self) -> None:
            self.grad_data = wide

    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer as Core

    buffer = Buffer()
    buffer.grad_data.fill_(1.0)
    buffer.offload_to_cpu = lambda **more: Core.offload_to_cpu(buffer, **more)
    buffer.reload_from_cpu = lambda **more: Core.reload_from_cpu(buffer, **more)

    class Chunk:
        buffers, expert_parallel_buffers = [buffer], []

    offload = Offload([Chunk()], None, home=torch.device("cpu"), what="gradients")
    before = resident()
    offload.leave()
    assert before - resident() > 120 << 20
    offload.back()
    assert before - resident() < 20 << 20
    assert float(buffer.grad_data.abs().max()) == 0.0


def resident() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
