"""A stream of weights cut into buckets of bounded size, in one buffer that is filled again and again.

What is alive at once is one bucket and the tensor being copied into it, however large the model is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# nbytes -> uint8 [nbytes]: where the next bucket goes. The same memory may come again: one bucket is alive at a time.
TakeBuffer = Callable[[int], Tensor]
MOST_PIECES = 4096  # of a bucket: whatever names them (a file's header, a request) stays small


@dataclass(frozen=True)
class Piece:
    """One tensor of a bucket, by its Hugging Face name; ``offset`` and ``nbytes`` count bytes of the bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype end to end, without gaps. ``data_U`` (uint8) is valid until the next bucket is asked for."""

    pieces: tuple[Piece, ...]
    data_U: Tensor

    @property
    def nbytes(self) -> int:
        return len(self.data_U)

    def tensor(self, piece: Piece) -> Tensor:
        """A view of one tensor."""
        return self.data_U[piece.offset : piece.offset + piece.nbytes].view(piece.dtype).view(piece.shape)


class Duplicated(ValueError):
    """A weight came twice; what the servers would hold depends on the order."""


def cut(weights: Iterable[tuple[str, Tensor]], *, bucket_bytes: int, take: TakeBuffer) -> Generator[Bucket]:
    """Every weight of the stream in exactly one bucket, in the stream's order.

    A bucket ends where the next tensor would make it larger than ``bucket_bytes``, or longer than ``MOST_PIECES``, or
    has another dtype (a server reads the buffer in place, which needs each tensor aligned to its own elements); a
    tensor larger than ``bucket_bytes`` is a bucket of its own. A tensor of the stream may change as soon as the next
    one is asked for.

    Raises ``Duplicated``; of a stream that ends early nothing can be known here (``verify.Expected`` does).
    """
    assert bucket_bytes > 0
    seen: set[str] = set()
    pieces: list[Piece] = []
    buffer_U, filled = None, 0
    for name, tensor in weights:
        if name in seen:
            raise Duplicated(f"weight {name!r} came twice")
        seen.add(name)
        nbytes = tensor.numel() * tensor.element_size()
        if buffer_U is not None and (
            filled + nbytes > bucket_bytes or len(pieces) == MOST_PIECES or tensor.dtype != pieces[-1].dtype
        ):
            yield Bucket(tuple(pieces), buffer_U[:filled])
            pieces, buffer_U, filled = [], None, 0
        if buffer_U is None:
            buffer_U = take(max(nbytes, bucket_bytes))
        target = buffer_U[filled : filled + nbytes].view(tensor.dtype).view(tensor.shape)
        target.copy_(tensor.detach())
        pieces.append(Piece(name, tensor.dtype, tuple(tensor.shape), filled, nbytes))
        filled += nbytes
    if buffer_U is not None:
        yield Bucket(tuple(pieces), buffer_U[:filled])


class PlainBuffer:
    """One buffer on ``device``, made on first use, made anew only for a tensor larger than it; ``drop`` gives it back.

    Only what is written becomes resident on a CPU: a model smaller than a bucket costs its own size.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer_U: Tensor | None = None

    def take(self, nbytes: int) -> Tensor:
        """uint8 [nbytes]; what an earlier call returned is void."""
        if self._buffer_U is None or len(self._buffer_U) < nbytes:
            self._buffer_U = None  # before the new one is made: never both
            self._buffer_U = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._buffer_U[:nbytes]

    def drop(self) -> None:
        self._buffer_U = None
