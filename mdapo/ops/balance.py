"""Balancing a ragged batch: items into parts of equal cost, and a step's samples into ranks and micro-batches.

`partition` cuts N costs into k parts. `plan_step` decides for a whole step, on one rank for all of them, which sample
goes to which data-parallel rank and into which of its micro-batches, so that

- no micro-batch has more tokens than the cap (a longer sample is a named error, or runs alone);
- every rank has as many micro-batches in a mini-batch, a multiple of what virtual pipelines need: the fewest found;
  where samples run out the rest are fillers;
- ranks are equally busy. Where they wait for each other only at the end of a mini-batch (plain data parallelism), its
  time is that of the *slowest* rank, max_r sum_s w[r, s] over micro-batches s; where each micro-batch synchronises them
  (experts or weights spread over ranks), that of the *lockstep*, sum_s max_r w[r, s]. Every plan is good at both;
  ``objective`` says which one gives way.

Which samples meet in a mini-batch is not chosen here: the loss is normalised over it, and an optimizer step ends it, so
that mini-batches are planned one by one.

How
---
*Partition.* Longest first into the lightest part (LPT: Graham, SIAM J. Appl. Math. 17, 1969), then exchanges (a move,
or a swap) between the heaviest part and the lightest ones, each time the best of all pairs, found with two pointers
along the sorted parts; then, where parts have few items, the heaviest part is shared out anew with one or two others by
depth-first search in LPT's order (complete greedy: Korf, Artificial Intelligence 106, 1998). Sixteen items or fewer are
searched as a whole. It ends within 2^-20 (2^-12 for searches) of a lower bound: the mean, pigeonholes, and for equal
sizes the costliest items with the company they must have. Differencing (Karmarkar and Karp 1982; for equal sizes
Michiels, Korst, Aarts and van Leeuwen, STACS 2003) is the usual choice; it knows sums only, never single items, so that
what it ends with could be exchanged further, and it takes time for every pair of states.

*Plan.* The fewest micro-batches by tokens, by rows, and by samples longer than half the cap; more, by bisection, only
where no filling is found. Fillings are tried in this order: (1) slots. A sample that costs more than the mean
micro-batch cannot be levelled out, so the slot it stands in (one micro-batch of every rank) lasts as long as it does;
the other ranks' micro-batches of that slot are filled to the same cost with the costliest samples that fit, and so on
until no such sample is left; the rest is LPT under the cap, where full micro-batches gather room from each other by
swaps when a sample fits in none. (2) LPT under the cap alone. (3) Best fit decreasing (Johnson 1973), which needs at
most 11/9 of the fewest. Then exchanges under the cap, first between micro-batches by what each lacks to the heaviest of
its slot, then between ranks by their sum, with no slot growing. Where ranks are not within 2^-12 of their mean by then,
slots may grow: by 2^-7 of their height where all wait at each, as far as it takes where they wait at the end.

All costs are integers and every tie is broken by value, then by number, so that a plan is the same on every machine,
with and without the compiled library, and equal samples are interchangeable. Kernels: csrc/balance; the same in Python:
mdapo/ops/balance_reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from mdapo.errors import UserError
from mdapo.ops import registry
from mdapo.ops.balance_reference.packing import Items
from mdapo.ops.balance_reference.partition import partition_sorted
from mdapo.ops.balance_reference.plan import Shape, heaviest_first, plan_sorted
from mdapo.ops.columns import column

Objective = Literal["slowest", "lockstep"]
OverCap = Literal["error", "alone"]
MAX_TOTAL_BITS = 61  # of the sum of all costs, and of all tokens


@dataclass(frozen=True, eq=False)
class Plan:
    """Where each sample goes. All ranks have ``counts_M[m]`` micro-batches in mini-batch m (0: it has no samples).

    Arrays are int64 [N] on the host. A rank's micro-batches are in the order of falling cost.
    """

    dp: int
    counts_M: tuple[int, ...]
    rank_N: np.ndarray
    mini_N: np.ndarray
    micro_N: np.ndarray  # within its mini-batch, on its rank

    @cached_property
    def place_N(self) -> np.ndarray:
        """The number of each sample's micro-batch: rank by rank, mini-batch by mini-batch."""
        return self.rank_N * sum(self.counts_M) + self._first_M[self.mini_N] + self.micro_N

    @cached_property
    def groups(self) -> list[np.ndarray]:
        """The samples of each micro-batch, ascending, in the order of ``place_N``; empty for a filler."""
        order = np.argsort(self.place_N, kind="stable")
        ends = np.cumsum(np.bincount(self.place_N, minlength=self.dp * sum(self.counts_M))).tolist()
        return [order[start:end] for start, end in pairwise([0, *ends])]

    def load_M(self, costs_N: np.ndarray, objective: Objective) -> np.ndarray:
        """How long each mini-batch lasts as ``objective`` has it, where samples cost ``costs_N``: float64 [M]."""
        per_rank = sum(self.counts_M)
        load_RG = np.bincount(self.place_N, costs_N, self.dp * per_rank).reshape(self.dp, per_rank)
        of_mini = [load_RG[:, first:][:, :count] for first, count in zip(self._first_M, self.counts_M, strict=True)]
        return np.array([load.max(0).sum() if objective == "lockstep" else load.sum(1).max() for load in of_mini])

    @property
    def _first_M(self) -> np.ndarray:
        return np.cumsum([0, *self.counts_M], dtype=np.int64)[:-1]

    @property
    def ranks(self) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]:
        """``ranks[rank][mini][micro]``: a tuple of sample indices, ``()`` for a filler."""
        groups = iter(self.groups)
        return tuple(
            tuple(tuple(tuple(next(groups).tolist()) for _ in range(count)) for count in self.counts_M)
            for _ in range(self.dp)
        )


