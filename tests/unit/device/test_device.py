"""Which device is taken, and what the CPU stand-in for torch.cuda does and leaves alone."""

from __future__ import annotations

import pytest
import torch

from mdapo import device
from mdapo.device import cuda_stand_in
from mdapo.errors import UserError


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch):
    device.current.cache_clear()
    yield
    monkeypatch.undo()
    device.current.cache_clear()


def test_forced_device_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDAPO_DEVICE", "cpu")
    here = device.current()
    assert (here.kind, here.backend, here.torch_device) == ("cpu", "gloo", torch.device("cpu"))


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_device_asked_for_and_missing_is_an_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDAPO_DEVICE", kind)
    monkeypatch.setattr(device, "available", lambda k: k == "cpu")
    with pytest.raises(UserError, match=f"sees no {kind} device"):
        device.current()


def test_unknown_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDAPO_DEVICE", "tpu")
    with pytest.raises(UserError, match="unknown device, use one of cpu, cuda, npu"):
        device.current()


def test_best_device_present_is_chosen_and_indexed_by_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MDAPO_DEVICE", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(device, "available", lambda k: k != "npu")
    assert device.current() == device.Device("cuda", 3)
    assert device.current().backend == "cpu:gloo,cuda:nccl"


def test_a_placement_says_which_device_each_local_rank_drives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "available", lambda kind: kind == "cuda")
    monkeypatch.setenv("MDAPO_DEVICE_IDS", "6,2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device.current() == device.Device("cuda", 2)
    device.current.cache_clear()
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match=r"placement.actor: 2 devices \(6,2\) for more ranks on this machine"):
        device.current()


def test_memory_facts_of_the_machine() -> None:
    facts = device.Device("cpu").memory_bytes()
    assert 0 < facts["peak"] < facts["total"]


def test_cuda_means_cpu_within_the_context_only() -> None:
    with cuda_stand_in.CudaMeansCpu():
        made = [torch.zeros(2, device="cuda"), torch.ones(2, device=torch.device("cuda", 0)), torch.empty(2, device=0)]
        made += [
            torch.zeros(2).cuda(),
            torch.zeros(2).to("cuda"),
            torch.tensor([1.0], device="cuda:0", pin_memory=True),
        ]
        assert all(tensor.device.type == "cpu" for tensor in made)
        assert made[0].type() == "torch.cuda.FloatTensor"
        assert torch.zeros(2).to(torch.float64).dtype == torch.float64
        assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.zeros(2).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows the stand-in of a machine without CUDA")
def test_stand_in_does_not_claim_that_cuda_is_there() -> None:
    cuda_stand_in.install()
    assert not torch.cuda.is_available()
    with torch.cuda.stream(torch.cuda.Stream()):
        event = torch.cuda.Event()
        event.record()
    assert event.query() and torch.cuda.current_device() == torch.device("cpu")
