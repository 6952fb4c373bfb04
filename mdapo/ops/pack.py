"""Ragged rows to packed tokens and back, all fields of a batch in one call.

`segments` says where rows lie in the packed buffer: end to end without padding, each in a segment of its own. `pack`
copies every field there, `unpack` copies it back; each is the other's gradient. Kernels: csrc/pack. Shape suffixes:
``N`` rows, ``M`` segments (rows and the dummies that fill up groups), ``T`` packed tokens, ``P`` tokens of the rows.

Context parallelism follows the zig-zag of Llama 3 (arXiv 2407.21783, section 3.3.2): a segment is cut into 2 * cp
chunks of equal size and rank r has chunks r and 2 * cp - 1 - r, so that causal attention costs every rank the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mdapo.ops import registry
from mdapo.ops.columns import column

INT32_MAX = 2**31 - 1
MAX_TOKENS = 2**61  # of all rows
Rows = Sequence[Tensor] | Sequence[np.ndarray]


@dataclass(frozen=True, eq=False)
class Segments:
    """Where rows lie in a packed buffer.

    ``runs_4M`` int64 [4, M] on the host, a column a segment: first token of its row in the flat rows, tokens of the
    row (0: a dummy), first token of the segment, tokens of the segment. Group g (a micro-batch) is segments
    ``bounds[g]`` to ``bounds[g + 1]``. ``shape`` is (B, S) of padded rows or (P,) of flat ones. With ``cp`` > 1 the
    buffer of a rank has ``total // cp`` tokens; all else here counts those of all ranks.
    """

    runs_4M: Tensor
    cu_seqlens_M1: np.ndarray  # int64 on the host: where segments begin, and T
    lengths_N: np.ndarray  # int64, in the rows' own order
    bounds: tuple[int, ...]
    shape: tuple[int, ...]
    cp: int = 1
    cp_rank: int = 0

    @cached_property
    def total(self) -> int:
        """T, over all context-parallel ranks."""
        return int(self.cu_seqlens_M1[-1])

    @cached_property
    def max_seqlen(self) -> int:
        """Tokens of the longest segment."""
        return int(self.runs_4M[3].numpy().max(initial=0))

    def cu_seqlens_on(self, device: torch.device | str) -> Tensor:
        """int32 [M + 1] on ``device``, as attention kernels want it. ValueError when T does not fit."""
        if self.total > INT32_MAX:
            raise ValueError(f"cu_seqlens: {self.total} tokens in one buffer, int32 counts to {INT32_MAX}")
        return torch.from_numpy(self.cu_seqlens_M1.astype(np.int32)).to(device)

    def positions_on(self, device: torch.device | str) -> Tensor:
        """int64 [T / cp]: each token's position in its own segment, also of padding."""
        runs = self.runs_4M.clone()
        runs[0], runs[1] = 0, runs[3]
        counter = torch.arange(self.max_seqlen, device=device)
        return torch.ops.mdapo.pack.default([counter], runs, self.total, self.cp, self.cp_rank)[0]

    def split(self, flat_P: Tensor) -> list[Tensor]:
        """The rows of a flat field, as views, in their own order."""
        return list(flat_P.split(self.lengths_N.tolist()))


