"""Who this rank is, and how plain bytes and numbers move between ranks (no pickle)."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from mdapo import device
from mdapo.algorithms.losses import MAXIMUM
from mdapo.config.schema import Config
from mdapo.errors import UserError

PATIENCE_S = 86400.0  # a generation round has deadlines of its own (rollout.episode_timeout_s), but may take hours


@dataclass(frozen=True)
class Layout:
    """One rank's place. ``is_last_stage`` ranks hold the output layer: losses and log-probs arise there."""

    rank: int
    world: int
    tp: int
    pp: int
    vpp: int
    dp: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    sequence: bool
    device: device.Device

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def token_multiple(self) -> int:
        """Tokens of a packed micro-batch must divide by this (a dummy segment fills up)."""
        return self.tp if self.sequence else 1

    @property
    def micro_multiple(self) -> int:
        """Virtual pipelines take a mini-batch's micro-batches in multiples of the stages."""
        return self.pp if self.vpp > 1 else 1


def init_distributed(cfg: Config, timeout_s: float) -> Layout:
    """Join the process group torchrun's environment describes (none: a single process), build megatron's groups, seed.

    A process group that already exists is used as it is.

    ``timeout_s`` is the deadline of start-up and of every collective.

    Raises:
        UserError: the number of ranks does not fit the layout.
    """
    here = device.current()
    here.activate()
    if cfg.run.threads and here.kind == "cpu":
        torch.set_num_threads(cfg.run.threads)
    timeout = timedelta(seconds=timeout_s)
    if dist.is_initialized():
        pass
    elif "RANK" in os.environ:
        dist.init_process_group(here.backend, timeout=timeout)
    else:
        dist.init_process_group(here.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    want, world = cfg.parallel, dist.get_world_size()
    ranks = want.tensor * want.pipeline
    if world % ranks or (want.data is not None and want.data * ranks != world):
        dist.destroy_process_group()
        data = f" x data {want.data}" if want.data is not None else ""
        raise UserError(
            f"parallel: tensor {want.tensor} x pipeline {want.pipeline}{data} does not fit {world} ranks; "
            f"start {ranks * (want.data or 1)} ranks or change parallel"
        )
    vpp = want.virtual_pipeline
    with device.megatron_context():
        parallel_state.initialize_model_parallel(
            want.tensor,
            want.pipeline,
            vpp if vpp > 1 else None,
            distributed_timeout_minutes=max(1, timeout_s / 60),
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(cfg.run.seed)
    random.seed(cfg.run.seed)
    np.random.seed(cfg.run.seed)
    return Layout(
        rank=dist.get_rank(),
        world=world,
        tp=want.tensor,
        pp=want.pipeline,
        vpp=vpp,
        dp=world // ranks,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        sequence=want.sequence and want.tensor > 1,
        device=here,
    )


def patient_group() -> dist.ProcessGroup:
    """All ranks, over gloo, for waiting on rank 0 while it collects or writes; collective. A lost rank is still noticed
    at once, for its connection closes."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))
    assert isinstance(group, dist.ProcessGroup)  # every rank is in it
    return group


def wait_for_all(group: dist.ProcessGroup) -> None:
    """Until every rank of ``group`` has come here."""
    dist.barrier(group)


def reset() -> None:
    """Drop megatron's groups but keep the process group: another layout of the same ranks can follow."""
    parallel_state.destroy_model_parallel()


def destroy() -> None:
    """Leave the process group."""
    reset()
    if dist.is_initialized():
        dist.destroy_process_group()


def _send(data: bytes, to: int) -> None:
    dist.send(torch.tensor([len(data)], dtype=torch.int64), to)
    if data:
        dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to)


def _receive(source: int) -> bytes:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source)
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if len(buffer):
        dist.recv(buffer, source)
    return buffer.numpy().tobytes()


def broadcast_bytes(data: bytes | None, *, source: int = 0, group: dist.ProcessGroup | None = None) -> bytes:
    """Every rank of ``group`` (default: all) gets the bytes of global rank ``source``; the others pass None."""
    size = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64)
    dist.broadcast(size, source, group=group)
    if dist.get_rank() == source:
        assert data is not None, "the source has the bytes"
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    else:
        buffer = torch.empty(int(size), dtype=torch.uint8)
    if len(buffer):
        dist.broadcast(buffer, source, group=group)
    return buffer.numpy().tobytes()


def scatter_shares(shares: Sequence[bytes] | None) -> bytes:
    """Rank 0 has one byte string for each data-parallel rank; every rank returns that of its own replica.

    Rank 0 sends each replica's share to the replica's leading rank only, which passes it to its TP and PP peers.
    """
    rank = dist.get_rank()
    group = parallel_state.get_model_parallel_group()
    leader = dist.get_process_group_ranks(group)[0]
    data_ranks = dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
    share: bytes | None = None
    if rank == 0:
        assert shares is not None and len(shares) == len(data_ranks), "one share for each data-parallel rank"
        for to, data in zip(data_ranks[1:], shares[1:], strict=True):
            _send(data, to)
        share = shares[0]
    elif rank == leader:
        share = _receive(0)
    return share if group.size() == 1 and share is not None else broadcast_bytes(share, source=leader, group=group)


def reduce_metrics(values: dict[str, float]) -> dict[str, float]:
    """Sums over the data-parallel ranks, maxima of the names that end in ``_max``; float64.

    TP and PP peers hold the same values and count once. Every rank passes the same names.
    """
    group = parallel_state.get_data_parallel_group()
    reduced: dict[str, float] = {}
    for maxima, operation in ((False, dist.ReduceOp.SUM), (True, dist.ReduceOp.MAX)):
        names = sorted(name for name in values if name.endswith(MAXIMUM) is maxima)
        numbers = torch.tensor([values[name] for name in names], dtype=torch.float64)
        dist.all_reduce(numbers, op=operation, group=group)
        reduced |= dict(zip(names, numbers.tolist(), strict=True))
    return reduced


def from_last_stage(values: dict[str, float] | None) -> dict[str, float]:
    """The numbers of the pipeline's last stage, by name, on all its stages."""
    group = parallel_state.get_pipeline_model_parallel_group()
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    data = json.dumps(values).encode() if dist.get_rank() == source else None
    return json.loads(broadcast_bytes(data, source=source, group=group))
