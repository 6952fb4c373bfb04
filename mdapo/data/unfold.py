"""From a rank's share to its micro-batches: which tokens a forward lays out, and where what is scored stands in them.

Laid out are whole rows, end to end or padded, or the nodes of a prefix tree: the common beginnings of a micro-batch's
rows once. Either way `pack` puts them in their segments. Shape suffixes: ``P`` tokens of the share's rows, ``T`` tokens
of its forwards, ``N`` rows, ``M`` nodes, ``G`` micro-batches, ``K`` scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from mdapo.data.prefix_tree import prefix_tree
from mdapo.data.shares import Share
from mdapo.ops.pack import Segments, pack, segments
from mdapo.types import MicroBatch


@dataclass(frozen=True)
class _Nodes:
    """What the forwards of a share lay out: its rows, or the M nodes of a prefix tree of each micro-batch.

    A node is ``lengths_M`` tokens from ``starts_M`` on (of P), the first at position ``offsets_M`` of its row;
    ``bounds_G1`` nodes of each micro-batch, ``parents`` of them in it, () where no prefix is shared. ``paths``: the
    nodes that each row goes through, row after row. All int64.
    """

    starts_M: np.ndarray
    lengths_M: np.ndarray
    offsets_M: np.ndarray
    bounds_G1: np.ndarray
    parents: Sequence[tuple[int, ...]]
    paths: np.ndarray


def unfold(
    share: Share, *, token_multiple: int = 1, remove_padding: bool = True, share_prefix: bool = False
) -> list[list[MicroBatch]]:
    """The share's mini-batches of micro-batches; their tensors are views of a few long ones.

    A token at position p of its row is scored at p - 1. A last segment of zeros rounds a micro-batch's tokens up to
    ``token_multiple``. With ``remove_padding`` off each row is padded to its micro-batch's longest, rounded up, instead
    (still in packed form, for one code path; padding comes after all scored tokens). With ``share_prefix`` the common
    beginnings of a micro-batch's rows are laid out once.
    """
    if len(share.bounds_G1) == 1:
        return [[] for _ in share.micro_batches]
    cu_N1, bounds_G1 = share.cu_seqlens_N1, share.bounds_G1
    of_token = {name: torch.from_numpy(field) for name, field in share.fields.items()}
    scored_K = of_token["mask"].nonzero()[:, 0]
    row_K = np.searchsorted(cu_N1, scored_K.numpy(), side="right") - 1
    counts_G = np.diff(np.searchsorted(scored_K.numpy(), cu_N1[bounds_G1]))
    assert counts_G.all(), "a micro-batch without a scored token"
    assert (cu_N1[row_K] < scored_K.numpy()).all(), "a scored token needs one before it"
    nodes = _trees(share) if share_prefix else _whole_rows(share)
    layout = _laid_out(nodes, size=int(cu_N1[-1]), multiple=token_multiple, padded=not remove_padding)
    token_G1 = layout.cu_seqlens_M1[list(layout.bounds)]
    of_forward = {
        "ids_T": pack({"ids": of_token["ids"]}, layout)["ids"].long(),
        "positions_T": _positions(nodes, layout),
    }
    of_scored = {
        "loss_index_R": _places(nodes, layout)[scored_K - 1] - torch.from_numpy(np.repeat(token_G1[:-1], counts_G)),
        "targets_R": of_token["ids"][scored_K].long(),
        "segment_R": torch.from_numpy(row_K - np.repeat(bounds_G1[:-1], counts_G)),
        **{f"{name}_R": of_token[name][scored_K] for name in ("advantages", "loss_weights", "rollout_logps")},
    }
    of_group = {name: values.split(np.diff(token_G1).tolist()) for name, values in of_forward.items()}
    of_group |= {name: values.split(counts_G.tolist()) for name, values in of_scored.items()}
    found = []
    for g, (first, last) in enumerate(pairwise(layout.bounds)):
        cu_seqlens, parents = layout.cu_seqlens_M1[first : last + 1] - token_G1[g], nodes.parents[g]
        found.append(
            MicroBatch(
                cu_seqlens=tuple(cu_seqlens.tolist()),
                parents=parents and parents + (-1,) * (last - first - len(parents)),  # what fills up has none
                **{name: parts[g] for name, parts in of_group.items()},
            )
        )
    return [found[first:last] for first, last in pairwise(accumulate(share.micro_batches, initial=0))]


def _whole_rows(share: Share) -> _Nodes:
    starts_N, bounds_G1 = share.cu_seqlens_N1[:-1], share.bounds_G1
    return _Nodes(
        starts_M=starts_N,
        lengths_M=np.diff(share.cu_seqlens_N1),
        offsets_M=np.zeros_like(starts_N),
        bounds_G1=bounds_G1,
        parents=[()] * (len(bounds_G1) - 1),
        paths=np.arange(len(starts_N)),
    )


def _trees(share: Share) -> _Nodes:
    rows = [share.fields["ids"][start:end] for start, end in pairwise(share.cu_seqlens_N1.tolist())]
    trees = [prefix_tree(rows[first:last]) for first, last in pairwise(share.bounds_G1.tolist())]
    bounds_G1 = np.array([*accumulate((len(tree.parents) for tree in trees), initial=0)])
    row_M = np.concatenate([tree.rows_M + first for tree, first in zip(trees, share.bounds_G1[:-1], strict=True)])
    offsets_M = np.concatenate([tree.begins_M for tree in trees])
    paths = [np.concatenate(tree.paths) + first for tree, first in zip(trees, bounds_G1[:-1], strict=True)]
    return _Nodes(
        starts_M=share.cu_seqlens_N1[row_M] + offsets_M,
        lengths_M=np.concatenate([tree.lengths_M for tree in trees]),
        offsets_M=offsets_M,
        bounds_G1=bounds_G1,
        parents=[tree.parents for tree in trees],
        paths=np.concatenate(paths),
    )


def _laid_out(nodes: _Nodes, *, size: int, multiple: int, padded: bool) -> Segments:
    """Each node in a segment of its own; ``padded``: as long as its micro-batch's longest, rounded up."""
    bounds_G1, spans_M = nodes.bounds_G1, None
    if padded:
        assert not any(nodes.parents), "a padded row has no place for a shared prefix"
        longest_G = np.maximum.reduceat(nodes.lengths_M, bounds_G1[:-1])
        spans_M = np.repeat(-(-longest_G // multiple) * multiple, np.diff(bounds_G1))
    groups = [range(first, last) for first, last in pairwise(bounds_G1.tolist())]
    return segments(
        nodes.lengths_M, starts_N=nodes.starts_M, shape=(size,), groups=groups, multiple=multiple, spans_N=spans_M
    )


def _positions(nodes: _Nodes, layout: Segments) -> Tensor:
    """int64 [T]: of each token in its row."""
    _, lengths, _, spans = layout.runs_4M
    first = torch.zeros_like(spans)
    first[lengths > 0] = torch.from_numpy(nodes.offsets_M)
    return layout.positions_on("cpu") + first.repeat_interleave(spans)


def _places(nodes: _Nodes, layout: Segments) -> Tensor:
    """int64 [P]: where in T each token of the rows is."""
    _, lengths, begins, _ = layout.runs_4M.numpy()
    begins_M = begins[lengths > 0]
    back = segments(nodes.lengths_M[nodes.paths], starts_N=begins_M[nodes.paths], shape=(layout.total,))
    return pack({"places": torch.arange(layout.total)}, back)["places"]
