"""Ragged rows to packed tokens and back: the plain reference, all fields in one call.

Packed layout: rows end to end without padding, ``cu_seqlens`` the host integers where they begin and end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Packed:
    """``fields`` name -> [T], each of its rows' dtype; ``positions_T`` int64, 0 at each row's start; ``cu_seqlens`` S
    + 1 integers from 0 to T. The first ``num_rows`` of the S segments are rows, a further one is padding."""

    fields: dict[str, np.ndarray]
    positions_T: np.ndarray
    cu_seqlens: tuple[int, ...]
    num_rows: int


def pack(rows: Mapping[str, Sequence[np.ndarray]], *, multiple: int = 1, row_len: int | None = None) -> Packed:
    """Put ``N`` rows of every field end to end.

    ``rows`` name -> N arrays [L_i]; the lengths agree over the fields. T is rounded up to ``multiple`` by a last
    segment of zeros. With ``row_len`` every row is padded with zeros to that length instead (a padded batch in packed
    form). ValueError when the fields disagree or a row is longer than ``row_len``.
    """
    lengths = _lengths(rows)
    if row_len is not None and lengths.max(initial=0) > row_len:
        raise ValueError(f"a row of {lengths.max()} tokens does not fit rows of {row_len}")
    spans = lengths if row_len is None else np.full(len(lengths), row_len, np.int64)
    total = -(-int(spans.sum()) // multiple) * multiple
    if total > spans.sum():
        spans = np.append(spans, total - spans.sum())
    cu_seqlens = np.concatenate([[0], np.cumsum(spans)])
    positions = np.arange(total) - np.repeat(cu_seqlens[:-1], spans)
    fields = {}
    for name, parts in rows.items():
        packed = np.zeros(total, parts[0].dtype)
        if row_len is None:
            np.concatenate(parts, out=packed[: int(lengths.sum())])
        else:
            for start, part in zip(cu_seqlens[:-1], parts, strict=False):
                packed[start : start + len(part)] = part
        fields[name] = packed
    return Packed(fields, positions, tuple(int(c) for c in cu_seqlens), len(lengths))


def unpack(packed: Packed, lengths_N: Sequence[int] | None = None) -> dict[str, list[np.ndarray]]:
    """The rows again, as views: name -> N arrays. ``lengths_N`` cuts off what ``row_len`` padded."""
    starts = packed.cu_seqlens[: packed.num_rows]
    ends = packed.cu_seqlens[1 : packed.num_rows + 1]
    if lengths_N is not None:
        ends = tuple(start + length for start, length in zip(starts, lengths_N, strict=True))
    return {
        name: [field[start:end] for start, end in zip(starts, ends, strict=True)]
        for name, field in packed.fields.items()
    }


def _lengths(rows: Mapping[str, Sequence[np.ndarray]]) -> np.ndarray:
    lengths: np.ndarray | None = None
    for name, parts in rows.items():
        found = np.array([len(part) for part in parts], np.int64)
        if lengths is not None and not np.array_equal(lengths, found):
            raise ValueError(f"field {name!r} has rows of other lengths than the fields before it")
        lengths = found
    if lengths is None or len(lengths) == 0:
        raise ValueError("nothing to pack")
    return lengths
