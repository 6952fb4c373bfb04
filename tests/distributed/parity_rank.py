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
from tiny_models import config, loss_fn, samples, sequences  # noqa: E402

from mdapo.config.schema import Config  # noqa: E402
from mdapo.data.shares import pack_shares, rows_of  # noqa: E402
from mdapo.data.unfold import unfold  # noqa: E402
from mdapo.megatron import layout as layouts  # noqa: E402
from mdapo.megatron.actor import Actor  # noqa: E402
from mdapo.types import MicroBatch  # noqa: E402

TIMEOUT_S = 120.0


def cut_batch(seqs: list[Any], limit: int) -> list[list[int]]:
    """First fit in order: micro-batches of at most ``limit`` tokens (but at least one sequence)."""
    bins: list[list[int]] = [[]]
    for i, (ids, _) in enumerate(seqs):
        if bins[-1] and sum(len(seqs[j][0]) for j in bins[-1]) + len(ids) > limit:
            bins.append([])
        bins[-1].append(i)
    return bins


def micro_batches(spec: dict[str, Any], cfg: Config, layout: layouts.Layout, vocab: int) -> list[MicroBatch]:
    """This replica's share (every dp-th sequence), filled up to one count on all replicas, which the layout takes.

    Packed and unfolded by the trainer's own path, which makes the fillers.
    """
    seqs = sequences(spec["sequences"], seed=spec["seed"], longest=spec.get("longest", 40), vocab=vocab)
    total = sum(int(mask[1:].sum()) for _, mask in seqs)
    cuts = [cut_batch(seqs[rank :: layout.dp], spec["cut"]) for rank in range(layout.dp)]
    most = max(map(len, cuts))
    most += -most % layout.micro_multiple
    own = cuts[layout.dp_rank]
    bins = own + [[]] * (most - len(own))
    [share] = pack_shares(rows_of(samples(seqs[layout.dp_rank :: layout.dp], total=total)), [[bins]])
    return unfold(
        share,
        token_multiple=layout.token_multiple,
        remove_padding=cfg.actor.use_remove_padding,
        share_prefix=spec.get("share_prefix", False),
    )[0]


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
    batches = micro_batches(spec, cfg, layout, actor.hf.vocab)
    real = sum(bool(mb.loss_weights_R.any()) for mb in batches)  # the rest are fillers
    logps, entropies = (torch.cat(found[:real]) for found in actor.score(batches))
    result: dict[str, Any] = {"logps": logps, "entropies": entropies, "fillers": len(batches) - real}
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
    result["tokens"] = [mb.num_tokens for mb in batches]
    result["weights"] = {name: tensor.float().clone() for name, tensor in actor.export()}
    return result


if __name__ == "__main__":
    for one in json.loads(Path(sys.argv[1]).read_text()):
        run(one, Path(sys.argv[2]))
    layouts.destroy()
