"""Builds megatron's GPTModel chunks for a Hugging Face shape; their forward scores only the tokens the loss needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mdapo.config.model_facts import ModelFacts
from mdapo.config.schema import Config
from mdapo.errors import UserError
from mdapo.megatron.attention import SegmentAttention, SegmentLayout, rotary_tables
from mdapo.megatron.layers import RMSNorm, SwiGlu
from mdapo.megatron.layout import Layout
from mdapo.megatron.vocab import logprob_and_entropy
from mdapo.types import MicroBatch

# What mdapo itself sets; a passthrough that contradicts it would train something else than was measured.
OWNED = frozenset({
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "sequence_parallel", "context_parallel_size", "expert_model_parallel_size", "params_dtype", "pipeline_dtype",
    "bf16", "fp16", "fp8", "fp4", "normalization", "gated_linear_unit", "activation_func", "use_te_activation_func",
    "add_bias_linear", "add_qkv_bias", "qk_layernorm", "calculate_per_token_loss", "variable_seq_lengths",
    "moe_token_dispatcher_type", "num_moe_experts", "multi_latent_attention", "hidden_dropout", "attention_dropout",
    "perform_initialization", "init_method", "output_layer_init_method", "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "overlap_p2p_comm", "batch_p2p_comm",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "window_size",
})  # fmt: skip


def _recompute(mode: str) -> dict[str, Any]:
    if mode == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective"} if mode == "selective" else {}


def transformer_config(cfg: Config, hf: ModelFacts, layout: Layout) -> TransformerConfig:
    """Megatron's configuration of the model and its parallelism, with the user's ``megatron.transformer`` merged in.

    Raises:
        UserError: ``megatron.transformer`` sets what mdapo decides itself, or what this megatron refuses.
    """
    extra = cfg.megatron.transformer
    if clash := sorted(OWNED & extra.keys()):
        raise UserError([f"megatron.transformer.{key}: set by mdapo itself, remove it" for key in clash])
    dtype = torch.bfloat16 if cfg.model.dtype == "bfloat16" else torch.float32
    options: dict[str, Any] = {
        "num_layers": hf.layers,
        "hidden_size": hf.hidden,
        "num_attention_heads": hf.heads,
        "num_query_groups": hf.kv_heads,
        "kv_channels": hf.head_dim,
        "ffn_hidden_size": hf.ffn,
        "layernorm_epsilon": hf.eps,
        "add_qkv_bias": hf.qkv_bias,
        "qk_layernorm": hf.qk_norm,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "sequence_parallel": layout.sequence,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "use_te_activation_func": True,  # core's word for: the activation is a module of ours
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": layout.device.kind == "cpu",
        # Weights come from the model folder. Core's own initialisation can't be switched off: with it go the
        # attributes by which the gradient norm knows the replicas of tensor-parallel ranks.
        "init_method": lambda weight: weight,
        "output_layer_init_method": lambda weight: weight,
        "calculate_per_token_loss": True,  # a plain sum over micro-batches and ranks: weights hold the denominator
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # demanded with variable lengths, also of dense models
        # core's default point-to-point settings give wrong gradients, silently, with virtual pipelines
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        **_recompute(cfg.actor.recompute),
    }
    try:
        config = TransformerConfig(**{**options, **extra})
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"megatron.transformer: refused by megatron-core: {error}") from error
    _assert_traps(config)
    return config


def _assert_traps(config: TransformerConfig) -> None:
    """Combinations that core accepts and computes wrongly, or that fail far from their cause."""
    vpp = config.virtual_pipeline_model_parallel_size or 1
    assert vpp == 1 or (config.overlap_p2p_comm and not config.batch_p2p_comm), (
        "wrong gradients with these p2p settings"
    )
    assert vpp == 1 or config.pipeline_model_parallel_size > 1, "virtual pipelines need a pipeline"
    assert config.perform_initialization, "without it the gradient norm counts tensor-parallel replicas twice"
    assert config.variable_seq_lengths and config.calculate_per_token_loss
    assert not config.sequence_parallel or config.tensor_model_parallel_size > 1
    assert config.num_layers % (config.pipeline_model_parallel_size * vpp) == 0, "uneven pipeline stages"
    assert config.num_query_groups % config.tensor_model_parallel_size == 0, "kv heads over tensor ranks"


@dataclass(frozen=True, eq=False)
class ModelInput:
    """A micro-batch as the model takes it: ids [B, S] (B = 1 when packed), and the scored places in [S * B]."""

    ids_BS: Tensor
    segments: SegmentLayout
    index_R: Tensor
    targets_R: Tensor


class ActorModel(GPTModel):
    """GPTModel whose last stage returns (log-probs, entropies), float32 [R] each; the others return hidden states."""

    def __init__(self, *args: Any, hf: ModelFacts, temperature: float, **kwargs: Any) -> None:
        super().__init__(*args, position_embedding_type="none", **kwargs)
        self.hf, self.temperature = hf, temperature
        self.output_grad_direct = False  # set where nothing waits for the output layer's gradient hook

    def forward(self, inputs: ModelInput) -> Tensor | tuple[Tensor, Tensor]:  # pyrefly: ignore
        hidden = self.embedding(input_ids=inputs.ids_BS, position_ids=None) if self.pre_process else None
        hidden = self.decoder(hidden_states=hidden, attention_mask=None, packed_seq_params=inputs.segments)
        return self.score(hidden, inputs) if self.post_process else hidden

    def score(self, hidden_SBH: Tensor, inputs: ModelInput) -> tuple[Tensor, Tensor]:
        """Only the scored positions go through the vocabulary."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH, tensor_parallel_output_grad=True, group=group)
        else:
            hidden_SBH = copy_to_tensor_model_parallel_region(hidden_SBH, group=group)
        hidden_RH = hidden_SBH.flatten(0, 1).index_select(0, inputs.index_R)
        weight = self.shared_embedding_or_output_weight() if self.hf.tied else self.output_layer.weight
        return logprob_and_entropy(
            hidden_RH,
            weight,
            inputs.targets_R,
            vocab=self.hf.vocab,
            temperature=self.temperature,
            group=group,
            main_grad=weight.main_grad if self.output_grad_direct and torch.is_grad_enabled() else None,
        )


