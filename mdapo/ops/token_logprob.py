"""Log-prob and entropy of scored tokens straight from hidden states, over one shard of the vocabulary or all of it.

With logits z = h W^T, temperature t, x = z / t, p = softmax(x), lse = log sum_j exp(x_j), y the target:
    logp = x_y - lse                   d logp / d x_j = [j = y] - p_j
    entropy = lse - sum_j p_j x_j      d entropy / d x_j = -p_j (log p_j + entropy)

Logits [R, V] never exist as a whole. A tile of them, some rows by some ids, is a matrix product by the device's own
library; ``mdapo::token_logprob_stats`` reads it once. In backward it is made again, ``mdapo::token_logprob_grad`` turns
it in place into the loss's gradient by it, and two products take that in. Sums over tiles and shards are merged as in
online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867, algorithm 3); recomputing logits in backward is from Cut
Cross-Entropy (Wijmans et al. 2024, arXiv 2411.09009). csrc/token_logprob/README.md derives the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mdapo.ops import registry

# Rows of ``stats_4R``: the largest x so far, sum exp(x - largest), sum exp(x - largest) (x - largest), the target's x.
LARGEST, SUM, MOMENT, TARGET = range(4)
# Where log p is so low that p counts as 0: finite, so that p log p is 0 for a logit of -inf too.
LOWEST = {torch.float32: -86.0, torch.float64: -700.0}
# Of a tile: on CPU one that stays in the cache, elsewhere one that keeps a large device busy.
TILE_BYTES, TILE_ROWS = {"cpu": 8 << 20}, {"cpu": 2048}
DEVICE_TILE_BYTES, DEVICE_TILE_ROWS = 64 << 20, 8192
ALIGNED_BYTES = 64  # where each row of a tile begins
LEAST_TEMPERATURE = 1e-6  # logits divided by less overflow
# From the stats of one shard to those of the whole vocabulary; see ``rebased``.
Reduce = Callable[[Tensor], Tensor]


def logprob_and_entropy(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    targets_R: Tensor,
    *,
    temperature: float = 1.0,
    vocab_start: int = 0,
    reduce: Reduce | None = None,
    main_grad_VH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies, [R] each, in nats, at ``temperature``; float32 (float64 for float64).

    Args:
        hidden_RH: [R, H] in the model's dtype: float32, bfloat16 or float64.
        weight_VH: [V, H], same dtype: the shard's rows of the output matrix, without padding rows.
        targets_R: int64 [R], ids in the whole vocabulary. One that no shard holds counts as a logit of 0.
        vocab_start: id of the shard's first row.
        reduce: merges the stats of this shard with the others'; None where there are none.
        main_grad_VH: float32 buffer that the gradient of ``weight_VH`` is added to; None: autograd gets it.

    Raises ``ValueError`` for a temperature below 1e-6 or above 1e6, and for no vocabulary at all.

    The gradient of ``hidden_RH`` is this shard's share, to be summed over shards. A row whose two gradients are exactly
    zero adds nothing to any gradient, even where its hidden state is not finite.
    """
    if not LEAST_TEMPERATURE <= temperature <= 1 / LEAST_TEMPERATURE:
        raise ValueError(f"temperature: from {LEAST_TEMPERATURE:g} to {1 / LEAST_TEMPERATURE:g}, not {temperature}")
    if len(weight_VH) == 0 and reduce is None:
        raise ValueError("weight: an empty vocabulary, and no other shard")
    return _LogProb.apply(hidden_RH, weight_VH, targets_R, temperature, vocab_start, reduce, main_grad_VH)


def rebased(stats_4R: Tensor, largest_R: Tensor) -> Tensor:
    """The same stats relative to ``largest_R`` >= their own: rows SUM to TARGET of several shards may then be added."""
    own_R, sum_R, moment_R, target_R = stats_4R
    shift_R = torch.where(own_R == largest_R, 0.0, (own_R - largest_R).clamp(min=LOWEST[stats_4R.dtype]))
    factor_R = _exp(shift_R)
    return torch.stack([largest_R, sum_R * factor_R, (moment_R + sum_R * shift_R) * factor_R, target_R])


