"""The CPU stand-in for torch.cuda: lets an unmodified megatron-core, which asks for "cuda" throughout, run on a CPU.

Two parts. Stubs in ``torch.cuda`` (streams, events, RNG, ``current_device``) are installed once, before megatron is
imported, and only in CPU processes. A ``TorchFunctionMode`` maps ``device="cuda"`` to the CPU; it costs every torch
call from Python about a microsecond, so it is entered around megatron calls only, never around generation.
``torch.cuda.is_available()`` stays False.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def to_cpu(device: object) -> object:
    """``"cuda"``, ``"cuda:0"``, a cuda device or a bare index mean the CPU; anything else is left alone."""
    if isinstance(device, str):
        return CPU if device.startswith("cuda") else device
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    return CPU if isinstance(device, int) and not isinstance(device, bool) else device


class CudaMeansCpu(TorchFunctionMode):
    """Within it, tensors asked for on "cuda" are made on the CPU, and CPU tensors call themselves CUDA tensors."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs:
            if "device" in kwargs:
                kwargs["device"] = to_cpu(kwargs["device"])
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        special = SPECIAL.get(func)
        if special is not None:
            return special(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


def _to(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mapped = (to_cpu(a) if isinstance(a, (str, torch.device)) else a for a in args[1:])
    return func(args[0], *mapped, **kwargs)


def _type(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # The optimizer compares type names, e.g. "torch.cuda.FloatTensor".
    if len(args) == 1 and not kwargs:
        return func(*args).replace("torch.", "torch.cuda.")
    return func(*args, **kwargs)


SPECIAL: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.to: _to,
    torch.Tensor.type: _type,
    torch.Tensor.cuda: lambda func, args, kwargs: args[0],
    torch.Tensor.record_stream: lambda func, args, kwargs: None,
}


class _Event:
    """A CPU runs in order: every event has already happened."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, *args: object) -> None: ...

    def wait(self, *args: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return 0.0


class _Stream(contextlib.nullcontext):
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def wait_stream(self, *args: object) -> None: ...

    def wait_event(self, *args: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


def install() -> None:
    """Put the stubs into ``torch.cuda`` (and, once megatron's random module is imported, its two RNG functions)."""
    cuda: Any = torch.cuda
    stream = _Stream()
    stubs: dict[str, Any] = {
        "current_device": lambda: CPU,
        "synchronize": lambda *args, **kwargs: None,
        "empty_cache": lambda: None,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda *args: stream,
        "default_stream": lambda *args: stream,
        "stream": lambda s: contextlib.nullcontext(),
        "memory_allocated": lambda *args: 0,
        "max_memory_allocated": lambda *args: 0,
        "memory_reserved": lambda *args: 0,
    }
    for name, stub in stubs.items():
        setattr(cuda, name, stub)
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state


def install_random(module: Any) -> None:
    """megatron's random module reaches into the CUDA driver; give it the CPU generator (its own names, kept by it)."""
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
