"""token_logprob's two passes by their CUDA kernels on the host twin, in the place of the ops' own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import build

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
GUARD, GUARD_VALUE = 64, 0x5A  # bytes around the rows that must stay as they are
MOST_GUARDED = 1 << 26


def table() -> Mapping[str, Callable[..., Any]]:
    library = build.load("token_logprob")
    return {"token_logprob_stats": partial(_stats, library), "token_logprob_grad": partial(_grad, library)}


def _stats(
    library: Any, stats_4R: Tensor, logits_RC: Tensor, targets_R: Tensor, first_id: int, temperature: float
) -> None:
    _run(library, stats_4R, logits_RC, targets_R, first_id, temperature, gradient=False)


def _grad(
    library: Any, logits_RC: Tensor, targets_R: Tensor, terms_5R: Tensor, first_id: int, temperature: float
) -> None:
    _run(library, terms_5R, logits_RC, targets_R, first_id, temperature, gradient=True)


def _run(
    library: Any,
    values_KR: Tensor,
    logits_RC: Tensor,
    targets_R: Tensor,
    first_id: int,
    temperature: float,
    *,
    gradient: bool,
) -> None:
    rows, cols = logits_RC.shape
    stride = logits_RC.stride(0) if rows > 1 else cols
    guarded = Guarded(logits_RC, stride) if rows * stride < MOST_GUARDED else None
    tile_RC = guarded.tile_RC if guarded else logits_RC
    error = library.token_logprob_twin(
        int(gradient),
        DTYPES[logits_RC.dtype],
        ctypes.c_void_p(tile_RC.data_ptr()),
        ctypes.c_void_p(targets_R.contiguous().data_ptr()),
        ctypes.c_void_p(values_KR.data_ptr()),
        (ctypes.c_int64 * 5)(rows, cols, stride, first_id, values_KR.stride(0)),
        ctypes.c_double(temperature),
    )
    assert error == 0
    if guarded:
        guarded.check()
        logits_RC.copy_(tile_RC)


class Guarded:
    """A copy of a tile, its rows as they lie in 16-byte words, with guards around and between them."""

    def __init__(self, logits_RC: Tensor, stride: int) -> None:
        self.shape, self.stride, self.dtype = logits_RC.shape, stride, logits_RC.dtype
        self.bytes = (logits_RC.shape[0] * stride + logits_RC.shape[1]) * logits_RC.element_size()
        self.buffer = torch.full((self.bytes + 2 * GUARD + 16,), GUARD_VALUE, dtype=torch.uint8)
        self.start = GUARD + (logits_RC.data_ptr() - self.buffer.data_ptr() - GUARD) % 16
        self.tile_RC = self._tile(self.buffer).copy_(logits_RC)

    def check(self) -> None:
        expected = torch.full_like(self.buffer, GUARD_VALUE)
        self._tile(expected).copy_(self.tile_RC)
        assert torch.equal(expected, self.buffer), "the kernel wrote outside of its rows"

    def _tile(self, buffer: Tensor) -> Tensor:
        inside = buffer[self.start : self.start + self.bytes].view(self.dtype)
        return inside.as_strided(self.shape, (self.stride, 1), inside.storage_offset())
