"""The actor: scores and trains micro-batches in any parallel layout, loads and streams out Hugging Face weights.

The step's loss is a plain sum over micro-batches and data-parallel ranks (``MicroBatch.loss_weights_R`` hold the global
denominator), so how the batch is cut does not change the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mdapo.algorithms.losses import MAXIMUM
from mdapo.config.model_facts import require_facts
from mdapo.config.schema import Config
from mdapo.device import megatron_context
from mdapo.errors import UserError
from mdapo.megatron import hf_mapping
from mdapo.megatron.layout import Layout, from_last_stage, reduce_metrics
from mdapo.megatron.model import build_chunks, packed_input, padded_input, transformer_config
from mdapo.megatron.offload import Offload
from mdapo.megatron.optimizer import build_optimizer, build_scheduler, clipped_norm
from mdapo.types import MicroBatch

# (logps_R, entropies_R, micro_batch) -> (loss, {name: sum}): scalars, to be added over micro-batches and DP ranks
LossFn = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class UpdateStats:
    """One optimizer step, the same on every rank. ``skipped``: loss or gradient was not finite, nothing changed."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    metrics: dict[str, float]


class Actor:
    """One rank's share of the model being trained.

    ``chunks`` (DDP-wrapped), ``optimizer`` and ``scheduler`` are all its state.
    """

    def __init__(self, cfg: Config, layout: Layout, *, model_path: str | None = None, trainable: bool = True) -> None:
        """Build the model in the shape of ``model_path`` (default ``cfg.model.path``); weights come with ``load_hf``.

        ``trainable=False`` makes a reference model: no gradients, no optimizer.
        """
        self.cfg, self.layout = cfg, layout
        path = model_path or cfg.model.path
        self.hf = require_facts(path, key=self._key(path))
        with megatron_context():
            self.config = transformer_config(cfg, self.hf, layout)
            chunks: list[Any] = list(build_chunks(cfg, self.hf, self.config, layout))
            self.chunks, self.optimizer, self.scheduler, self.offload = chunks, None, None, None
            if not trainable:
                for chunk in chunks:
                    chunk.requires_grad_(False)
                return
            ddp = _ddp_config(cfg)
            wrap = _SingleReplica if layout.dp == 1 else DistributedDataParallel
            self.chunks = [
                wrap(self.config, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)
            ]
            for chunk in chunks:
                chunk.output_grad_direct = not ddp.overlap_grad_reduce
            self.optimizer = build_optimizer(cfg, self.chunks)
            self.scheduler = build_scheduler(cfg, self.optimizer)
        home = layout.device.torch_device
        self.offload = Offload(self.chunks, self.optimizer, home=home, what=cfg.actor.offload)
        # Core hands over a token count to divide by; the loss weights have divided already.
        self.config.finalize_model_grads_func = lambda chunks, num_tokens=None, **kw: finalize_model_grads(chunks, **kw)
        if ddp.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def _key(self, path: str) -> str:
        """The key that names a model folder."""
        return "model.path" if path == self.cfg.model.path else "model.ref_path"

    def load_hf(self, path: str) -> None:
        """Fill the weights from a Hugging Face folder, and the optimizer's fp32 masters with them.

        Raises:
            UserError: missing files or tensors, wrong shapes.
        """
        folder = hf_mapping.HfFolder(path, self.hf, key=self._key(path))
        hf_mapping.load(self.chunks, folder, tp=self.layout.tp, tp_rank=self.layout.tp_rank)
        if self.optimizer is not None:
            with megatron_context():
                self.optimizer.reload_model_params()

    def leave_device(self) -> None:
        """The engine works next: what ``actor.offload`` names goes; the weights stay."""
        if self.offload is not None:
            self.offload.leave()

    def take_device(self) -> None:
        """Before ``update``, and before the optimizer is saved."""
        if self.offload is not None:
            self.offload.back()

    def update(self, micro_batches: Sequence[MicroBatch], loss_fn: LossFn) -> UpdateStats:
        """One optimizer step over the micro-batches of this data-parallel rank; all ranks call it together.

        Every rank has the same number of micro-batches, a multiple of ``layout.micro_multiple`` (fillers have zero
        weights).
        """
        assert self.optimizer is not None and self.scheduler is not None, "a reference model is not trained"
        assert self.offload is not None and not self.offload.is_away, "take_device comes first"
        with megatron_context():
            sums = self.accumulate_gradients(micro_batches, loss_fn)
            loss = sums.pop("loss")
            self.optimizer.prepare_grads()
            grad_norm = clipped_norm(self.optimizer, self.cfg.actor.clip_grad)
            skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
            if not skipped:
                self.scheduler.step(1)
                self.optimizer.step_with_ready_grads()
            self.optimizer.zero_grad()
        lr = float(self.optimizer.param_groups[0]["lr"])
        return UpdateStats(loss, grad_norm, lr, skipped, sums)

    def accumulate_gradients(self, micro_batches: Sequence[MicroBatch], loss_fn: LossFn) -> dict[str, float]:
        """Forward and backward: gradients, summed over all ranks, are left in ``main_grad``; returns the metrics."""
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        assert self.optimizer is not None, "a reference model is not trained"
        self.optimizer.zero_grad()
        with megatron_context():
            stored = self._run(micro_batches, partial(_loss, loss_fn), forward_only=False)
        sums: dict[str, float] | None = None
        if self.layout.is_last_stage:
            names = sorted(stored[0])
            kept_MK = torch.stack([torch.stack([m[name] for name in names]) for m in stored])
            totals = {
                n: float(v.max() if n.endswith(MAXIMUM) else v.sum()) for n, v in zip(names, kept_MK.T, strict=True)
            }
            sums = reduce_metrics(totals)
        return from_last_stage(sums) if self.layout.pp > 1 else sums or {}

    @torch.no_grad()
    def score(self, micro_batches: Sequence[MicroBatch]) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probs and entropies, float32 [R] for each micro-batch, on every rank of the replica; no gradient."""
        for chunk in self.chunks:
            chunk.eval()
        with megatron_context():
            stored = self._run(micro_batches, _keep, forward_only=True)
        sizes = [len(mb.targets_R) for mb in micro_batches]
        where = self.layout.device.torch_device
        both_2R = torch.empty(2, sum(sizes), device=where)
        if self.layout.is_last_stage:
            both_2R = torch.cat(stored, dim=1)
        if self.layout.pp > 1:
            source = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(both_2R, source, group=parallel_state.get_pipeline_model_parallel_group())
        return list(both_2R[0].split(sizes)), list(both_2R[1].split(sizes))

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probs of the targets at the sampling temperature, float32 [R] for each micro-batch; no gradient."""
        return self.score(micro_batches)[0]

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) on rank 0, one parameter at a time.

        A tensor may be a part of the model itself: it is not to be written to, and is what it is until the next update.
        Collective: all ranks iterate to the end; those other than rank 0 yield nothing.
        """
        for slot, gathered in self.gathered(lambda parameter: parameter.detach()):
            yield from zip(slot.hf_names, gathered, strict=True)

    def gathered(self, of: Callable[[Any], Tensor]) -> Iterator[tuple[hf_mapping.Slot, tuple[Tensor, ...]]]:
        """``of(parameter)`` (the parameter, or its gradient) of the whole model in Hugging Face's layout, on rank 0."""
        layout, group = self.layout, parallel_state.get_tensor_model_parallel_group()
        if layout.dp_rank != 0:
            return
        owners = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        parameters, shapes = hf_mapping.local_parameters(self.chunks), self.hf.weight_shapes()
        for slot in hf_mapping.slots(self.hf):
            stage, _ = hf_mapping.stage_of(slot, self.hf, pp=layout.pp, vpp=layout.vpp)
            shards: list[Tensor] = []
            if layout.pp_rank == stage:
                mine = of(parameters[slot.name, slot.layer]).contiguous()
                shards = [mine]
                if layout.tp > 1:
                    shards = [torch.empty_like(mine) for _ in range(layout.tp)]
                    dist.all_gather(shards, mine, group=group)
                if layout.tp_rank == 0 and stage != 0:
                    for full in hf_mapping.from_shards(slot, shards, self.hf):
                        dist.send(full.contiguous(), 0)
            if layout.rank != 0:
                continue
            if stage == 0:
                yield slot, hf_mapping.from_shards(slot, shards, self.hf)
            else:
                dtype = of(next(iter(parameters.values()))).dtype
                where = layout.device.torch_device
                full_tensors = tuple(torch.empty(shapes[n], dtype=dtype, device=where) for n in slot.hf_names)
                for full in full_tensors:
                    dist.recv(full, owners[stage])
                yield slot, full_tensors

    def _run(self, micro_batches: Sequence[MicroBatch], finish: Callable[..., Any], *, forward_only: bool) -> list[Any]:
        """Push the micro-batches through megatron's schedule; returns what ``finish`` kept (last stage only)."""
        assert micro_batches, "at least one micro-batch"
        assert len(micro_batches) % self.layout.micro_multiple == 0, "plan multiples of layout.micro_multiple"
        batches = [self._on_device(mb) for mb in micro_batches]
        iterators = [iter(batches) for _ in self.chunks]
        single = len(self.chunks) == 1
        return get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, finish=finish),
            data_iterator=iterators[0] if single else iterators,
            model=self.chunks[0] if single else self.chunks,
            num_microbatches=len(batches),
            seq_length=batches[0].num_tokens,  # a hint: variable lengths are exchanged between stages
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _forward_step(self, iterator: Iterator[Any], chunk: Any, *, finish: Callable[..., Any]) -> tuple[Any, Any]:
        mb = next(iterator)
        dtype = self.config.params_dtype
        if self.cfg.actor.use_remove_padding:
            inputs = packed_input(mb, self.hf, dtype)
        else:
            inputs = padded_input(mb, self.hf, dtype, self.layout.token_multiple)
        return chunk(inputs), partial(finish, mb=mb)

    def _on_device(self, mb: MicroBatch) -> MicroBatch:
        assert mb.num_tokens % self.layout.token_multiple == 0, "pad the pack to a multiple of layout.token_multiple"
        where = self.layout.device.torch_device
        moved: dict[str, Any] = {
            k: v.to(where, non_blocking=True) for k, v in vars(mb).items() if isinstance(v, Tensor)
        }
        return replace(mb, **moved)