class _LogProb(torch.autograd.Function):
    """Keeps hidden states, weight and a few numbers a row; with several shards ``reduce`` is its only communication."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        targets_R: Tensor,
        temperature: float,
        vocab_start: int,
        reduce: Reduce | None,
        main_grad_VH: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        where = {"temperature": temperature, "vocab_start": vocab_start}
        stats_4R = forward_partials(hidden_RH, weight_VH, targets_R, **where)
        largest_R, sum_R, moment_R, target_R = stats_4R if reduce is None else reduce(stats_4R)
        log_sum_R = sum_R.log()
        entropy_R = log_sum_R - moment_R / sum_R
        ctx.save_for_backward(hidden_RH, weight_VH, targets_R, torch.stack([largest_R, log_sum_R, entropy_R]))
        ctx.where, ctx.main_grad_VH = where, main_grad_VH
        ctx.set_materialize_grads(False)
        return target_R - largest_R - log_sum_R, entropy_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore
        hidden_RH, weight_VH, targets_R, known_3R = ctx.saved_tensors
        if grads[0] is None and grads[1] is None:
            return (None,) * 7
        grads_R = [torch.zeros_like(known_3R[0]) if grad is None else grad for grad in grads]
        terms_5R = torch.cat([known_3R, torch.stack(grads_R)])
        into_VH = ctx.main_grad_VH
        found = backward_partials(hidden_RH, weight_VH, targets_R, terms_5R, into_VH=into_VH, **ctx.where)
        return *found, None, None, None, None, None


@torch.no_grad()
def forward_partials(
    hidden_RH: Tensor, weight_VH: Tensor, targets_R: Tensor, *, vocab_start: int = 0, temperature: float = 1.0
) -> Tensor:
    """``stats_4R`` of one shard, rows LARGEST, SUM, MOMENT and TARGET (0 where the target lies in another shard)."""
    targets_R = targets_R.contiguous()
    stats_4R = torch.zeros(4, len(targets_R), dtype=_exact(hidden_RH.dtype), device=hidden_RH.device)
    stats_4R[LARGEST] = -torch.inf
    tiles = _Tiles(hidden_RH, weight_VH)
    for ids in tiles.ids:
        for rows in tiles.rows:
            logits = tiles.logits(rows, ids)
            first_id = vocab_start + ids.start
            torch.ops.mdapo.token_logprob_stats(stats_4R[:, rows], logits, targets_R[rows], first_id, temperature)
    return stats_4R


@torch.no_grad()
def backward_partials(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    targets_R: Tensor,
    terms_5R: Tensor,
    *,
    into_VH: Tensor | None = None,
    vocab_start: int = 0,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of one shard: its share of that of hidden [R, H], and that of the weight [V, H], in their dtypes.

    Rows of ``terms_5R``, float32 (float64 for float64), over the whole vocabulary: largest x, log of the sum relative
    to it, entropy, gradient of log-prob, gradient of entropy. With ``into_VH`` the weight's gradient is added there, in
    its dtype, and None returned for it.
    """
    exact, targets_R = terms_5R.dtype, targets_R.contiguous()
    grad_hidden_RH = torch.zeros_like(hidden_RH, dtype=exact)
    grad_weight_VH = torch.zeros_like(weight_VH) if into_VH is None else None
    # The logits of a row without a gradient get a gradient of 0; but 0 times a hidden state of NaN would be NaN.
    used_RH = hidden_RH.masked_fill(((terms_5R[3] == 0) & (terms_5R[4] == 0))[:, None], 0.0)
    tiles = _Tiles(hidden_RH, weight_VH)
    for ids in tiles.ids:
        into = torch.zeros_like(weight_VH[ids], dtype=exact) if into_VH is None else into_VH[ids]
        for rows in tiles.rows:
            grad = tiles.logits(rows, ids)
            first_id = vocab_start + ids.start
            torch.ops.mdapo.token_logprob_grad(grad, targets_R[rows], terms_5R[:, rows], first_id, temperature)
            _add_product(grad_hidden_RH[rows], grad, weight_VH[ids])
            _add_product(into, grad.t(), used_RH[rows])
        if grad_weight_VH is not None:
            grad_weight_VH[ids] = into
    return grad_hidden_RH.to(hidden_RH.dtype), grad_weight_VH


