"""pack and unpack against what one would write without them.

    python benchmarks/ops/bench_pack.py

A batch of 256 rows of 4096 tokens, 35 % full, padded on both sides; 6 fields of 29 bytes a token; one thread. Both
sides are timed from what they have: the mask (reading it, the layout with cu_seqlens, allocation, copy), or what it
says: concatenation begins with rows that are cut already, and what it is compared with knows where they are; index_put
begins with its index, and unpack with the layout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from _goals import Goal, alternate, milliseconds, ratio, show
from torch import Tensor

from mdapo import device
from mdapo.ops.pack import pack, segments, segments_of_mask, unpack

B, S, FULL = 256, 4096, 0.35


def batch(rows: int = B, size: int = S) -> tuple[Tensor, dict[str, Tensor]]:
    """Mask and fields of [rows, size] on the host."""
    generator = torch.Generator().manual_seed(0)
    lengths_B = torch.rand(rows, generator=generator).mul(2 * FULL * size).long().clamp(1, size)
    starts_B = (torch.rand(rows, generator=generator) * (size - lengths_B)).long()
    at_S = torch.arange(size)
    mask_BS = (at_S >= starts_B[:, None]) & (at_S < (starts_B + lengths_B)[:, None])
    logps_BS = torch.randn(rows, size, generator=generator)
    fields = {
        "ids": torch.randint(0, 50000, (rows, size), generator=generator),
        "positions": at_S.repeat(rows, 1),
        "mask": torch.rand(rows, size, generator=generator) < 0.5,
        "logps": logps_BS,
        "old_logps": logps_BS + 1,
        "advantages": logps_BS + 2,
    }
    return mask_BS, fields


def by_index(mask_BS: Tensor, fields: dict[str, Tensor]) -> list[Tensor]:
    index_T = mask_BS.flatten().nonzero()[:, 0]
    torch.nn.functional.pad(mask_BS.sum(1).cumsum(0), (1, 0))  # cu_seqlens
    return [field.flatten().index_select(0, index_T) for field in fields.values()]


def by_loop(mask_BS: Tensor, fields: dict[str, Tensor]) -> list[Tensor]:
    return [torch.cat([field[b][mask_BS[b]] for b in range(B)]) for field in fields.values()]


def by_concatenation(rows: dict[str, list[Tensor]]) -> list[Tensor]:
    torch.tensor([0, *map(len, rows["ids"])]).cumsum(0)  # cu_seqlens
    return [torch.cat(parts) for parts in rows.values()]


def by_index_put(index_T: Tensor, packed: dict[str, Tensor], shape: tuple[int, int] = (B, S)) -> list[Tensor]:
    unpacked = []
    for field in packed.values():
        rows = field.new_zeros(shape[0] * shape[1])
        rows[index_T] = field
        unpacked.append(rows.view(shape))
    return unpacked


def measure() -> list[Goal]:
    torch.set_num_threads(1)
    device.current().activate()  # as a run does: freed memory is kept
    mask_BS, fields = batch()
    layout = segments_of_mask(mask_BS)
    packed = pack(fields, layout)
    lengths_B, starts_B = layout.lengths_N, layout.runs_4M[0].numpy()
    rows = {name: [field[b][mask_BS[b]] for b in range(B)] for name, field in fields.items()}
    index_T = mask_BS.flatten().nonzero()[:, 0]
    size = sum(field.nbytes for field in packed.values())
    source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    packing: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "pack": lambda: pack(fields, segments_of_mask(mask_BS)),
        "pack of known rows": lambda: pack(fields, segments(lengths_B, starts_N=starts_B, shape=(B, S))),
        "index_select": lambda: by_index(mask_BS, fields),
        "concatenation": lambda: by_concatenation(rows),
        "loop": lambda: by_loop(mask_BS, fields),
    }
    unpacking: dict[str, Callable[[], object]] = {
        "unpack": lambda: unpack(packed, layout),
        "index_put": lambda: by_index_put(index_T, packed),
    }
    for ours, theirs in zip(packed.values(), by_loop(mask_BS, fields), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(unpack(packed, layout).values(), by_index_put(index_T, packed), strict=True):
        assert torch.equal(ours, theirs)
    seconds = alternate(packing) | alternate(unpacking)

    def times(slow: str, fast: str, limit: float, *, at_most: bool = False) -> Goal:
        note = f"{slow} {milliseconds(seconds[slow])}, {fast} {milliseconds(seconds[fast])}"
        what = f"{slow} against {fast}" if at_most else f"{fast} against {slow}"
        return Goal(what, ratio(seconds[slow], seconds[fast]), limit, at_most, note=note)

    return [
        times("pack", "copy", 2.2, at_most=True),
        times("loop", "pack", 30),
        times("index_select", "pack", 4),
        times("concatenation", "pack of known rows", 2),
        times("index_put", "unpack", 4),
    ]


if __name__ == "__main__":
    sys.exit(show(measure(), title="pack"))
