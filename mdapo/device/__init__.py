"""What cpu, cuda and npu each provide: torch device, collective backend, memory facts. No ``if cpu`` elsewhere.

``MDAPO_DEVICE=cpu|cuda|npu`` forces one; otherwise the best one present is taken. ``MDAPO_DEVICE_IDS=4,5`` gives local
rank 0 device 4 and local rank 1 device 5. ``placement.actor`` sets both.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

from mdapo.errors import UserError

Kind = Literal["cpu", "cuda", "npu"]
KINDS: tuple[Kind, ...] = ("cpu", "cuda", "npu")
# Collectives on host memory (byte strings, counters) always go over gloo, also where tensors go over NCCL or HCCL.
BACKENDS: dict[Kind, str] = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


@dataclass(frozen=True)
class Device:
    """One rank's device. ``index`` is the local rank on cuda and npu, or what ``placement`` gives it; 0 on cpu."""

    kind: Kind
    index: int = 0

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, self.index)

    @property
    def backend(self) -> str:
        """Argument of ``torch.distributed.init_process_group``."""
        return BACKENDS[self.kind]

    def activate(self) -> None:
        """Make this the default device of the process (one process drives one device)."""
        if self.kind == "cpu":
            _keep_freed_memory()
        else:
            getattr(torch, self.kind).set_device(self.index)

    def synchronize(self) -> None:
        if self.kind != "cpu":
            getattr(torch, self.kind).synchronize()

    def memory_bytes(self) -> dict[str, int]:
        """``total`` and ``peak`` bytes: of the device; on cpu, of the machine and this process's resident set."""
        if self.kind == "cpu":
            import resource

            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            return {"total": total, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        module = getattr(torch, self.kind)
        return {"total": module.mem_get_info(self.index)[1], "peak": module.max_memory_allocated(self.index)}

    def rank_bytes(self, ranks_here: int) -> int:
        """Of memory for each of so many ranks on this machine: a device is one rank's, a CPU's memory is divided."""
        total = self.memory_bytes()["total"]
        return total // ranks_here if self.kind == "cpu" else total


def _keep_freed_memory() -> None:
    """Let glibc reuse the memory of freed tensors instead of giving it back and faulting it in again, zeroed.

    A training step frees and takes the same sizes over and over; this saves up to 20 % of its CPU time. Blocks above
    32 MiB still go back at once. Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


def available(kind: Kind) -> bool:
    if kind == "npu":
        try:
            importlib.import_module("torch_npu")
        except ImportError:
            return False
        npu: Any = getattr(torch, "npu")  # noqa: B009  torch_npu adds it
        return bool(npu.is_available())
    return kind == "cpu" or torch.cuda.is_available()


@cache
def current() -> Device:
    """The device of this process.

    Raises:
        UserError: ``MDAPO_DEVICE`` names an unknown device, or one this machine does not have.
    """
    forced = os.environ.get("MDAPO_DEVICE")
    if forced and forced not in KINDS:
        raise UserError(f"MDAPO_DEVICE={forced}: unknown device, use one of {', '.join(KINDS)}")
    if forced and not available(forced):
        raise UserError(
            f"MDAPO_DEVICE={forced}: this process sees no {forced} device; unset it to choose automatically, "
            "or install the torch build for it"
        )
    kind = forced or next(k for k in reversed(KINDS) if available(k))
    return Device(kind, 0 if kind == "cpu" else _index())


def _index() -> int:
    rank, ids = int(os.environ.get("LOCAL_RANK", "0")), os.environ.get("MDAPO_DEVICE_IDS")
    if not ids:
        return rank
    numbers = ids.split(",")
    if rank >= len(numbers):
        raise UserError(
            f"placement.actor: {len(numbers)} devices ({ids}) for more ranks on this machine; start as many"
        )
    return int(numbers[rank])


def prepare_megatron() -> None:
    """Call before megatron is imported: on cpu installs the stand-in, on npu MindSpeed's adaptor."""
    kind = current().kind
    if kind == "cpu":
        from mdapo.device import cuda_stand_in

        cuda_stand_in.install()
    elif kind == "npu":
        try:
            importlib.import_module("mindspeed.megatron_adaptor")
        except ImportError as error:
            raise UserError("device npu: megatron-core on Ascend needs MindSpeed (pip install mindspeed)") from error


def megatron_context() -> AbstractContextManager[object]:
    """Wrap whatever calls into megatron: on cpu its requests for "cuda" mean the cpu in here; elsewhere nothing."""
    if current().kind != "cpu":
        return nullcontext()
    from mdapo.device import cuda_stand_in

    return cuda_stand_in.CudaMeansCpu()