def segments(
    lengths_N: Sequence[int] | np.ndarray,
    *,
    starts_N: Sequence[int] | np.ndarray | None = None,
    shape: tuple[int, ...] | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    align: int = 1,
    multiple: int = 1,
    spans_N: Sequence[int] | np.ndarray | None = None,
    cp: int = 1,
    cp_rank: int = 0,
) -> Segments:
    """Lay ``N`` rows end to end, group by group.

    Args:
        lengths_N: tokens of each row; 0 is allowed, and gives a segment of no tokens.
        starts_N: each row's first token in the flat rows; default where rows of ``shape`` begin.
        shape: leading shape of the unpacked fields, its product their tokens: (B, S) of rows that are padded behind, or
            (P,) of rows end to end, the default.
        groups: row indices of each group, in the order wanted; default one group of all rows. A row may be in none.
        align: every segment's tokens are a multiple of this (2 * cp * tp for context and sequence parallelism).
        multiple: a group's tokens are too, by a last dummy segment, never an empty one.
        spans_N: tokens of each row's segment instead of ``align``'s (a padded batch in packed form).
        cp, cp_rank: context-parallel ranks, and which of them the buffer is for; ``align`` is a multiple of 2 * cp.

    Raises:
        ValueError: no rows, what is no list of whole numbers, a negative length, a row longer than S or than its
            span, a group with a row that is not there, segments that cp cannot cut.
    """
    lengths = column("lengths", lengths_N)
    rows = len(lengths)
    starts = _starts(lengths, shape) if starts_N is None else column("starts", starts_N, size=rows)
    spans = _spans(lengths, align) if spans_N is None else column("spans", spans_N, size=rows)
    _check_request(lengths, spans, align=align, multiple=multiple, cp=cp, cp_rank=cp_rank)
    size = (int(lengths.sum()),) if shape is None else shape
    counts, edges = lengths, np.array([0, rows])
    if groups is not None:
        edges = np.append(0, np.fromiter(map(len, groups), np.int64, len(groups)).cumsum())
        order = np.fromiter(chain.from_iterable(groups), np.int64, int(edges[-1]))
        if len(order) and not 0 <= order.min() <= order.max() < rows:
            raise ValueError(f"groups: rows are numbered from 0 to {rows - 1}, not {order.min()} to {order.max()}")
        starts, counts, spans = starts[order], counts[order], spans[order]
    if (whole := math.lcm(multiple, align)) > 1:
        ends = np.append(0, spans.cumsum())[edges]
        fill = -(ends[1:] - ends[:-1]) % whole
        if fill.any():
            at, missing = edges[1:][fill > 0], fill[fill > 0]
            starts, counts, spans = np.insert(starts, at, 0), np.insert(counts, at, 0), np.insert(spans, at, missing)
            edges = edges + np.append(0, (fill > 0).cumsum())
    runs, cu_seqlens = np.empty((4, len(spans)), np.int64), np.zeros(len(spans) + 1, np.int64)
    spans.cumsum(out=cu_seqlens[1:])
    runs[0], runs[1], runs[2], runs[3] = starts, counts, cu_seqlens[:-1], spans
    return Segments(torch.from_numpy(runs), cu_seqlens, lengths, tuple(edges.tolist()), size, cp, cp_rank)


def segments_of_mask(mask_BS: Tensor, **layout: Any) -> Segments:
    """`segments` of padded rows: in each, the run of tokens where ``mask_BS`` (bool or integers) is not 0.

    Padding may be on both sides. On an accelerator this waits for the device, once a batch. Raises ``ValueError``
    where a row has padding between tokens.
    """
    spans_3B = torch.ops.mdapo.mask_spans.default(mask_BS if mask_BS.dtype == torch.bool else mask_BS != 0)
    first, end, gaps = spans_3B.cpu().numpy()
    if gaps.any():
        raise ValueError(f"mask: row {int(gaps.argmax())} has padding between its tokens")
    rows, size = mask_BS.shape
    return segments(end - first, starts_N=np.arange(rows) * size + first, shape=(rows, size), **layout)


def pack(fields: Mapping[str, Tensor | Rows], layout: Segments) -> dict[str, Tensor]:
    """Every field's rows in their segments, zeros in the rest: name -> [T / cp, ...] of the field's dtype.

    A field is a tensor of leading shape ``layout.shape``, or a list of N rows (tensors or arrays) [L_i, ...]. Floating
    fields have gradients. Raises ``ValueError`` for a field of another shape or on another device.
    """
    flat = [_flat(name, field, layout) for name, field in fields.items()]
    _check_place(flat)
    packed = torch.ops.mdapo.pack.default(flat, layout.runs_4M, layout.total, layout.cp, layout.cp_rank)
    return dict(zip(fields, packed, strict=True))


def unpack(fields: Mapping[str, Tensor], layout: Segments) -> dict[str, Tensor]:
    """The way back: name -> ``[*layout.shape, ...]``, zeros where no row is.

    With ``cp`` > 1 zeros also where other ranks have the tokens: the sum over ranks is the whole. ``layout.split`` cuts
    flat results into rows. Raises ``ValueError`` for a field of another length than the buffer's.
    """
    for name, field in fields.items():
        if len(field) * layout.cp != layout.total:
            raise ValueError(f"field {name!r} has {len(field)} tokens, the packed buffer {layout.total // layout.cp}")
    _check_place(list(fields.values()))
    size = math.prod(layout.shape)
    rows = torch.ops.mdapo.unpack.default(list(fields.values()), layout.runs_4M, size, layout.cp, layout.cp_rank)
    return {name: row.unflatten(0, layout.shape) for name, row in zip(fields, rows, strict=True)}


