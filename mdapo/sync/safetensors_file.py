"""Buckets as safetensors files, written straight from the buffer: the library would need a second copy of it."""

from __future__ import annotations

import json
from typing import Final

import torch

from mdapo.sync.buckets import Piece

ALIGNMENT: Final = 64  # of the data in the file, so that tensors are aligned where it is mapped
NAMES: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def header(pieces: tuple[Piece, ...], *, room: int | None = None) -> bytes:
    """What stands before the bucket's bytes: length (8 bytes, little endian), then JSON, padded with blanks.

    The format wants the tensors to fill the rest of the file without gaps, as they fill a bucket. ``room``: make it
    just so many bytes, a multiple of ``ALIGNMENT``.
    """
    described = {
        piece.name: {
            "dtype": NAMES[piece.dtype],
            "shape": list(piece.shape),
            "data_offsets": [piece.offset, piece.offset + piece.nbytes],
        }
        for piece in pieces
    }
    text = json.dumps(described, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if room is not None:
        assert 8 + len(text) <= room, f"{len(pieces)} tensors of a bucket need {len(text)} bytes of header"
        text = text.ljust(room - 8)
    return len(text).to_bytes(8, "little") + text
