"""Weights and optimizer of an actor, in and out of megatron's distributed checkpoint format, under any layout.

Megatron-core 0.16.1 with torch's AdamW (no apex, no TE) cannot resume its DistributedOptimizer as shipped: its
``state_dict()`` asserts on a fresh optimizer, its reshardable load wants a ``step`` it never saved, and then all
parameters share one ``step`` tensor, which runs ahead by the number of parameters each step. The three mends are below,
each named.
"""

from __future__ import annotations

import queue
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from mdapo.device import megatron_context

if TYPE_CHECKING:
    from mdapo.megatron.actor import Actor

# Optimizer state in model space: it can be loaded under another TP, PP and DP.
OPTIMIZER_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
# How torch.save says that a file could not be written.
WRITE_FAILED = ("inline_container", "PytorchStreamWriter")


def save(actor: Actor, folder: Path) -> None:
    """Collective: every rank writes its shards into ``folder`` (on a file system that all ranks share).

    Raises ``OSError`` where that fails: on the rank that could not write, or on rank 0 for it.
    """
    folder.mkdir(exist_ok=True)
    actor.take_device()
    torch.distributed.barrier()
    for part in _chained(actor):
        if not part.optimizer.state:  # nothing was trained yet
            _give_zero_state(part.optimizer)
    try:
        with megatron_context(), _written_in_this_process():
            dist_checkpointing.save(_sharded_state(actor, is_loading=False), str(folder), ("torch_dist", 1))
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {cause}") from error
    except RuntimeError as error:
        if any(text in str(error) for text in WRITE_FAILED):
            raise OSError(str(error)) from error
        raise


def load(actor: Actor, folder: Path) -> None:
    """Collective: fill model, optimizer and schedule from ``folder``; of an actor that is not trained, the model only.

    Verify the folder's digests before (``trainer/commit.py``).
    """
    actor.take_device()
    for optimizer in _distributed_optimizers(actor):
        _give_zero_state(optimizer.optimizer)
    with megatron_context(), _step_not_expected():
        state = dist_checkpointing.load(_sharded_state(actor, is_loading=True), str(folder))
        for index, chunk in enumerate(actor.chunks):
            _model(chunk).load_state_dict(state[f"model{index}"])
        if actor.optimizer is None:
            return
        actor.optimizer.load_state_dict(state["optimizer"])
    for optimizer in _distributed_optimizers(actor):
        for entry in optimizer.optimizer.state.values():
            entry["step"] = entry["step"].to(entry["exp_avg"].device, copy=True)  # loaded as one for all parameters
    assert actor.scheduler is not None
    actor.scheduler.load_state_dict(state["scheduler"])


def optimizer_steps(actor: Actor) -> set[float]:
    """The step counts that the optimizer's parameters hold (all the same when it is sound).

    Only a test asks: here it shares `_chained` with the code that mends what core loses of them.
    """
    inner = [getattr(o, "optimizer", o) for o in _chained(actor)]
    return {float(entry["step"]) for optimizer in inner for entry in optimizer.state.values()}


def _sharded_state(actor: Actor, *, is_loading: bool) -> dict[str, Any]:
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {
        f"model{index}": _model(chunk).sharded_state_dict(metadata=metadata) for index, chunk in enumerate(actor.chunks)
    }
    if actor.optimizer is None:
        return state
    models = {k: v for index in range(len(actor.chunks)) for k, v in _prefixed(state[f"model{index}"], index)}
    state["optimizer"] = actor.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=OPTIMIZER_METADATA)
    assert actor.scheduler is not None, "a reference model has no state to save"
    state["scheduler"] = actor.scheduler.state_dict()
    return state


def _model(chunk: Any) -> Any:
    """Without the wrapper that only a trained model has."""
    return getattr(chunk, "module", chunk)


@contextmanager
def _written_in_this_process() -> Generator[None]:
    """Core writes even a synchronous checkpoint in forked processes, and keeps one more running for their answers: it
    outlives a rank that is killed, holding its pipes, and a writer that is killed is waited for without end."""
    write, answers = FileSystemWriterAsync.write_preloaded_data_multiproc, filesystem_async._get_write_results_queue
    FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write)
    filesystem_async._get_write_results_queue = queue.SimpleQueue
    try:
        yield
    finally:
        FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(write)
        filesystem_async._get_write_results_queue = answers


def _write(transforms: list[Any], _: object, rank: int, buckets: list[Any], answers: queue.SimpleQueue[Any]) -> None:
    """Every bucket of this rank, one after the other; core wants a mapping of results, or one exception."""
    results: dict[int, Any] = {}
    for index, bucket in enumerate(buckets):
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        pending: queue.Queue[int] = queue.Queue()
        pending.put(index)
        FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, answer, pending, use_fsync=True)
        results[index] = answer.get()[1]
    failed = [result for result in results.values() if isinstance(result, Exception)]
    answers.put(failed[0] if failed else results)


def _prefixed(model: dict[str, Any], index: int) -> Iterator[tuple[str, Any]]:
    """The optimizer looks its parameters up by identity, so names only have to differ between chunks."""
    return ((f"model{index}.{name}", tensor) for name, tensor in model.items())


def _chained(actor: Actor) -> list[Any]:
    return [] if actor.optimizer is None else list(getattr(actor.optimizer, "chained_optimizers", [actor.optimizer]))


def _distributed_optimizers(actor: Actor) -> list[DistributedOptimizer]:
    return [o for o in _chained(actor) if isinstance(o, DistributedOptimizer)]


def _give_zero_state(adam: torch.optim.Optimizer) -> None:
    """A fresh AdamW has no state; megatron's ``state_dict`` asserts that it has."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            adam.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),  # on the device, as the fused update wants it
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


@contextmanager
def _step_not_expected() -> Generator[None]:
    """Let the reshardable load leave each parameter's ``step`` alone (it is restored from the parameter groups)."""
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_own_step(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        own = self._get_main_param_and_optimizer_states(model_param)
        original(self, model_param, {**tensors, "step": own["step"]} if "step" in own else tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = with_own_step
    try:
        yield
    finally:
        DistributedOptimizer._set_main_param_and_optimizer_states = original
