"""RMSNorm and SwiGLU of ours: few passes over memory, little kept for backward, and fit for sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class _RmsNorm(torch.autograd.Function):
    """y = w x / rms(x) (arXiv 1910.07467); keeps x and 1 / rms, arithmetic in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        scale = torch.linalg.vecdot(x32, x32).div_(x.shape[-1]).add_(eps).rsqrt_()[..., None]
        ctx.save_for_backward(x, weight, scale)
        return (x32 * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad32 = grads[0].float()
        unit = x.float() * scale
        grad_weight = (grad32 * unit).flatten(0, -2).sum(dim=0).to(weight.dtype)  # einsum would loop over h
        inner = grad32 * weight.float()
        along = torch.linalg.vecdot(inner, unit).div_(x.shape[-1])[..., None]
        return inner.addcmul_(unit, along, value=-1).mul_(scale).to(x.dtype), grad_weight, None


class RMSNorm(torch.nn.Module):
    """Over the last dimension. Under sequence parallelism each rank sees a part of the sequence, so that the weight's
    gradient is a partial sum; ``weight.sequence_parallel`` tells megatron to add them up."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        where = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=where))
        self.weight.sequence_parallel = config.sequence_parallel  # pyrefly: ignore

    def forward(self, x: Tensor) -> Tensor:
        return _RmsNorm.apply(x, self.weight, self.eps)


class _SwiGlu(torch.autograd.Function):
    """silu(a) b of x = [a, b] (arXiv 2002.05202); keeps x only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor]:
        gate, up = ctx.saved_tensors[0].chunk(2, dim=-1)
        out = torch.empty_like(ctx.saved_tensors[0])
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.mul(grads[0], F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return (out,)


class SwiGlu(torch.nn.Module):
    """Takes the whole output of ``linear_fc1``: core calls the activation so under ``use_te_activation_func``."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return _SwiGlu.apply(x)

    def sharded_state_dict(self, *_: object) -> dict[str, Any]:
        """Core asks every part of an MLP; this one has no weights."""
        return {}
