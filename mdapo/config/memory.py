"""An estimate of what the fullest rank needs, in bytes: allocators, kernels and collectives' buffers come on top."""

from __future__ import annotations

from dataclasses import dataclass

from mdapo.config.lengths import largest_scale, token_len
from mdapo.config.model_facts import ModelFacts
from mdapo.config.schema import Config

BYTES = {"float32": 4, "bfloat16": 2}
MASTER_AND_MOMENTS = {"float32": 8, "bfloat16": 12}  # AdamW's two moments, and the fp32 master of a bf16 weight
SHARE = 0.8  # of a device that an estimate may fill: allocators, kernels and collectives' buffers need the rest
MAIN_GRAD = 4  # gradients are accumulated in fp32
# Of ops/token_logprob.py: one tile of logits at a time; and of every scored token its hidden state, that state without
# idle rows, its gradient, and the fp32 sum of that.
LOGITS_TILE = 64 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank. ``engine`` is the in-process engine's share on rank 0: weights and a full KV cache."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    vocabulary: int
    reference: int
    engine: int

    @property
    def training(self) -> int:
        return sum(vars(self).values()) - self.engine


def estimate(config: Config, model: ModelFacts, *, dp: int, longest: int, micro_batches: int) -> Memory:
    """``longest`` tokens of the longest sample; ``micro_batches`` of one rank in an optimizer step."""
    tokens = micro_batch_tokens(config, longest)
    return _with_tokens(tokens, config, model, dp=dp, micro_batches=micro_batches)


def largest_micro_batch(config: Config, model: ModelFacts, *, dp: int, micro_batches: int, device_bytes: int) -> int:
    """Tokens of the largest micro-batch whose estimate, with the in-process engine's, fills ``SHARE`` of the device of
    the fullest rank; 0 where none does. Servers on the actor's devices are not counted."""

    def needed(tokens: int) -> int:
        found = _with_tokens(tokens, config, model, dp=dp, micro_batches=micro_batches)
        return found.training + found.engine

    fixed, many = needed(0), 1 << 20
    return max(int((SHARE * device_bytes - fixed) * many / (needed(many) - fixed)), 0)


def _with_tokens(tokens: int, config: Config, model: ModelFacts, *, dp: int, micro_batches: int) -> Memory:
    parallel, size = config.parallel, BYTES[config.model.dtype]
    weights = stage_parameters(model, tp=parallel.tensor, pp=parallel.pipeline)
    shards = dp if parallel.distributed_optimizer else 1
    # Interleaving keeps more micro-batches alive than plain 1F1B by this factor (arXiv 2205.05198, section 4.2.3).
    in_flight = min(parallel.pipeline, micro_batches)
    interleaved = 1 + (parallel.pipeline - 1) / (parallel.pipeline * parallel.virtual_pipeline)
    alive = in_flight * (interleaved if parallel.virtual_pipeline > 1 else 1.0)
    layers = model.layers / parallel.pipeline
    per_layer = tokens * layer_activations(config, model) * size
    inputs = tokens * model.hidden * size // (parallel.tensor if parallel.sequence else 1)
    recomputed = config.actor.recompute == "full"
    activations = alive * layers * inputs + per_layer if recomputed else alive * layers * per_layer
    return Memory(
        parameters=weights * size,
        gradients=weights * MAIN_GRAD,
        optimizer=weights * MASTER_AND_MOMENTS[config.model.dtype] // shards,
        activations=int(activations),
        vocabulary=LOGITS_TILE + tokens * model.hidden * (3 * size + 4),
        reference=weights * size if config.algorithm.kl.enable else 0,
        engine=engine_bytes(config, model) if config.rollout.engine == "local" else 0,
    )


def micro_batch_tokens(config: Config, longest: int) -> int:
    """Tokens of the largest micro-batch."""
    if config.actor.use_dynamic_bsz:
        return max(token_len(config, largest_scale(config)), longest)
    return config.actor.ppo_micro_batch_size * longest


def stage_parameters(model: ModelFacts, *, tp: int, pp: int) -> int:
    """Parameters on a rank of the fullest stage: embedding and head are at the ends, tied ones twice when PP > 1."""
    whole_layer = model.layer_parameters - model.split_layer_parameters
    layers = model.layers // pp * (model.split_layer_parameters // tp + whole_layer)
    ends = 1 if pp > 1 or model.tied else 2
    return layers + ends * -(-model.vocab // tp) * model.hidden + model.hidden


def layer_activations(config: Config, model: ModelFacts) -> float:
    """Values a token leaves in one layer for its backward pass, on one rank (attention in the memory-saving form)."""
    tp = config.parallel.tensor
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    divided = 2 * q + 2 * kv + 3 * model.ffn  # q, k, v, attention's output; gate, up, their product
    return 4 * model.hidden / (tp if config.parallel.sequence else 1) + divided / tp  # two norms, two residuals


def engine_bytes(config: Config, model: ModelFacts) -> int:
    size = BYTES[config.rollout.dtype or config.model.dtype]
    cache_token = 2 * model.layers * model.kv_heads * model.head_dim
    return size * (model.parameters + config.rollout.max_running * config.model.max_context * cache_token)
