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
from mdapo.types import Samples

FILLER_TOKENS = 2  # a sequence needs one token to read and one to score
# What a token of a share carries, its type, and what it is called in `Samples`.
FIELDS: Mapping[str, type[np.generic]] = {
    "ids": np.int32,
    "advantages": np.float32,
    "loss_weights": np.float32,
    "rollout_logps": np.float32,
    "mask": np.bool_,
}
SOURCES = {name: "response_mask" if name == "mask" else name for name in FIELDS}
# Sample indices of [rank][mini-batch][micro-batch]; an empty micro-batch is a filler.
Cut = Sequence[Sequence[Sequence[Sequence[int]]]]


@dataclass(frozen=True)
class Rows:
    """A step's samples as rows to train on. ``fields`` name -> [P], those of the samples.

    A row ends at its last scored token: what follows is never predicted and predicts nothing scored. ``trains_N``: a
    scored token has weight; ``scored_N``: how many are.
    """

    fields: Mapping[str, np.ndarray]
    starts_N: np.ndarray  # int64
    lengths_N: np.ndarray  # int64, 0 where the policy wrote nothing
    trains_N: np.ndarray  # bool
    scored_N: np.ndarray  # int64


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


def rows_of(samples: Samples) -> Rows:
    """Where each sample's row is in the samples' own arrays, and whether it trains. Nothing is copied."""
    fields = {name: samples.fields[source] for name, source in SOURCES.items()}
    starts_N, scored_N = samples.starts_N, samples.model_tokens_N
    scored_P = np.flatnonzero(fields["mask"])
    ends_N = scored_N.cumsum()  # in scored_P
    weighs_P1 = np.append(0, (fields["loss_weights"][scored_P] != 0).cumsum())
    trains_N = weighs_P1[ends_N] > weighs_P1[ends_N - scored_N]
    last_N = np.append(scored_P, -1)[ends_N - 1]
    lengths_N = np.where(scored_N > 0, last_N + 1 - starts_N, 0)
    return Rows(fields, starts_N, lengths_N, trains_N, scored_N)


def pack_shares(rows: Rows, cut: Cut) -> list[Share]:
    """Each rank's share. An empty micro-batch becomes a filler: a row of zeros whose one scored token has weight 0."""
    filler = len(rows.starts_N)  # a row of no tokens of its own
    layout = segments(
        np.append(rows.lengths_N, 0),
        starts_N=np.append(rows.starts_N, 0),
        spans_N=np.append(rows.lengths_N, FILLER_TOKENS),
        shape=(len(rows.fields["ids"]),),
        groups=[micro if len(micro) else (filler,) for rank in cut for mini in rank for micro in mini],
    )
    tensors = pack({name: torch.from_numpy(field) for name, field in rows.fields.items()}, layout)
    packed = {name: tensor.numpy() for name, tensor in tensors.items()}
    _, lengths_M, begins_M, spans_M = layout.runs_4M.numpy()
    packed["mask"][(begins_M + spans_M - 1)[lengths_M < spans_M]] = True
    bounds, cu = np.array(layout.bounds), layout.cu_seqlens_M1
    counts = [tuple(map(len, rank)) for rank in cut]
    shares = []
    for micro_batches, (first, last) in zip(counts, pairwise(accumulate(map(sum, counts), initial=0)), strict=True):
        own = bounds[first : last + 1]
        start, end = cu[own[0]], cu[own[-1]]
        fields = {name: field[start:end] for name, field in packed.items()}
        shares.append(Share(fields, cu[own[0] : own[-1] + 1] - start, own - own[0], micro_batches))
    return shares