def _check_place(fields: Sequence[Tensor]) -> None:
    devices = {str(field.device) for field in fields}
    if len(devices) != 1:
        raise ValueError(f"fields on {' and '.join(sorted(devices))}" if devices else "no fields")


def _flat(name: str, field: Tensor | Rows, layout: Segments) -> Tensor:
    """[P, ...]"""
    if isinstance(field, Tensor):
        if field.shape[: len(layout.shape)] != layout.shape:
            raise ValueError(f"field {name!r} has shape {tuple(field.shape)}, the rows {layout.shape}")
        return field if len(layout.shape) == 1 else field.flatten(0, len(layout.shape) - 1)
    if not np.array_equal(np.fromiter(map(len, field), np.int64, len(field)), layout.lengths_N):
        raise ValueError(f"field {name!r} has rows of other lengths than the layout's")
    if isinstance(field[0], np.ndarray):
        return torch.from_numpy(np.concatenate(field))
    return torch.cat(list(field))


def _starts(lengths: np.ndarray, shape: tuple[int, ...] | None) -> np.ndarray:
    if shape is None or len(shape) == 1:
        return lengths.cumsum() - lengths
    if len(lengths) != shape[0] or lengths.max(initial=0) > shape[1]:
        raise ValueError(f"{len(lengths)} rows of up to {lengths.max(initial=0)} tokens are not of shape {shape}")
    return np.arange(shape[0]) * shape[1]