def partition(costs_N: Sequence[float] | np.ndarray, k: int, *, equal_size: bool = False) -> list[list[int]]:
    """Indices of ``N`` items in ``k`` parts of nearly equal cost, ascending within a part.

    ``costs_N`` are integers or floats, not negative, of any size; they are rounded to 2^-(60 - log2 N) of the largest.
    ``equal_size``: parts differ by at most one item, the larger ones first (nine items in four parts: 3, 2, 2, 2).
    No part is empty when ``N >= k``. Raises ``ValueError`` for other costs, and ``k`` below 1.
    """
    if k < 1:
        raise ValueError(f"k is {k}, there must be a part")
    costs = torch.from_numpy(integer_costs(costs_N))
    items_N, ends_K = torch.ops.mdapo.balance_partition(costs, k, equal_size)
    items = items_N.tolist()
    return [items[start:end] for start, end in pairwise([0, *ends_K.tolist()])]


def plan_step(
    tokens_N: Sequence[int] | np.ndarray,
    *,
    dp: int,
    cap: int | None = None,
    rows: int | None = None,
    costs_N: Sequence[float] | np.ndarray | None = None,
    mini_N: Sequence[int] | np.ndarray | None = None,
    multiple: int = 1,
    at_least: int = 1,
    objective: Objective = "slowest",
    equal_size: bool = False,
    over_cap: OverCap = "error",
    names: Sequence[str] | None = None,
) -> Plan:
    """Samples -> data-parallel ranks -> mini-batches -> micro-batches.

    Args:
        tokens_N: tokens of each sample, as they count against the cap (alignment included).
        dp: data-parallel ranks.
        cap: tokens of a micro-batch, at most; None for no limit.
        rows: samples of a micro-batch, at most; None for no limit.
        costs_N: work of each sample, in any unit (`mdapo.config.flops`); default: its tokens.
        mini_N: which mini-batch each sample belongs to, from 0; default: all to one.
        multiple: divides every number of micro-batches (virtual pipelines: the number of stages).
        at_least: micro-batches a rank where there are as many samples (pipelines: the number of stages).
        objective: what ranks wait for, see above.
        equal_size: ranks have equal numbers of samples in each mini-batch, or one less.
        over_cap: what to do with a sample of more tokens than the cap: ``UserError``, or a micro-batch of its own.
        names: what samples are called in errors; default: their indices.

    Raises:
        UserError: samples over the cap, each by its name.
        ValueError: arguments that make no sense.
    """
    for name, value, possible in (("objective", objective, Objective), ("over_cap", over_cap, OverCap)):
        if value not in get_args(possible):
            raise ValueError(f"{name}: one of {', '.join(get_args(possible))}, not {value!r}")
    tokens = column("tokens", tokens_N)
    mini = np.zeros(len(tokens), np.int64) if mini_N is None else column("mini", mini_N)
    costs = integer_costs(tokens if costs_N is None else costs_N)
    _check(tokens, costs, mini, dp=dp, cap=cap, rows=rows, multiple=multiple, at_least=at_least)
    if cap is not None and over_cap == "error":
        refuse_longer(tokens, cap, names)
    most = 1 << MAX_TOTAL_BITS
    minis = int(mini.max()) + 1 if len(mini) else 0
    rank, micro, counts = torch.ops.mdapo.balance_plan(
        torch.from_numpy(tokens),
        torch.from_numpy(costs),
        torch.from_numpy(mini),
        minis,
        dp,
        most if cap is None else min(cap, most),
        most if rows is None else min(rows, most),
        multiple,
        at_least,
        objective == "lockstep",
        equal_size,
    )
    return Plan(dp, tuple(counts.tolist()), rank.numpy(), mini, micro.numpy())


