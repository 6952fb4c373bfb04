"""Prefixes computed once against the same samples laid out each for itself: forward, backward and memory.

    python benchmarks/ops/bench_share_prefix.py

The quickstart's model in float32, two threads, on a group of 8 samples: a prompt of 256 tokens, then 128 of the policy
(2.4 times fewer tokens when the prompt is there once; as many log-probs). All is the trainer's: plan, share, unfold,
actor. Memory is the most that the process holds during forward and backward beyond weights and gradients.

That sharing is exact is shown on small models (`scripts/parity.sh`). This one multiplies rounding errors: its gradient
moves by up to a thousandth of its largest entry when the embedding is off by half a unit in the last place. So the
difference here is given in units of that, the largest of three draws.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from _actor import configuration, group, laid_out, opened
from _goals import Goal, alternate, forget_peak, milliseconds, most_held, ratio, show
from torch import Tensor

from mdapo.algorithms.losses import make_loss_fn
from mdapo.config.schema import Config
from mdapo.megatron.actor import Actor
from mdapo.types import Samples

GROUP, PROMPT, RESPONSE, ROUNDS = 8, 256, 128, 3


def drawn(vocab: int) -> Samples:
    """Random ids: responses differ from their first token on, or nearly."""
    rng = np.random.default_rng(0)
    return group(rng.integers(0, vocab, PROMPT), [rng.integers(0, vocab, RESPONSE) for _ in range(GROUP)], rng)


def gradients(actor: Actor) -> list[Tensor]:
    return [grad.clone() for _, grads in actor.gathered(lambda parameter: parameter.main_grad) for grad in grads]


def apart(ones: list[Tensor], others: list[Tensor]) -> float:
    """The largest difference of two gradients, over the largest entry of the second."""
    differences = [float((one - other).abs().max()) for one, other in zip(ones, others, strict=True)]
    return max(differences) / max(float(other.abs().max()) for other in others)


def unsettled(actor: Actor, run: Callable[[], object], *, seed: int) -> list[Tensor]:
    """The gradients when each entry of the embedding is off by about half a unit in its last place."""
    [embedding] = [p for chunk in actor.chunks for name, p in chunk.named_parameters() if "word_embeddings" in name]
    exact = embedding.detach().clone()
    signs = torch.randn(exact.shape, generator=torch.Generator().manual_seed(seed)).sign()
    with torch.no_grad():
        embedding.mul_(1 + torch.finfo(torch.float32).eps / 2 * signs)
    run()
    with torch.no_grad():
        embedding.copy_(exact)
    return gradients(actor)


def peak(function: Callable[[], object]) -> int:
    """Bytes that the process holds at most while ``function`` runs, beyond what it holds before."""
    before = forget_peak()
    function()
    return most_held() - before


def measure() -> list[Goal]:
    cap = GROUP * (PROMPT + RESPONSE)  # one micro-batch either way
    sharing = {"shared": True, "unshared": False}
    configs = {name: configuration(ppo_max_token_len=cap, share_prefix=shares) for name, shares in sharing.items()}
    with opened(configs["shared"]) as actor:
        return compare(actor, configs)


def compare(actor: Actor, configs: dict[str, Config]) -> list[Goal]:
    samples, loss_fn = drawn(actor.hf.vocab), make_loss_fn(configs["shared"])
    batches = {name: laid_out(samples, config) for name, config in configs.items()}
    runs = {name: partial(actor.accumulate_gradients, minis, loss_fn) for name, minis in batches.items()}
    actor.accumulate_gradients(laid_out(samples[:1], configs["unshared"]), loss_fn)  # what stays allocated
    memory, found = {}, {}
    for name, run in runs.items():  # the shared one first: what it leaves to the allocator can only help the other
        memory[name] = peak(run)
        found[name] = gradients(actor)
    moved = max(apart(unsettled(actor, runs["unshared"], seed=seed), found["unshared"]) for seed in range(3))
    difference = apart(found["shared"], found["unshared"])
    seconds = alternate(runs, rounds=ROUNDS, repeat=1, settle=False)
    tokens = {name: sum(batch.num_tokens for batch in minis) for name, minis in batches.items()}
    took = ", ".join(f"{name} {tokens[name]} tokens {milliseconds(seconds[name])}" for name in runs)
    note = ", ".join(f"{name} {memory[name] / 1e6:.0f} MB" for name in runs)
    what = f"shared prefix {GROUP} x ({PROMPT} + {RESPONSE})"
    return [
        Goal(f"{what}: forward and backward", ratio(seconds["unshared"], seconds["shared"]), 2.0, note=took),
        Goal(f"{what}: memory", memory["shared"] / memory["unshared"], 1.0, at_most=True, note=note),
        Goal(
            f"{what}: gradients apart, of what half a last place moves them",
            difference / moved,
            2.0,
            at_most=True,
            unit="",
            note=f"{difference:.1e} and {moved:.1e} of the largest",
        ),
    ]


if __name__ == "__main__":
    sys.exit(show(measure(), title="shared prefixes"))
