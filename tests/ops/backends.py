"""Where an op's vectors run: the plain-torch reference, this machine's CPU kernels, CUDA; others join the list.

A test takes the fixture ``backend`` (conftest.py), makes its tensors on ``backend.device`` and calls the wrapper as
the trainer does. A backend that stands in for kernels without a device of its own (a reference, a host twin) names
functions that run in place of the op, below autograd.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from ascend import twin as ascend_twin
from cuda_twin import build as cuda_twin
from cuda_twin import pack_twin, token_logprob_twin
from torch.utils._python_dispatch import TorchDispatchMode

from mdapo.ops import registry


class Instead(TorchDispatchMode):
    """Calls ``table[name]`` for the op ``mdapo::name``."""

    def __init__(self, table: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.table = table

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        other = self.table.get(func._schema.name.removeprefix("mdapo::"))
        return (other or func)(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Backend:
    """``missing(op)`` says why the op cannot run here, "" where it can; ``instead`` gives the functions to call."""

    name: str
    device: str
    missing: Callable[[str], str]
    instead: Callable[[], Mapping[str, Callable[..., Any]]] = field(default=dict)

    @contextmanager
    def serving(self) -> Iterator[None]:
        table = self.instead()
        with Instead(table) if table else nullcontext():
            yield

    def opcheck(self, op: str, *arguments: Any) -> None:
        """torch's own checks of an op: a stand-in cannot be traced, and gradients are checked on devices it knows."""
        checks = {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}
        if self.instead() and self.device == "cpu":
            checks -= {"test_faketensor", "test_aot_dispatch_dynamic"}
        if self.device == "npu":
            checks -= {"test_autograd_registration", "test_aot_dispatch_dynamic"}
        torch.library.opcheck(getattr(torch.ops.mdapo, op).default, arguments, test_utils=sorted(checks))


def _native(kind: str) -> Callable[[str], str]:
    def missing(op: str) -> str:
        if kind == "cuda" and not torch.cuda.is_available():
            return "no CUDA device"
        if kind in registry.native_backends().get(op, ()):
            return ""
        return registry.LIBRARIES[kind] or f"mdapo::{op} has no {kind} kernel"

    return missing


def _twin(op: str) -> str:
    if cuda_twin.CXX is None:
        return "no C++ compiler"
    return "" if op in ("pack", "token_logprob_stats") else f"no twin driver for {op}"


def _ascend(op: str) -> str:
    if ascend_twin.CXX is None:
        return "no C++ compiler"
    return "" if op in ascend_twin.OPS else f"mdapo::{op} has no Ascend kernel"


def _npu(op: str) -> str:
    if os.environ.get("MDAPO_TEST_NPU") not in ("fake", "device"):
        return "MDAPO_TEST_NPU is neither fake (test_fake_npu.py) nor device (scripts/ascend_smoke.sh)"
    return "" if op in ascend_twin.OPS else f"mdapo::{op} has no Ascend kernel"


def _without_float64(*ops: str) -> Mapping[str, Callable[..., Any]]:
    """The ops themselves, and a skip where an Ascend core lacks the type."""

    def checked(op: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
            if any(x.dtype == torch.float64 for x in tensors):
                pytest.skip("an Ascend core has no float64")
            return getattr(torch.ops.mdapo, op)(*arguments)

        return call

    return {op: checked(op) for op in ops}


BACKENDS = [
    Backend("reference", "cpu", lambda op: "", lambda: registry.REFERENCES),
    Backend("cpu", "cpu", _native("cpu")),
    Backend("cuda", "cuda", _native("cuda")),
    Backend("cuda twin", "cpu", _twin, lambda: {**pack_twin.table(), **token_logprob_twin.table()}),
    Backend("ascend twin", "cpu", _ascend, ascend_twin.table),
    Backend("npu", "npu", _npu, lambda: _without_float64("token_logprob_stats", "token_logprob_grad")),
]