def padded_vocab(hf: ModelFacts, tp: int) -> int:
    """The vocabulary rounded up to a multiple of the tensor-parallel size."""
    return -(-hf.vocab // tp) * tp


def _layer_spec(config: TransformerConfig) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    parts.self_attention.submodules.core_attention = SegmentAttention
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = RMSNorm
    parts.mlp.submodules.activation_func = SwiGlu
    return spec


def build_chunks(cfg: Config, hf: ModelFacts, config: TransformerConfig, layout: Layout) -> list[ActorModel]:
    """This rank's model chunks (one; ``vpp`` of them with virtual pipelines), weights not yet loaded."""
    chunks = []
    for index in range(layout.vpp):
        stage = index if layout.vpp > 1 else None
        layers = get_num_layers_to_build(config, vp_stage=stage)
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        chunk = ActorModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(
                layer_specs=[_layer_spec(config)] * layers, layer_norm=RMSNorm
            ),
            vocab_size=padded_vocab(hf, layout.tp),
            max_sequence_length=cfg.model.max_context,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=hf.tied,
            vp_stage=stage,
            hf=hf,
            temperature=cfg.rollout.temperature,
        )
        chunks.append(chunk.to(layout.device.torch_device))
    return chunks


def packed_input(mb: MicroBatch, hf: ModelFacts, dtype: torch.dtype) -> ModelInput:
    """The packed path: all segments end to end in one row of T tokens."""
    cos, sin = rotary_tables(mb.positions_T[:, None], hf.head_dim, hf.rope_theta, dtype)
    segments = SegmentLayout(mb.cu_seqlens, cos, sin, mb.parents)
    return ModelInput(mb.ids_T[None], segments, mb.loss_index_R, mb.targets_R)


def padded_input(mb: MicroBatch, hf: ModelFacts, dtype: torch.dtype, multiple: int) -> ModelInput:
    """The reference path: a row for each segment, padded behind to the longest (a multiple of ``multiple``)."""
    assert not mb.parents, "a padded row has no place for a shared prefix"
    starts = torch.tensor(mb.cu_seqlens[:-1], device=mb.ids_T.device)
    lengths = [b - a for a, b in zip(mb.cu_seqlens, mb.cu_seqlens[1:], strict=False)]
    longest = -(-max(lengths) // multiple) * multiple
    rows = torch.nn.utils.rnn.pad_sequence(list(mb.ids_T.split(lengths)), batch_first=True)
    ids_BS = F.pad(rows, (0, longest - rows.shape[1]))
    positions_S1 = torch.arange(longest, device=mb.ids_T.device)[:, None]
    cos, sin = rotary_tables(positions_S1, hf.head_dim, hf.rope_theta, dtype)
    row_R = torch.bucketize(mb.loss_index_R, starts, right=True) - 1
    index_R = (mb.loss_index_R - starts[row_R]) * len(lengths) + row_R  # position s of row b stands at s * B + b
    return ModelInput(ids_BS, SegmentLayout(None, cos, sin), index_R, mb.targets_R)