def integer_costs(costs_N: Sequence[float] | np.ndarray) -> np.ndarray:
    """int64 [N], in proportion to ``costs_N`` and with a sum below 2^61. Small integers stay what they are; others are
    multiplied by a power of two, chosen by the largest alone, and rounded. ValueError: negative or not finite."""
    costs = np.asarray(costs_N)
    if costs.ndim != 1 or (len(costs) and costs.dtype.kind not in "iuf"):
        raise ValueError(f"costs: a list of numbers, not {costs.dtype} of shape {costs.shape}")
    if len(costs) == 0:
        return np.zeros(0, np.int64)
    largest = costs.max()
    if not (costs.min() >= 0 and np.isfinite(largest)):
        raise ValueError("costs: one is negative or not finite")
    bits = MAX_TOTAL_BITS - 1 - len(costs).bit_length()
    if costs.dtype.kind in "iu":
        return (costs >> max(int(largest).bit_length() - bits, 0)).astype(np.int64)
    return np.rint(np.ldexp(costs.astype(np.float64), bits - int(np.frexp(largest)[1]))).astype(np.int64)


def _check(tokens: np.ndarray, costs: np.ndarray, mini: np.ndarray, **numbers: int | None) -> None:
    if tokens.ndim != 1 or tokens.shape != costs.shape or tokens.shape != mini.shape:
        raise ValueError(f"tokens, costs and mini have shapes {tokens.shape}, {costs.shape}, {mini.shape}: all [N]")
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name} is {number}, it must be at least 1")
    if len(tokens) and (tokens.min() < 0 or mini.min() < 0):
        raise ValueError("tokens and mini: one is negative")
    if len(tokens) and len(tokens) * int(tokens.max()) >= 1 << MAX_TOTAL_BITS:
        raise ValueError(f"tokens: sample {int(tokens.argmax())} has {tokens.max()}, too many to add up")


def refuse_longer(tokens: np.ndarray, cap: int, names: Sequence[str] | None = None) -> None:
    """``UserError`` that names every sample of more than ``cap`` tokens."""
    longer = np.flatnonzero(tokens > cap).tolist()
    if longer:
        raise UserError(
            [
                f"actor.ppo_max_token_len: sample {i if names is None else names[i]} has {tokens[i]} tokens, a "
                f"micro-batch may have {cap}; raise it, lower rollout.max_response_len, or set actor.over_cap: alone"
                for i in longer
            ]
        )


# The ops.


def _partition_reference(costs_N: Tensor, k: int, equal_size: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """The items part by part, int64 [N], and where the parts end, int64 [k]."""
    cost_N = costs_N.numpy()
    order = np.argsort(-cost_N, kind="stable")
    parts = partition_sorted(cost_N[order], k, equal=equal_size).members
    items = [np.sort(order[members]) for members in parts]
    return torch.from_numpy(np.concatenate(items)), torch.tensor([len(part) for part in parts]).cumsum(0)


def _plan_reference(
    tokens_N: Tensor,
    costs_N: Tensor,
    mini_N: Tensor,
    minis: int,
    dp: int,
    cap: int,
    rows: int,
    multiple: int,
    at_least: int,
    lockstep: bool,  # noqa: FBT001
    equal_size: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, costs, mini = tokens_N.numpy(), np.maximum(costs_N.numpy(), 1), mini_N.numpy()
    rank, micro, count = np.zeros_like(tokens), np.zeros_like(tokens), np.zeros(minis, np.int64)
    shape = Shape(dp, cap, rows, multiple, at_least, lockstep, equal_size)
    for m in range(minis):
        own = np.flatnonzero(mini == m)
        if len(own) == 0:
            continue
        order = own[np.lexsort((-tokens[own], -costs[own]))]
        items = Items(costs[order], tokens[order], heaviest_first(tokens[order].tolist()))
        placed = plan_sorted(items, shape)
        count[m] = placed.micro
        for b, members in enumerate(placed.bins.members):
            rank[order[members]], micro[order[members]] = placed.rank[b], placed.slot[b]
    return torch.from_numpy(rank), torch.from_numpy(micro), torch.from_numpy(count)


def _plan_fake(tokens_N: Tensor, costs_N: Tensor, mini_N: Tensor, minis: int, *numbers: int) -> tuple[Tensor, ...]:
    return torch.empty_like(tokens_N), torch.empty_like(tokens_N), tokens_N.new_empty(minis)


registry.define(
    "balance_partition(Tensor costs_N, int k, bool equal_size) -> (Tensor, Tensor)",
    reference=_partition_reference,
    fake=lambda costs_N, k, equal_size: (torch.empty_like(costs_N), costs_N.new_empty(k)),
)
registry.define(
    "balance_plan(Tensor tokens_N, Tensor costs_N, Tensor mini_N, int minis, int dp, int cap, int rows, int multiple, "
    "int at_least, bool lockstep, bool equal_size) -> (Tensor, Tensor, Tensor)",
    reference=_plan_reference,
    fake=_plan_fake,
)
