"""pack, unpack and mask_spans by their CUDA kernels on the host twin, in the place of the ops' own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import build

GUARD = 64  # bytes around every output that must stay as they are
GUARD_VALUE = 0xA5


class Guarded:
    """A 16-byte aligned output between guards, poisoned: whatever is not written shows."""

    def __init__(self, like: Tensor, tokens: int) -> None:
        self.shape, self.dtype = (tokens, *like.shape[1:]), like.dtype
        self.size = tokens * item_bytes(like)
        self.buffer = torch.full((self.size + 2 * GUARD + 16,), GUARD_VALUE, dtype=torch.uint8)
        self.start = GUARD + (-(self.buffer.data_ptr() + GUARD)) % 16
        self.buffer[self.start : self.start + self.size] = 0x5A

    @property
    def address(self) -> int:
        return self.buffer.data_ptr() + self.start

    def result(self) -> Tensor:
        outside = torch.cat([self.buffer[: self.start], self.buffer[self.start + self.size :]])
        assert (outside == GUARD_VALUE).all(), "the kernel wrote outside of its output"
        inside = self.buffer[self.start : self.start + self.size].clone()
        return inside.view(self.dtype).view(self.shape) if self.size else torch.empty(self.shape, dtype=self.dtype)


def item_bytes(field: Tensor) -> int:
    return field.element_size() * field[:0].flatten(1).shape[1] if field.dim() > 1 else field.element_size()


def table() -> Mapping[str, Callable[..., Any]]:
    library = build.load("pack")
    return {
        "pack": partial(_copy, library, unpack=False),
        "unpack": partial(_copy, library, unpack=True),
        "mask_spans": partial(_mask_spans, library),
    }


def _copy(
    library: Any, fields: list[Tensor], runs_4M: Tensor, size: int, cp: int, cp_rank: int, *, unpack: bool
) -> list[Tensor]:
    fields = [field.contiguous() for field in fields]
    rows, total = (size, len(fields[0]) * cp) if unpack else (len(fields[0]), size)
    outputs = [Guarded(field, rows if unpack else total // cp) for field in fields]
    pointers, count = ctypes.c_void_p * len(fields), runs_4M.shape[1]
    items = (ctypes.c_int64 * len(fields))(*map(item_bytes, fields))
    message, numbers = ctypes.create_string_buffer(200), map(ctypes.c_int64, (count, rows, total, cp, cp_rank))
    failed = library.pack_twin(
        int(unpack),
        len(fields),
        pointers(*(field.data_ptr() for field in fields)),
        pointers(*(output.address for output in outputs)),
        items,
        ctypes.c_void_p(runs_4M.contiguous().data_ptr()),
        *numbers,
        message,
        ctypes.c_int64(len(message)),
    )
    if failed:
        raise ValueError(message.value.decode())
    return [output.result() for output in outputs]


def _mask_spans(library: Any, mask_BS: Tensor) -> Tensor:
    mask_BS = mask_BS.contiguous()
    rows, size = mask_BS.shape
    spans = torch.full((3, rows), -1, dtype=torch.int64)
    library.mask_spans_twin(
        ctypes.c_void_p(mask_BS.data_ptr()),
        ctypes.c_void_p(spans.data_ptr()),
        ctypes.c_int64(rows),
        ctypes.c_int64(size),
    )
    return spans
