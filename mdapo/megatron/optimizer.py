"""Megatron's AdamW (plain, fp32 masters, or sharded over data-parallel ranks) and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from mdapo.config.schema import Config
from mdapo.errors import UserError


def build_optimizer(cfg: Config, chunks: Sequence[Any]) -> Any:
    """AdamW over the DDP-wrapped chunks; no weight decay on norms and biases (core's default).

    Raises:
        UserError: ``megatron.optimizer`` holds what this megatron refuses.
    """
    actor, dtype = cfg.actor, torch.bfloat16 if cfg.model.dtype == "bfloat16" else torch.float32
    options: dict[str, Any] = {
        "optimizer": "adam",
        "lr": actor.lr,
        "min_lr": actor.min_lr,
        "weight_decay": actor.weight_decay,
        "adam_beta1": actor.betas[0],
        "adam_beta2": actor.betas[1],
        "adam_eps": actor.eps,
        "clip_grad": actor.clip_grad,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": cfg.parallel.distributed_optimizer,
        **cfg.megatron.optimizer,
    }
    try:
        config = OptimizerConfig(**options)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"megatron.optimizer: refused by megatron-core: {error}") from error
    optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        if isinstance(inner, (torch.optim.AdamW, torch.optim.Adam)):
            for group in inner.param_groups:
                group["fused"] = True  # one pass over memory instead of ten
    return optimizer


def _square(grad: Tensor) -> Tensor:
    """Sum of squares in float64, from rows in float32: torch's float32 norm of 28 million entries is 0.2 % off."""
    flat = grad.flatten()
    whole = len(flat) // 4096 * 4096
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, 4096), dim=1)
    return rows.double().square().sum() + flat[whole:].double().square().sum()


def clipped_norm(optimizer: Any, limit: float) -> float:
    """Global gradient norm before clipping; gradients are then clipped to ``limit`` (0: not clipped)."""
    total = 0.0
    for part in optimizer.chained_optimizers:
        squares = [_square(grad) for grad in part.get_main_grads_for_grad_norm()]
        square = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device="cuda")
        dist.all_reduce(square, group=part.get_grad_stats_parallel_group())
        total += float(square)
    norm = math.sqrt(total) if math.isfinite(total) else total
    if limit > 0.0:
        for part in optimizer.chained_optimizers:
            clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm=limit, total_norm=norm)
    return norm


def total_updates(cfg: Config) -> int:
    """Optimizer steps of the whole run."""
    groups = cfg.data.train_prompt_bsz
    per_epoch = -(-groups // (cfg.actor.ppo_mini_batch_size or groups))
    return cfg.run.total_steps * cfg.actor.ppo_epochs * per_epoch


def build_scheduler(cfg: Config, optimizer: Any) -> OptimizerParamScheduler:
    """Linear warm-up, then constant, linear or cosine decay to ``min_lr`` at the last update.

    Stepped *before* each update, so that the first one has lr / (warm-up steps), not 0.
    """
    actor = cfg.actor
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=actor.lr,
        min_lr=min(actor.min_lr, actor.lr),
        lr_warmup_steps=actor.lr_warmup_steps,
        lr_decay_steps=max(total_updates(cfg), actor.lr_warmup_steps + 1),
        lr_decay_style=actor.lr_decay,
        start_wd=actor.weight_decay,
        end_wd=actor.weight_decay,
        wd_incr_steps=total_updates(cfg),
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # of a checkpoint only the count of steps: a changed lr takes effect
    )
