"""Micro-batches of padded rows (``actor.use_remove_padding: false``): samples of like length side by side.

A padded micro-batch has as many tokens as rows times its longest, so its samples are neighbours in length. The bins are
made here, as few as are found, and then go to ranks as `plan_step` has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mdapo.config.flops import WorkModel
from mdapo.ops.balance import Objective, Plan, plan_step

Bins = list[list[int]]


def plan_padded(
    tokens_N: np.ndarray,
    scored_N: np.ndarray,
    mini_N: np.ndarray,
    *,
    dp: int,
    cap: int,
    work: WorkModel,
    multiple: int,
    at_least: int,
    objective: Objective,
) -> Plan:
    """As `plan_step`, where rows times the longest count against ``cap``; a longer sample is alone."""
    bins: Bins = []
    mini_of_bin: list[int] = []
    for mini in range(int(mini_N.max(initial=-1)) + 1):
        own = np.flatnonzero(mini_N == mini)
        found = [own[members].tolist() for members in _bins(tokens_N[own], cap, dp, multiple, at_least)]
        bins += found
        mini_of_bin += [mini] * len(found)
    longest_B = np.array([tokens_N[members].max() for members in bins])
    rows_B, scored_B = np.array([len(members) for members in bins]), np.array([scored_N[m].sum() for m in bins])
    units = plan_step(
        longest_B,
        rows=1,
        costs_N=rows_B * work.of(longest_B, 0) + work.of(0, scored_B),
        mini_N=mini_of_bin,
        dp=dp,
        multiple=multiple,
        at_least=at_least,
        objective=objective,
    )
    bin_N = np.empty(len(tokens_N), np.int64)
    for b, members in enumerate(bins):
        bin_N[members] = b
    return Plan(dp, units.counts_M, units.rank_N[bin_N], mini_N, units.micro_N[bin_N])


def _bins(tokens: np.ndarray, cap: int, dp: int, multiple: int, at_least: int) -> Bins:
    """Of one mini-batch: a number that divides evenly over ranks, where samples suffice."""
    order = np.argsort(-tokens, kind="stable")
    alone, rest = order[tokens[order] > cap], order[tokens[order] <= cap]
    fewest = len(alone) + len(_neighbours(tokens, rest, cap))
    per_rank = max(-(-fewest // dp), min(at_least, len(tokens) // dp))
    count = -(-per_rank // multiple) * multiple * dp - len(alone)
    low, high = int(tokens[rest].max(initial=0)), cap
    while low < high:  # the lowest cap that gives no more: longest rows spread evenly
        middle = (low + high) // 2
        if len(_neighbours(tokens, rest, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return [[int(i)] for i in alone] + _split(_neighbours(tokens, rest, high), count)


def _neighbours(tokens: np.ndarray, order: np.ndarray, cap: int) -> Bins:
    """Runs of falling length, while rows times the first, the longest, stay within the cap."""
    bins: Bins = []
    start = 0
    while start < len(order):
        rows = max(cap // max(int(tokens[order[start]]), 1), 1)
        bins.append(order[start : start + rows].tolist())
        start += rows
    return bins


def _split(bins: Sequence[list[int]], count: int) -> Bins:
    """Halve the most numerous bins while there are fewer than ``count``: no rank shall wait for another's samples."""
    bins = list(bins)
    while bins and len(bins) < count:
        largest = max(range(len(bins)), key=lambda b: len(bins[b]))
        members = bins[largest]
        if len(members) < 2:
            break
        bins[largest : largest + 1] = [members[: len(members) // 2], members[len(members) // 2 :]]
    return bins
