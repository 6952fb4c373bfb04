"""One rank: a training step from the same replay batch in each of several layouts of the same number of ranks.

``parity_rank.py SPECS.json FOLDER``, started by torchrun or alone; rank 0 writes FOLDER/<name>.pt with gradients in
Hugging Face's layout. A spec: ``name``; ``model`` a folder; ``parallel``, ``actor``, ``dtype`` of the configuration;
``cut`` the largest number of tokens of a micro-batch; ``sequences``, ``seed``, ``longest`` of the replay batch;
``share_prefix``.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from tiny_models import config, filler, loss_fn, pack, samples, sequences  # noqa: E402

from mdapo.data.shares import pack_shares, rows_of  # noqa: E402
from mdapo.data.unfold import unfold  # noqa: E402
from mdapo.megatron import layout as layouts  # noqa: E402
from mdapo.megatron.actor import Actor  # noqa: E402
from mdapo.types import MicroBatch  # noqa: E402

TIMEOUT_S = 120.0


def cut_batch(seqs: list[Any], limit: int, *, multiple: int, total: int, share: bool) -> list[MicroBatch]:
    """First fit in order: micro-batches of at most ``limit`` tokens (but at least one sequence).

    Shared prefixes are those of the trainer's own path.
    """
    bins: list[list[int]] = [[]]
    for i, (ids, _) in enumerate(seqs):
        if bins[-1] and sum(len(seqs[j][0]) for j in bins[-1]) + len(ids) > limit:
            bins.append([])
        bins[-1].append(i)
    if share:
        [packed] = pack_shares(rows_of(samples(seqs, total=total)), [[bins]])
        return unfold(packed, token_multiple=multiple, share_prefix=True)[0]
    return [pack([seqs[i] for i in part], multiple=multiple, total=total) for part in bins]


def micro_batches(spec: dict[str, Any], layout: layouts.Layout, vocab: int) -> list[MicroBatch]:
    """This replica's share (every dp-th sequence), filled up to the same count on all replicas."""
    seqs = sequences(spec["sequences"], seed=spec["seed"], longest=spec.get("longest", 40), vocab=vocab)
    share = spec.get("share_prefix", False)
    total = sum(int(mask[1:].sum()) for _, mask in seqs)
    shares = [
        cut_batch(seqs[rank :: layout.dp], spec["cut"], multiple=layout.token_multiple, total=total, share=share)
        for rank in range(layout.dp)
    ]
    own, most = shares[layout.dp_rank], max(map(len, shares))
    return own + [filler(own[0])] * (most - len(own))


def join_gradient_shards(actor: Actor, layout: layouts.Layout) -> None:
    """A sharded optimizer leaves each reduced gradient in one rank's shard of its bucket only: exchange them."""
    for chunk in actor.chunks:
        for group in chunk.bucket_groups:
            for bucket in group.buckets:
                shards = list(bucket.grad_data.chunk(layout.dp))
                own = shards[layout.dp_rank].clone()
                dist.all_gather(shards, own, group=group.intra_distributed_optimizer_instance_group)


def run(spec: dict[str, Any], folder: Path) -> None:
    cfg = config(
        Path(spec["model"]),
        model={"path": spec["model"], "dtype": spec.get("dtype", "float32")},
        parallel=spec.get("parallel", {}),
        actor=spec.get("actor", {}),
        megatron=spec.get("megatron", {}),
        rollout={"temperature": 0.8},
        run={"threads": 1},
    )
    layout = layouts.init_distributed(cfg, TIMEOUT_S)
    actor = Actor(cfg, layout, trainable=not spec.get("score_only"))
    actor.load_hf(cfg.model.path)
    batches = micro_batches(spec, layout, actor.hf.vocab)
    logps, entropies = actor.score(batches)
    result: dict[str, Any] = {"logps": torch.cat(logps), "entropies": torch.cat(entropies)}
    if not spec.get("score_only"):
        result |= train(actor, batches)
    if layout.rank == 0:
        torch.save(result, folder / f"{spec['name']}.pt")
    layouts.reset()


def train(actor: Actor, batches: list[MicroBatch]) -> dict[str, Any]:
    """Gradients before, weights after one optimizer step."""
    result: dict[str, Any] = {"sums": actor.accumulate_gradients(batches, loss_fn)}
    if actor.cfg.parallel.distributed_optimizer:
        join_gradient_shards(actor, actor.layout)
    grads = actor.gathered(lambda parameter: parameter.main_grad)
    result["grads"] = {n: t.float().clone() for slot, full in grads for n, t in zip(slot.hf_names, full, strict=True)}
    stats = actor.update(batches, loss_fn)
    result |= {"loss": stats.loss, "grad_norm": stats.grad_norm, "metrics": stats.metrics, "skipped": stats.skipped}
    result |= {"micro_batches": len(batches), "tokens": [mb.num_tokens for mb in batches]}
    result["weights"] = {name: tensor.float().clone() for name, tensor in actor.export()}
    return result


if __name__ == "__main__":
    for one in json.loads(Path(sys.argv[1]).read_text()):
        run(one, Path(sys.argv[2]))
    layouts.destroy()