class _Tiles:
    """How [R, V] is cut, and the one buffer for the tile at hand."""

    def __init__(self, hidden_RH: Tensor, weight_VH: Tensor) -> None:
        kind, size = hidden_RH.device.type, hidden_RH.element_size()
        most_rows = TILE_ROWS.get(kind, DEVICE_TILE_ROWS)
        self.hidden_RH, self.weight_VH = hidden_RH, weight_VH
        self.align = ALIGNED_BYTES // size
        self.rows = _spans(len(hidden_RH), most_rows, self.align)
        longest = max((rows.stop - rows.start for rows in self.rows), default=1)
        most_ids = max(1, TILE_BYTES.get(kind, DEVICE_TILE_BYTES) // (size * longest))
        self.ids = _spans(len(weight_VH), most_ids, self.align)
        widest = max((self._pitch(ids) for ids in self.ids), default=0)  # no ids: an empty shard
        self.buffer = hidden_RH.new_empty(longest * widest)

    def logits(self, rows: slice, ids: slice) -> Tensor:
        """[rows, ids] in the model's dtype, as the engine's are, its rows aligned; valid until the next call."""
        shape = rows.stop - rows.start, self._pitch(ids)
        logits = self.buffer[: shape[0] * shape[1]].view(shape)[:, : ids.stop - ids.start]
        return torch.mm(self.hidden_RH[rows], self.weight_VH[ids].t(), out=logits)

    def _pitch(self, ids: slice) -> int:
        return _round_up(ids.stop - ids.start, self.align)


def _spans(total: int, most: int, multiple: int) -> list[slice]:
    """``total`` in nearly equal spans of at most ``most``, multiples of ``multiple`` where ``most`` allows it."""
    if total == 0:
        return []
    multiple = multiple if most >= multiple else 1
    count = -(-total // (most - most % multiple))
    width = _round_up(-(-total // count), multiple)
    return [slice(start, min(start + width, total)) for start in range(0, total, width)]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into += a @ b. Where ``into`` is more exact than the factors so is the sum, and on CUDA the product too."""
    if into.dtype == a.dtype:
        into.addmm_(a, b)
    else:
        into.add_(torch.mm(a, b, out_dtype=into.dtype) if a.is_cuda else a @ b)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _exp(d: Tensor) -> Tensor:
    return torch.where(d <= LOWEST[d.dtype], 0.0, d.exp())


def stats_reference(stats_4R: Tensor, logits_RC: Tensor, targets_R: Tensor, first_id: int, temperature: float) -> None:
    """Merges the logits of ids ``first_id`` on into ``stats_4R``, in place."""
    if logits_RC.shape[1] == 0:
        return
    x = logits_RC.to(stats_4R.dtype) / temperature
    largest_R = torch.maximum(stats_4R[LARGEST], x.amax(dim=1))
    base_R = torch.where(largest_R == -torch.inf, 0.0, largest_R)
    d = (x - base_R[:, None]).clamp_(min=LOWEST[x.dtype])
    exp = _exp(d)
    result_4R = rebased(stats_4R, largest_R)
    result_4R[SUM] += exp.sum(dim=1)
    result_4R[MOMENT] += torch.linalg.vecdot(exp, d)
    here_R, column_R = _columns(targets_R, first_id, x.shape[1])
    result_4R[TARGET] = torch.where(here_R, x.gather(1, column_R[:, None])[:, 0], result_4R[TARGET])
    stats_4R.copy_(result_4R)


def grad_reference(logits_RC: Tensor, targets_R: Tensor, terms_5R: Tensor, first_id: int, temperature: float) -> None:
    """Turns the logits of ids ``first_id`` on into the loss's gradient by them, in place; an idle row becomes 0."""
    largest_R, log_sum_R, entropy_R, grad_logp_R, grad_entropy_R = (row[:, None] for row in terms_5R)
    x = logits_RC.to(terms_5R.dtype) / temperature
    log_p = x.sub_(largest_R).sub_(log_sum_R).clamp_(min=LOWEST[x.dtype])
    by_x = _exp(log_p).mul_((log_p + entropy_R).mul_(grad_entropy_R).add_(grad_logp_R)).neg_()
    here_R, column_R = _columns(targets_R, first_id, logits_RC.shape[1])
    if logits_RC.shape[1]:
        by_x.scatter_add_(1, column_R[:, None], torch.where(here_R[:, None], grad_logp_R, 0.0))
    idle_R1 = (grad_logp_R == 0) & (grad_entropy_R == 0)
    logits_RC.copy_(by_x.div_(temperature).masked_fill_(idle_R1, 0.0))


def _columns(targets_R: Tensor, first_id: int, cols: int) -> tuple[Tensor, Tensor]:
    """Whether each target is one of ``cols`` ids from ``first_id`` on, and its column, 0 where it is not."""
    here_R = (targets_R >= first_id) & (targets_R < first_id + cols)
    return here_R, torch.where(here_R, targets_R - first_id, 0)


registry.define(
    "token_logprob_stats(Tensor(a!) stats_4R, Tensor logits_RC, Tensor targets_R, int first_id, float temperature)"
    " -> ()",
    reference=stats_reference,
    fake=lambda stats_4R, logits_RC, targets_R, first_id, temperature: None,
)
registry.define(
    "token_logprob_grad(Tensor(a!) logits_RC, Tensor targets_R, Tensor terms_5R, int first_id, float temperature)"
    " -> ()",
    reference=grad_reference,
    fake=lambda logits_RC, targets_R, terms_5R, first_id, temperature: None,
)