class _SingleReplica(DistributedDataParallel):
    """With one data-parallel rank there is nothing to exchange; core would copy all gradients and weights for it."""

    def finish_grad_sync(self, *args: Any, **kwargs: Any) -> None: ...

    def start_param_sync(self, *args: Any, **kwargs: Any) -> None: ...


def _ddp_config(cfg: Config) -> DistributedDataParallelConfig:
    options = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": cfg.parallel.distributed_optimizer,
        **cfg.megatron.ddp,
    }
    if options.get("overlap_param_gather"):
        raise UserError("megatron.ddp.overlap_param_gather: not supported, weights are read between steps")
    try:
        return DistributedDataParallelConfig(**options)
    except (TypeError, ValueError) as error:
        raise UserError(f"megatron.ddp: refused by megatron-core: {error}") from error


def _loss(loss_fn: LossFn, output: tuple[Tensor, Tensor], *, mb: MicroBatch) -> tuple[Any, ...]:
    """Core's contract: (loss, token count, what to keep). The count is not used (see ``finalize_model_grads_func``)."""
    logps_R, entropies_R = output
    nothing = torch.zeros((), dtype=torch.int32, device=logps_R.device)
    loss, metrics = loss_fn(logps_R, entropies_R, mb)
    assert "loss" not in metrics, "the loss is added by the actor"
    return loss, nothing, {name: value.detach().float() for name, value in {**metrics, "loss": loss}.items()}


def _keep(output: tuple[Tensor, Tensor], *, mb: MicroBatch) -> tuple[Any, ...]:
    both_2R = torch.stack(output)
    return both_2R.sum(), torch.zeros((), dtype=torch.int32, device=both_2R.device), both_2R
