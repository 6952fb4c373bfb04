"""From a plan to what each data-parallel rank gets: all samples packed in one call, cut where ranks begin.

A share holds a rank's rows end to end, as they are; what a forward makes of them the rank finds out itself (unfold.py).
So the one rank that plans for all touches each token twice, and sends 17 bytes of it. Shape suffixes: ``P`` tokens of
rows end to end, ``N`` rows, ``G`` micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from mdapo.ops.pack import pack, segments
from mdapo.types import Sample

FILLER_TOKENS = 2  # a sequence needs one token to read and one to score
# What a token carries, and its type, in rows and shares alike.
FIELDS: Mapping[str, type[np.generic]] = {
    "ids": np.int32,
    "advantages": np.float32,
    "loss_weights": np.float32,
    "rollout_logps": np.float32,
    "mask": np.bool_,
}
# Sample indices of [rank][mini-batch][micro-batch]; an empty micro-batch is a filler.
Cut = Sequence[Sequence[Sequence[Sequence[int]]]]


@dataclass(frozen=True)
class Rows:
    """A step's samples end to end. ``fields`` name -> [P], and a filler behind them.

    A row ends at its last scored token: what follows is never predicted and predicts nothing scored. ``trains_N``: some
    token has weight.
    """

    fields: Mapping[str, np.ndarray]
    starts_N: np.ndarray  # int64
    lengths_N: np.ndarray  # int64, 0 where the policy wrote nothing
    trains_N: np.ndarray  # bool

    def ids(self, row: int) -> np.ndarray:
        """int32 [L] of one row, a view."""
        return self.fields["ids"][self.starts_N[row] :][: self.lengths_N[row]]


@dataclass(frozen=True)
class Share:
    """One rank's part of a step: ``fields`` name -> [P], its rows end to end; rows and micro-batches by their bounds.

    ``cu_seqlens_N1`` int64, tokens; ``bounds_G1`` int64, rows of each micro-batch; ``micro_batches`` of each
    mini-batch.
    """

    fields: Mapping[str, np.ndarray]
    cu_seqlens_N1: np.ndarray
    bounds_G1: np.ndarray
    micro_batches: tuple[int, ...]


def rows_of(samples: Sequence[Sample]) -> Rows:
    """The samples' arrays, copied end to end, and where each is."""
    fillers = {name: np.zeros(FILLER_TOKENS, dtype) for name, dtype in FIELDS.items()}
    fillers["mask"][-1] = True
    sources = {name: "response_mask" if name == "mask" else name for name in FIELDS}
    parts = {name: [getattr(sample, source) for sample in samples] for name, source in sources.items()}
    fields = {name: np.concatenate([*parts[name], fillers[name]], dtype=dtype) for name, dtype in FIELDS.items()}
    sizes_N = np.fromiter(map(len, parts["ids"]), np.int64, len(samples))
    return trimmed(fields, sizes_N)


def trimmed(fields: Mapping[str, np.ndarray], sizes_N: np.ndarray) -> Rows:
    """``fields`` of samples of ``sizes_N`` tokens, with a filler behind them, as `Rows`."""
    starts_N = sizes_N.cumsum() - sizes_N
    scored = np.flatnonzero(fields["mask"])
    before_N, upto_N = (np.searchsorted(scored, edge) for edge in (starts_N, starts_N + sizes_N))
    lengths_N = np.where(upto_N > before_N, scored[upto_N - 1] + 1 - starts_N, 0)
    weighted = np.flatnonzero(fields["loss_weights"])
    trains_N = np.diff([np.searchsorted(weighted, edge) for edge in (starts_N, starts_N + lengths_N)], axis=0)[0] > 0
    return Rows(fields, starts_N, lengths_N, trains_N)


def pack_shares(rows: Rows, cut: Cut) -> list[Share]:
    """Each rank's share. An empty micro-batch becomes a filler: a row of zeros whose one scored token has weight 0."""
    filler = len(rows.starts_N)
    size = len(rows.fields["ids"])
    layout = segments(
        np.append(rows.lengths_N, FILLER_TOKENS),
        starts_N=np.append(rows.starts_N, size - FILLER_TOKENS),
        shape=(size,),
        groups=[micro if len(micro) else (filler,) for rank in cut for mini in rank for micro in mini],
    )
    tensors = pack({name: torch.from_numpy(field) for name, field in rows.fields.items()}, layout)
    packed = {name: tensor.numpy() for name, tensor in tensors.items()}
    bounds, cu = np.array(layout.bounds), layout.cu_seqlens_M1
    counts = [tuple(map(len, rank)) for rank in cut]
    shares = []
    for micro_batches, (first, last) in zip(counts, pairwise(accumulate(map(sum, counts), initial=0)), strict=True):
        own = bounds[first : last + 1]
        start, end = cu[own[0]], cu[own[-1]]
        fields = {name: field[start:end] for name, field in packed.items()}
        shares.append(Share(fields, cu[own[0] : own[-1] + 1] - start, own - own[0], micro_batches))
    return shares
