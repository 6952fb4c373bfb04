"""Tiny Hugging Face models with random weights, replay batches for them, and a loss that uses every field."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from mdapo.config.schema import Config
from mdapo.data.shares import pack_shares, rows_of
from mdapo.data.unfold import unfold
from mdapo.types import NO_SAMPLES, MicroBatch, Sample, Samples

VOCAB = 131  # not a multiple of 2 or 4: the vocabulary must be padded under tensor parallelism


def save_model(folder: Path, kind: str, *, tied: bool = True, layers: int = 4, **changes: object) -> Path:
    """A model of ``kind`` llama, qwen2 or qwen3 (explicit head size), seeded, saved as safetensors."""
    import transformers

    shape = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers,
             "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied,
             "max_position_embeddings": 512, "rms_norm_eps": 1e-5} | changes  # fmt: skip
    configs = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}
    if kind == "qwen3":
        shape["head_dim"] = 24  # not hidden / heads
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(configs[kind](**shape)).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:  # norms and biases away from 1 and 0, so that a mix-up shows
                weight.add_(0.1 * torch.randn_like(weight))
            elif "embed" in name or "lm_head" in name:
                weight.mul_(8.0)
            else:
                weight.mul_(4.0)
    model.save_pretrained(folder)
    return folder


def config(folder: Path, **sections: dict[str, object]) -> Config:
    """A closed configuration for the model in ``folder``, fp32 unless told otherwise."""
    base: dict[str, dict[str, object]] = {
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"train_files": ["none.jsonl"]},
        "actor": {"lr": 1e-2, "clip_grad": 0.5},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Config.model_validate(base)


def sequences(
    count: int, *, seed: int = 0, longest: int = 40, vocab: int = VOCAB
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, response mask) of ``count`` ragged conversations of two turns; most begin like the one before them."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        length = int(rng.integers(8, longest))
        mask = np.zeros(length, bool)
        cut = int(rng.integers(2, length - 4))
        mask[cut:] = True
        mask[cut + 1 + (length - cut) // 2 :][:2] = False  # what the environment said
        ids = rng.integers(0, vocab, length)
        if out and rng.random() < 0.75:
            same = min(length, len(out[-1][0])) * 2 // 3
            ids[:same], mask[:same] = out[-1][0][:same], out[-1][1][:same]
        out.append((ids, mask))
    return out


def pack(seqs: list[tuple[np.ndarray, np.ndarray]], *, multiple: int = 1, total: int = 1, seed: int = 1) -> MicroBatch:
    """End to end, weights 1 / ``total``, a dummy segment up to ``multiple``. Values depend on a sequence's ids only."""
    ids, index, targets, segments, advantages, weights = [], [], [], [], [], []
    start = 0
    for number, (tokens, mask) in enumerate(seqs):
        at = np.flatnonzero(mask[1:])
        own = np.random.default_rng([seed, *tokens.tolist()])
        ids.append(tokens)
        index.append(at + start)
        targets.append(tokens[at + 1])
        segments.append(np.full(len(at), number))
        advantages.append(own.normal(size=len(at)))
        weights.append(np.full(len(at), 1.0 / total))
        start += len(tokens)
    if missing := -start % multiple:
        ids.append(np.zeros(missing, np.int64))
    cu = tuple(accumulate((len(x) for x in ids), initial=0))
    positions = np.concatenate([np.arange(len(x)) for x in ids])
    floats = [torch.from_numpy(np.concatenate(x).astype(np.float32)) for x in (advantages, weights)]
    longs = [torch.from_numpy(np.concatenate(x).astype(np.int64)) for x in (ids, index, targets, segments)]
    return MicroBatch(longs[0], torch.from_numpy(positions), cu, longs[1], longs[2], longs[3], floats[0], floats[1],
                      torch.zeros_like(floats[0]))  # fmt: skip


def samples(seqs: list[tuple[np.ndarray, np.ndarray]], *, total: int = 1, seed: int = 1) -> Samples:
    """The same sequences with the same values as the trainer has them; scored is what `pack` scores."""
    found = []
    for number, (tokens, mask) in enumerate(seqs):
        mb = pack([(tokens, mask)], total=total, seed=seed)
        scored, nothing = np.zeros(len(tokens), bool), np.zeros(len(tokens), np.float32)
        scored[1:] = mask[1:]
        advantages, weights = nothing.copy(), nothing.copy()
        advantages[scored], weights[scored] = mb.advantages_R, mb.loss_weights_R
        versions = np.zeros(len(tokens), np.int32)
        ids = tokens.astype(np.int32)
        found.append(Sample(str(number), number, ids, scored, nothing, versions, advantages, weights))
    return Samples.of(found)


def filler() -> MicroBatch:
    """What the trainer fills up with."""
    [share] = pack_shares(rows_of(NO_SAMPLES), [[[[]]]])
    return unfold(share)[0][0]


def loss_fn(
    logps_R: torch.Tensor, entropies_R: torch.Tensor, mb: MicroBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A clipped policy loss with an entropy bonus: smooth enough to compare, uses every gradient path."""
    ratio = (logps_R - logps_R.detach()).exp()
    per_token = -mb.advantages_R * ratio - 0.05 * entropies_R - 0.3 * logps_R
    return (mb.loss_weights_R * per_token).sum(), {
        "tokens": (mb.loss_weights_R > 0).sum().float(),
        "entropy": (mb.loss_weights_R * entropies_R).sum(),
    }
