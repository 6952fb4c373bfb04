"""A whole optimizer step on a ragged batch: packed against padded, and its FLOPs against a matrix product's.

    python benchmarks/ops/bench_actor.py

The quickstart's model, two threads; optimizer steps of four micro-batches, each with eight rows that fill 46 % of their
rectangle, by the trainer's own plan and actor. Packed against padded: the limit is that time falls as tokens do. Padded
is what one would write without packing, where every place of the rectangle goes through the vocabulary, too; packed,
every real token does. Beside it ours with ``use_remove_padding: false``, which scores the policy's tokens only, as the
packed step of a run does. Utilisation: of such a packed step; FLOPs are the model's (`mdapo.config.flops.model_flops`:
nothing that is computed twice, the vocabulary for scored tokens only) over those of a square product of the same dtype
in the same process, in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
from _actor import configuration, group, laid_out, opened
from _goals import Goal, alternate, ratio, show, timed

from mdapo.algorithms.losses import make_loss_fn
from mdapo.config.flops import model_flops
from mdapo.megatron.actor import Actor
from mdapo.types import MicroBatch

LENGTHS = (256, 190, 150, 110, 85, 65, 50, 36)  # 46 % of 8 x 256
PROMPT = 24  # tokens of each that are not scored
MICRO_BATCHES, SIDE, ROUNDS = 4, 2048, 2
GOALS = {"float32": 0.70, "bfloat16": 0.50}


def batches(actor: Actor, **options: Any) -> list[MicroBatch]:
    rng, vocab = np.random.default_rng(0), actor.hf.vocab
    samples = group(rng.integers(0, vocab, PROMPT), [rng.integers(0, vocab, n - PROMPT) for n in LENGTHS], rng)
    return laid_out(
        samples, configuration(ppo_max_token_len=len(LENGTHS) * max(LENGTHS), share_prefix=False, **options)
    )


def flops(actor: Actor, minis: list[MicroBatch]) -> float:
    squares = sum(size * size for mini in minis for size in np.diff(mini.cu_seqlens).tolist())
    tokens, scored = (sum(len(getattr(mini, name)) for mini in minis) for name in ("ids_T", "targets_R"))
    return float(model_flops(actor.hf).of(tokens, scored, squares))


def product(dtype: str) -> Callable[[], torch.Tensor]:
    a, b = (torch.randn(SIDE, SIDE).to(getattr(torch, dtype)) for _ in range(2))
    return partial(torch.mm, a, b)


def whole_rows(mini: MicroBatch) -> MicroBatch:
    """The same with every place scored that has one behind it in its row; what was not scored before has no weight."""
    index_R = torch.cat([torch.arange(first, last - 1) for first, last in pairwise(mini.cu_seqlens)])
    sizes = torch.tensor(mini.cu_seqlens).diff() - 1
    known = torch.isin(index_R, mini.loss_index_R)

    def spread(values_R: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(index_R)).masked_scatter(known, values_R)

    return replace(
        mini,
        loss_index_R=index_R,
        targets_R=mini.ids_T[index_R + 1],
        segment_R=torch.arange(len(sizes)).repeat_interleave(sizes),
        advantages_R=spread(mini.advantages_R),
        loss_weights_R=spread(mini.loss_weights_R),
        rollout_logps_R=spread(mini.rollout_logps_R),
    )


def against_padded(actor: Actor) -> Goal:
    own = {"packed": batches(actor), "padded": batches(actor, use_remove_padding=False)}
    layouts = {name: [*map(whole_rows, minis)] for name, minis in own.items()} | {"ours padded": own["padded"]}
    tokens = {name: sum(mb.num_tokens for mb in minis) for name, minis in layouts.items()}
    assert tokens["packed"] == sum(LENGTHS) and tokens["padded"] == len(LENGTHS) * max(LENGTHS)
    loss_fn = make_loss_fn(actor.cfg)
    for minis in layouts.values():
        actor.update(minis, loss_fn)
    steps = {name: partial(actor.update, minis * MICRO_BATCHES, loss_fn) for name, minis in layouts.items()}
    seconds = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, run in steps.items():
            seconds[name].append(timed(run))
    fewer = tokens["packed"] / tokens["padded"]
    note = ", ".join(f"{name} {MICRO_BATCHES} x {tokens[name]} tokens {median(seconds[name]):.1f} s" for name in steps)
    what = "ragged step, float32: time packed / padded, over that of tokens"
    return Goal(what, ratio(seconds["packed"], seconds["padded"]) / fewer, 1.05, at_most=True, note=note)


def utilisation(actor: Actor, dtype: str) -> Goal:
    [one] = batches(actor)
    minis = [replace(one, loss_weights_R=one.loss_weights_R / MICRO_BATCHES)] * MICRO_BATCHES
    work = {"step": partial(actor.update, minis, make_loss_fn(actor.cfg)), "product": product(dtype)}
    seconds = alternate(work, rounds=ROUNDS, repeat=1, settle=False)
    rates = {"step": flops(actor, minis), "product": 2.0 * SIDE**3}
    share = ratio(seconds["product"], seconds["step"]) * rates["step"] / rates["product"]
    note = ", ".join(f"{name} {rates[name] / min(seconds[name]) / 1e9:.0f} GFLOP/s" for name in work)
    what = f"ragged step, {dtype}: FLOP utilisation, of a {SIDE} x {SIDE} product's"
    return Goal(what, share, GOALS[dtype], unit="", note=note)


def measure() -> list[Goal]:
    goals = []
    for dtype in GOALS:
        with opened(configuration(dtype=dtype, lr=1e-6)) as actor:
            if dtype == "float32":
                goals.append(against_padded(actor))
            goals.append(utilisation(actor, dtype))
    return goals


if __name__ == "__main__":
    sys.exit(show(measure(), title="actor"))
