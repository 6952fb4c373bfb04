"""Time and bandwidth of pack, unpack and token_logprob on the device at hand, beside what one would write without them.

    python benchmarks/gpu/bench_ops.py OUT.csv [--small]

``--small`` is for a look without a GPU: the same code at sizes that say nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rows import Table
from timing import seconds

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
import bench_pack
import bench_token_logprob as bench_logprob

from mdapo import device
from mdapo.ops import token_logprob  # noqa: F401  defines its two passes
from mdapo.ops.pack import pack, segments_of_mask, unpack

# Rows and tokens of a padded batch; tokens, hidden size and vocabulary of the scored ones (as of a 1.5B model).
SIZES = {"full": ((1024, 8192), (8192, 1536, 151936)), "small": ((8, 64), (64, 16, 1024))}
TILE_ROWS, TILE_IDS = 4096, 8192  # of bfloat16: 64 MiB, as the op cuts them


def pack_rows(table: Table, shape: tuple[int, int]) -> None:
    """From the layout on, as the trainer has it on the host; bandwidths count bytes read and bytes written."""
    where = device.current().torch_device
    mask_BS, on_host = bench_pack.batch(*shape)
    layout = segments_of_mask(mask_BS)
    fields = {name: field.to(where) for name, field in on_host.items()}
    mask_BS = mask_BS.to(where)
    packed = pack(fields, layout)
    index_T = mask_BS.flatten().nonzero()[:, 0]
    size = sum(field.nbytes for field in packed.values())
    source, target = torch.ones(2, size, dtype=torch.uint8, device=where)
    rows = {name: field.flatten() for name, field in fields.items()}
    for ours, theirs in zip(packed.values(), rows.values(), strict=True):
        assert torch.equal(ours, theirs.index_select(0, index_T))
    back = unpack(packed, layout)
    for ours, theirs in zip(back.values(), bench_pack.by_index_put(index_T, packed, shape), strict=True):
        assert torch.equal(ours, theirs)
    padded = sum(field.nbytes for field in back.values())
    times = seconds(
        {
            "copy of the same bytes": lambda: target.copy_(source),
            "pack": lambda: pack(fields, layout),
            "index_select": lambda: [field.index_select(0, index_T) for field in rows.values()],
            "unpack": lambda: unpack(packed, layout),
            "index_put": lambda: bench_pack.by_index_put(index_T, packed, shape),
        }
    )
    what = f"{shape[0]} rows x {shape[1]}, {size / 1e6:.0f} MB packed"
    for name, taken in times.items():
        moved = size + padded if name in ("unpack", "index_put") else 2 * size
        table.add("ops", name, taken * 1e3, "ms", f"{moved / taken / 1e9:.0f} GB/s, {what}")
    table.add("ops", "pack over a copy of the same bytes", times["pack"] / times["copy of the same bytes"], "x")
    table.add("ops", "pack faster than index_select", times["index_select"] / times["pack"], "x")
    table.add("ops", "unpack faster than index_put", times["index_put"] / times["unpack"], "x")


def passes(table: Table, rows: int, ids: int) -> None:
    """The two kernels alone, on one tile of logits: bandwidth of one read, and of one read and one write."""
    where, generator = device.current().torch_device, torch.Generator().manual_seed(0)
    logits_RC = torch.randn(rows, ids, generator=generator).to(where, torch.bfloat16)
    targets_R = torch.randint(0, ids, (rows,), generator=generator).to(where)
    stats_4R, terms_5R = torch.zeros(4, rows, device=where), torch.ones(5, rows, device=where)
    other, ops = torch.empty_like(logits_RC), torch.ops.mdapo
    times = seconds(
        {
            "copy of a tile": lambda: other.copy_(logits_RC),
            "token_logprob_stats": lambda: ops.token_logprob_stats(stats_4R, logits_RC, targets_R, 0, 1.0),
            "token_logprob_grad": lambda: ops.token_logprob_grad(logits_RC, targets_R, terms_5R, 0, 1.0),
        }
    )
    for name, taken in times.items():
        moved = logits_RC.nbytes * (1 if name == "token_logprob_stats" else 2)
        table.add("ops", name, taken * 1e3, "ms", f"{moved / taken / 1e9:.0f} GB/s, tile [{rows}, {ids}] bfloat16")


def logprob_rows(table: Table, shape: tuple[int, int, int]) -> None:
    """Forward and backward against full logits; each alone on the device, so that memory is its own."""
    tokens, hidden, vocab = shape
    inputs = bench_logprob.Inputs(tokens, torch.bfloat16, vocab, hidden, device.current().torch_device)
    times: dict[str, float] = {}
    for name, function in (("ours", inputs.ours), ("unfused", inputs.unfused), ("chunked", inputs.chunked)):
        try:
            note = extra_memory(function)
            times[name] = seconds({name: function}, rounds=3, calls=2)[name]
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            table.add("ops", f"token_logprob, {name}", "not run (out of memory)")
            continue
        what = f"{tokens} tokens, hidden {hidden}, vocabulary {vocab}, bfloat16"
        table.add("ops", f"token_logprob forward and backward, {name}", times[name] * 1e3, "ms", f"{note}{what}")
    for name in times.keys() - {"ours"}:
        table.add("ops", f"token_logprob faster than {name}", times[name] / times["ours"], "x")


def extra_memory(function: Callable[[], Any]) -> str:
    """What one call allocates at its peak, in words; nothing where the device does not count."""
    if device.current().kind != "cuda":
        return ""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB extra, "


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(arguments)
    here, table = device.current(), Table(options.out)
    here.activate()
    batch, scored = SIZES["small" if options.small else "full"]
    pack_rows(table, batch)
    passes(table, *((64, 512) if options.small else (TILE_ROWS, TILE_IDS)))
    logprob_rows(table, scored)


if __name__ == "__main__":
    main(sys.argv[1:])
