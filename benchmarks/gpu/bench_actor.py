"""One optimizer step of the Megatron actor on the device at hand: time, tokens a second, model FLOP utilisation.

    python benchmarks/gpu/bench_actor.py OUT.csv [--shape tiny]

Random weights in the shape of a 1.5B model (Qwen2.5's), bfloat16 with float32 masters, four packed micro-batches of up
to 8192 tokens in ragged conversations, the policy loss that a run uses. FLOPs are the model's own
(`mdapo.config.flops.model_flops`). Peaks: the datasheet's for dense bfloat16 where the device is known, and a product
of two large matrices here.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import Table
from timing import seconds

from mdapo import device
from mdapo.algorithms.losses import make_loss_fn
from mdapo.config.flops import model_flops
from mdapo.config.model_facts import ModelFacts
from mdapo.config.presets import resolve_algorithm
from mdapo.config.schema import Config
from mdapo.megatron.actor import Actor
from mdapo.megatron.layout import destroy, init_distributed
from mdapo.types import MicroBatch

QWEN = {"architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "1.5b": {
        **QWEN,
        "num_hidden_layers": 28,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    },
    "tiny": {
        **QWEN,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 512,
    },
}
TOKENS, MICRO_BATCHES, PROMPT_SHARE = {"1.5b": 8192, "tiny": 96}, 4, 1 / 3
# TFLOP/s in dense bfloat16, from the vendor's datasheets.
PEAKS = {"H200": 989.4, "H100 PCIe": 756.0, "H100": 989.4, "A100": 312.0, "B200": 2250.0}


def configuration(folder: Path) -> Config:
    sections = {"model": {"path": str(folder), "dtype": "bfloat16"}, "data": {"train_files": ["none"]}}
    config = Config.model_validate({**sections, "actor": {"lr": 1e-6}})
    return config.model_copy(update={"algorithm": resolve_algorithm(config.algorithm)})


def ragged_lengths(total: int, rng: np.random.Generator) -> list[int]:
    """Conversations of many lengths around an eighth of ``total``, the last one cut to fit."""
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        wanted = int(rng.lognormal(np.log(total / 8), 0.7))
        lengths.append(left if left < total // 32 else min(max(wanted, total // 64), left))
    return lengths


def micro_batch(total: int, facts: ModelFacts, rng: np.random.Generator) -> MicroBatch:
    lengths = ragged_lengths(total, rng)
    starts = list(accumulate(lengths, initial=0))
    ids = torch.from_numpy(rng.integers(0, facts.vocab, total))
    scored = [np.arange(a + int(n * PROMPT_SHARE), a + n - 1) for a, n in zip(starts, lengths, strict=False)]
    index_R = torch.from_numpy(np.concatenate(scored))
    segment_R = torch.from_numpy(np.repeat(np.arange(len(scored)), [len(part) for part in scored]))
    count = len(index_R)
    positions = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))
    advantages = torch.from_numpy(rng.normal(size=count).astype(np.float32))
    weights = torch.full((count,), 1 / (MICRO_BATCHES * count))
    return MicroBatch(ids, positions, tuple(starts), index_R, ids[index_R + 1], segment_R, advantages, weights,
                      torch.full((count,), -1.0))  # fmt: skip


def flops_of(facts: ModelFacts, batches: list[MicroBatch]) -> float:
    """Forward and backward."""
    model = model_flops(facts)
    return sum(
        model.of(mb.num_tokens, len(mb.targets_R), sum(size * size for size in np.diff(mb.cu_seqlens).tolist()))
        for mb in batches
    )


def start_weights(actor: Actor) -> None:
    """As a model begins: nothing is loaded, and memory may hold NaN."""
    generator = torch.Generator(device.current().torch_device).manual_seed(0)
    with torch.no_grad():
        for chunk in actor.chunks:
            for weight in chunk.parameters():
                if weight.dim() == 1:
                    weight.fill_(1.0)
                else:
                    weight.normal_(0.0, 0.02, generator=generator)
    assert actor.optimizer is not None
    actor.optimizer.reload_model_params()


def product_tflops(size: int) -> float:
    where = device.current().torch_device
    a, b = (torch.randn(size, size, device=where, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds({"product": lambda: a @ b}, rounds=3)["product"] / 1e12


def measure(table: Table, shape: str, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    cfg = configuration(folder)
    actor = Actor(cfg, init_distributed(cfg, 120.0))
    start_weights(actor)
    rng = np.random.default_rng(0)
    batches = [micro_batch(TOKENS[shape], actor.hf, rng) for _ in range(MICRO_BATCHES)]
    loss_fn, stats = make_loss_fn(cfg), []
    taken = seconds({"step": lambda: stats.append(actor.update(batches, loss_fn))}, rounds=3, calls=1)["step"]
    assert not any(one.skipped for one in stats), "loss and gradient are finite"
    tokens = sum(mb.num_tokens for mb in batches)
    flops, side = flops_of(actor.hf, batches), TOKENS[shape]
    product = product_tflops(side)
    what = f"{shape} shape, {tokens} tokens in {MICRO_BATCHES} micro-batches, bfloat16"
    table.add("actor", "optimizer step", taken, "s", what)
    table.add("actor", "tokens a second", tokens / taken, "tokens/s", what)
    table.add("actor", "model TFLOP/s", flops / taken / 1e12, "TFLOP/s", what)
    table.add("actor", f"product of two {side} x {side} matrices", product, "TFLOP/s")
    table.add("actor", "MFU against that product", flops / taken / 1e12 / product, "", what)
    peak = next((peak for name, peak in PEAKS.items() if name in table.machine[0]), 0.0)
    if peak:
        table.add("actor", "MFU", flops / taken / 1e12 / peak, "", f"of {peak:g} TFLOP/s, the datasheet's")
    table.add("actor", "peak memory", device.current().memory_bytes()["peak"] / 2**30, "GiB", what)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), default="1.5b")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        measure(Table(options.out), options.shape, Path(folder))
    destroy()


if __name__ == "__main__":
    main(sys.argv[1:])