def _spans(lengths: np.ndarray, align: int) -> np.ndarray:
    return lengths if align <= 1 else -(-lengths // align) * align


def _check_request(lengths: np.ndarray, spans: np.ndarray, *, align: int, multiple: int, cp: int, cp_rank: int) -> None:
    if len(lengths) == 0:
        raise ValueError("nothing to pack")
    if align < 1 or multiple < 1 or not 0 <= cp_rank < cp:
        raise ValueError(f"align {align} and multiple {multiple} are at least 1, cp_rank {cp_rank} is one of cp {cp}")
    if lengths.min() < 0:
        raise ValueError(f"row {int(lengths.argmin())} has a negative length")
    if spans.max() > MAX_TOKENS // len(spans):
        raise ValueError(f"row {int(spans.argmax())} has {spans.max()} tokens, too many to add up")
    if spans is not lengths and (spans < lengths).any():
        row = int((spans < lengths).argmax())
        raise ValueError(f"row {row} of {lengths[row]} tokens does not fit a segment of {spans[row]}")
    if cp > 1 and (align % (2 * cp) or (spans % (2 * cp)).any()):
        raise ValueError(f"with cp {cp}, align and every span are multiples of {2 * cp}")


# The ops. Plain torch, token by token: which flat token lies at which packed one.


def _pairs(runs_4M: Tensor, *, rows: int, total: int, cp: int, cp_rank: int, device: torch.device) -> list[Tensor]:
    """Flat and packed index, int64 [K] each, of all tokens in this rank's part. ValueError for runs out of range."""
    start, length, begin, span = runs_4M
    chunks = 2 * cp if cp > 1 else 1
    inside = (length >= 0) & (start >= 0) & (start + length <= rows) & (length <= span)
    inside &= (begin >= 0) & (begin + span <= total) & (begin % chunks == 0) & (span % chunks == 0)
    if not (inside.all() and 0 <= cp_rank < cp and total % chunks == 0):
        raise ValueError("runs: one lies outside the rows or the packed buffer, or cannot be cut into cp shards")
    run_K = torch.repeat_interleave(torch.arange(runs_4M.shape[1]), length)
    position_K = torch.arange(len(run_K)) - (length.cumsum(0) - length)[run_K]
    flat_K, packed_K = start[run_K] + position_K, begin[run_K] + position_K
    if cp > 1:
        size_K = span[run_K] // chunks
        chunk_K = position_K // size_K
        second_K = chunk_K == chunks - 1 - cp_rank
        packed_K = begin[run_K] // cp + position_K % size_K + torch.where(second_K, size_K, 0)
        mine_K = second_K | (chunk_K == cp_rank)
        flat_K, packed_K = flat_K[mine_K], packed_K[mine_K]
    return [flat_K.to(device), packed_K.to(device)]


def _pack_reference(fields: list[Tensor], runs_4M: Tensor, total: int, cp: int, cp_rank: int) -> list[Tensor]:
    packed = []
    rows, device = len(fields[0]), fields[0].device
    flat_K, packed_K = _pairs(runs_4M, rows=rows, total=total, cp=cp, cp_rank=cp_rank, device=device)
    for field in fields:
        out = field.new_zeros(total // cp, *field.shape[1:])
        out[packed_K] = field[flat_K]
        packed.append(out)
    return packed


def _unpack_reference(fields: list[Tensor], runs_4M: Tensor, rows: int, cp: int, cp_rank: int) -> list[Tensor]:
    unpacked = []
    total, device = len(fields[0]) * cp, fields[0].device
    flat_K, packed_K = _pairs(runs_4M, rows=rows, total=total, cp=cp, cp_rank=cp_rank, device=device)
    if len(flat_K.unique()) < len(flat_K):
        raise ValueError("runs: one overlaps another")
    for field in fields:
        out = field.new_zeros(rows, *field.shape[1:])
        out[flat_K] = field[packed_K]
        unpacked.append(out)
    return unpacked


def _mask_spans_reference(mask_BS: Tensor) -> Tensor:
    """int64 [3, B]: first token, end of the last (both 0 without tokens), 1 if padding lies between."""
    rows, size = mask_BS.shape
    if size == 0:
        return mask_BS.new_zeros(3, rows, dtype=torch.int64)
    ones = mask_BS.long()
    count, first, behind = ones.sum(1), ones.argmax(1), ones.flip(1).argmax(1)
    end = torch.where(count > 0, size - behind, 0)
    return torch.stack([first, end, (count < end - first).long()])


def _pack_fake(fields: list[Tensor], runs_4M: Tensor, total: int, cp: int, cp_rank: int) -> list[Tensor]:
    return [field.new_empty(total // cp, *field.shape[1:]) for field in fields]


def _unpack_fake(fields: list[Tensor], runs_4M: Tensor, rows: int, cp: int, cp_rank: int) -> list[Tensor]:
    return [field.new_empty(rows, *field.shape[1:]) for field in fields]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    fields, runs_4M, _, cp, cp_rank = inputs
    ctx.save_for_backward(runs_4M)
    ctx.cp, ctx.cp_rank = cp, cp_rank
    ctx.tokens = len(fields[0])  # where the gradients go back to


def _backward(op: Any, ctx: Any, grads: list[Tensor | None], tokens: int) -> tuple[Any, ...]:
    known = [i for i, grad in enumerate(grads) if grad is not None]
    found: list[Tensor | None] = [None] * len(grads)
    if known:
        (runs_4M,) = ctx.saved_tensors
        for i, grad in zip(known, op([grads[i] for i in known], runs_4M, tokens, ctx.cp, ctx.cp_rank), strict=True):
            found[i] = grad
    return found, None, None, None, None


def _pack_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    return _backward(torch.ops.mdapo.unpack.default, ctx, grads, ctx.tokens)


def _unpack_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    return _backward(torch.ops.mdapo.pack.default, ctx, grads, ctx.tokens * ctx.cp)


registry.define(
    "pack(Tensor[] fields, Tensor runs_4M, SymInt total, int cp, int cp_rank) -> Tensor[]",
    reference=_pack_reference,
    fake=_pack_fake,
    setup_context=_save,
    backward=_pack_backward,
)
registry.define(
    "unpack(Tensor[] fields, Tensor runs_4M, SymInt rows, int cp, int cp_rank) -> Tensor[]",
    reference=_unpack_reference,
    fake=_unpack_fake,
    setup_context=_save,
    backward=_unpack_backward,
)
registry.define(
    "mask_spans(Tensor mask_BS) -> Tensor",
    reference=_mask_spans_reference,
    fake=lambda mask_BS: mask_BS.new_empty(3, len(mask_BS), dtype=torch.int64),
)
