"""From a plan to what each data-parallel rank gets: all samples packed in one call, cut where ranks begin.

A share holds a rank's packed tokens as they are; which of them are scored, and all that follows from it, the rank finds
out itself. So the one rank that plans for all touches each token twice, and sends 17 bytes of it.
Shape suffixes: ``P`` tokens of the samples end to end, ``T`` packed tokens of a share, ``M`` segments, ``G``
micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from mdapo.ops.pack import pack, segments
from mdapo.types import MicroBatch, Sample

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


@dataclass(frozen=True)
class Share:
    """One rank's part of a step: ``fields`` name -> [T]; segments and micro-batches by where they begin.

    ``cu_seqlens_M1`` int64, tokens; ``bounds_G1`` int64, segments of each micro-batch; ``micro_batches`` of each
    mini-batch.
    """

    fields: Mapping[str, np.ndarray]
    cu_seqlens_M1: np.ndarray
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


def pack_shares(rows: Rows, cut: Cut, *, token_multiple: int = 1, remove_padding: bool = True) -> list[Share]:
    """Each rank's share. An empty micro-batch becomes a filler: a row of zeros whose one scored token has weight 0.

    A micro-batch's tokens are rounded up to ``token_multiple``. With ``remove_padding`` off each row is padded to its
    micro-batch's longest, rounded up (still in packed form, for one code path; padding comes after all scored tokens).
    """
    filler = len(rows.starts_N)
    groups = [micro if len(micro) else (filler,) for rank in cut for mini in rank for micro in mini]
    size = len(rows.fields["ids"])
    lengths_N = np.append(rows.lengths_N, FILLER_TOKENS)
    layout = segments(
        lengths_N,
        starts_N=np.append(rows.starts_N, size - FILLER_TOKENS),
        shape=(size,),
        groups=groups,
        multiple=token_multiple,
        spans_N=None if remove_padding else _padded(lengths_N, groups, token_multiple),
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


def micro_batches(share: Share) -> list[list[MicroBatch]]:
    """The share's mini-batches of micro-batches; their tensors are views of a few long ones.

    A token at position p of its sequence is scored at p - 1.
    """
    cu_M1, bounds_G1 = share.cu_seqlens_M1, share.bounds_G1
    packed = {name: torch.from_numpy(field) for name, field in share.fields.items()}
    scored_K = packed["mask"].nonzero()[:, 0]
    token_G1 = cu_M1[bounds_G1]
    counts_G = np.diff(np.searchsorted(scored_K.numpy(), token_G1))
    segment_K = np.searchsorted(cu_M1, scored_K.numpy(), side="right") - 1
    assert counts_G.all(), "a micro-batch without a scored token"
    assert (cu_M1[segment_K] < scored_K.numpy()).all(), "a scored token needs one before it"
    ids_T = packed["ids"].long()
    fields = {"ids_T": ids_T, "positions_T": segments(np.diff(cu_M1)).positions_on("cpu")} if len(counts_G) else {}
    of_group = {name: values.split(np.diff(token_G1).tolist()) for name, values in fields.items()}
    of_scored = {
        "loss_index_R": scored_K - 1 - torch.from_numpy(np.repeat(token_G1[:-1], counts_G)),
        "targets_R": ids_T[scored_K],
        "segment_R": torch.from_numpy(segment_K - np.repeat(bounds_G1[:-1], counts_G)),
        **{f"{name}_R": packed[name][scored_K] for name in ("advantages", "loss_weights", "rollout_logps")},
    }
    of_group |= {name: values.split(counts_G.tolist()) for name, values in of_scored.items()}
    found = [
        MicroBatch(
            cu_seqlens=tuple((cu_M1[first : last + 1] - cu_M1[first]).tolist()),
            **{name: parts[g] for name, parts in of_group.items()},
        )
        for g, (first, last) in enumerate(pairwise(bounds_G1.tolist()))
    ]
    return [found[first:last] for first, last in pairwise(accumulate(share.micro_batches, initial=0))]


def _padded(lengths_N: np.ndarray, groups: Sequence[Sequence[int]], multiple: int) -> np.ndarray:
    spans_N = lengths_N.copy()
    for group in groups:
        members = list(group)
        spans_N[members] = -(-int(lengths_N[members].max()) // multiple) * multiple
    return spans_N
