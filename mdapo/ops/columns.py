"""What the ops take as lists of whole numbers: lengths, places, indices; on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def column(
    name: str, values: Sequence[int] | np.ndarray, dtype: type[np.signedinteger] = np.int64, *, size: int | None = None
) -> np.ndarray:
    """[N] of ``dtype``, contiguous; ``size``: what N must be. ValueError, with ``name``: not whole, or too large."""
    array = np.asarray(values)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise ValueError(f"{name}: a list of whole numbers, not {array.dtype} of shape {array.shape}")
    if size is not None and len(array) != size:
        raise ValueError(f"{name}: there are {len(array)}, there must be {size}")
    if array.dtype != dtype and len(array):
        limits = np.iinfo(dtype)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise ValueError(f"{name}: one does not fit {np.dtype(dtype)}")
    return np.ascontiguousarray(array, dtype)
