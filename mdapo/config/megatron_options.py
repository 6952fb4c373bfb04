"""``megatron.*`` options against the installed megatron-core, whose source is read, never imported (it needs torch).

Three kinds of mistake are found: a name the installed version does not have, a value of the wrong type, and an option
that mdapo sets itself. The last holds the traps of core 0.16: combinations that it accepts and computes wrongly.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mdapo.config.problems import Problem
from mdapo.config.schema import Config
from mdapo.config.source import close
from mdapo.config.words import describe

# section of megatron.*: (class, file below megatron/core)
CLASSES = {
    "transformer": ("TransformerConfig", "transformer/transformer_config.py"),
    "optimizer": ("OptimizerConfig", "optimizer/optimizer_config.py"),
    "ddp": ("DistributedDataParallelConfig", "distributed/distributed_data_parallel_config.py"),
}
_BASES = {"ModelParallelConfig": "model_parallel_config.py"}

_SHAPE = "comes from the model folder (model.path)"
_DTYPE = "use model.dtype"
_LAYERS = "is not supported: stages hold equal numbers of layers"
_RECOMPUTE = "use actor.recompute"
_P2P = "is set by mdapo: with virtual pipelines, core's default gives wrong gradients without any error"
_DROPOUT = "is 0: with dropout, log-probs of the same weights would differ from pass to pass"
_MOE = "is not supported: models are dense"
_CONTEXT = "is not supported: core has context parallelism for Transformer Engine's attention only"
_FIXED = "is set by mdapo"
_FSDP = "is not supported: use parallel.distributed_optimizer"
_GATHER = "is not supported: weights are read between steps"
# What mdapo sets itself, and what to do instead. A prefix ends in "*".
OWNED: dict[str, dict[str, str]] = {
    "transformer": {
        **dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "num_query_groups"), _SHAPE),
        "kv_channels": _SHAPE,
        **dict.fromkeys(("ffn_hidden_size", "layernorm_epsilon", "normalization", "gated_linear_unit"), _SHAPE),
        **dict.fromkeys(("activation_func", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "window_size"), _SHAPE),
        **dict.fromkeys(("softmax_scale", "softmax_type", "rotary_interleaved", "multi_latent_attention"), _SHAPE),
        "tensor_model_parallel_size": "use parallel.tensor",
        "pipeline_model_parallel_size": "use parallel.pipeline",
        "virtual_pipeline_model_parallel_size": "use parallel.virtual_pipeline",
        "sequence_parallel": "use parallel.sequence",
        **dict.fromkeys(("context_parallel_size", "cp_comm_type", "hierarchical_context_parallel_sizes"), _CONTEXT),
        "hybrid_context_parallel": _CONTEXT,
        **dict.fromkeys(("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"), _LAYERS),
        **dict.fromkeys(("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split"), _LAYERS),
        "account_for_loss_in_pipeline_split": _LAYERS,
        **dict.fromkeys(("bf16", "fp16", "fp8", "fp4", "params_dtype", "pipeline_dtype"), _DTYPE),
        **dict.fromkeys(("enable_autocast", "autocast_dtype"), _DTYPE),
        **dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers"), _RECOMPUTE),
        **dict.fromkeys(("overlap_p2p_comm", "batch_p2p_comm"), _P2P),
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), _DROPOUT),
        **dict.fromkeys(("num_moe_experts", "moe_*", "expert_*"), _MOE),
        "perform_initialization": (
            "stays true: without it the gradient norm counts the replicas of tensor-parallel ranks again"
        ),
        "calculate_per_token_loss": "stays true: mdapo's loss weights hold the global denominator",
        "variable_seq_lengths": "stays true: micro-batches are packed",
        "transformer_impl": "is set by mdapo: attention and norm are its own",
        "attention_backend": "is set by mdapo: attention is its own",
        **dict.fromkeys(("init_method", "output_layer_init_method", "use_te_activation_func"), _FIXED),
    },
    "optimizer": {
        "lr": "use actor.lr",
        "min_lr": "use actor.min_lr",
        "weight_decay": "use actor.weight_decay",
        "adam_beta1": "use actor.betas",
        "adam_beta2": "use actor.betas",
        "adam_eps": "use actor.eps",
        "clip_grad": "use actor.clip_grad",
        "use_distributed_optimizer": "use parallel.distributed_optimizer",
        **dict.fromkeys(("bf16", "fp16", "params_dtype"), _DTYPE),
        **dict.fromkeys(("overlap_param_gather", "overlap_param_gather_with_optimizer_step"), _GATHER),
    },
    "ddp": {
        "use_distributed_optimizer": "use parallel.distributed_optimizer",
        "overlap_param_gather": _GATHER,
        "average_in_collective": "is set by mdapo: gradients are summed, the loss weights hold the global denominator",
        **dict.fromkeys(("use_megatron_fsdp", "use_custom_fsdp"), _FSDP),
    },
}  # fmt: skip


@dataclass(frozen=True)
class Accepts:
    """Values a field takes: names of YAML kinds, and single values of a ``Literal``. Neither: YAML cannot write it."""

    kinds: frozenset[str] = frozenset()
    values: tuple[Any, ...] = ()

    def __or__(self, other: Accepts) -> Accepts:
        return Accepts(self.kinds | other.kinds, self.values + other.values)

    def fits(self, value: Any) -> bool:
        kind = {"NoneType": "None", "tuple": "list"}.get(type(value).__name__, type(value).__name__)
        return (
            kind in self.kinds or (kind == "int" and "float" in self.kinds) or (kind == "str" and value in self.values)
        )

    def words(self) -> str:
        names = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "list": "a list"}
        parts = [names[k] for k in names if k in self.kinds and not (k == "int" and "float" in self.kinds)]
        if self.values:
            parts.append("one of " + ", ".join(str(v) for v in self.values))
        return " or ".join([*parts, *(["null"] if "None" in self.kinds else [])])


def check_options(config: Config) -> list[Problem]:
    """Problems of ``megatron.transformer``, ``megatron.optimizer`` and ``megatron.ddp``."""
    given = {section: getattr(config.megatron, section) for section in CLASSES}
    if not any(given.values()):
        return []
    core = core_folder()
    if core is None:
        return [Problem("megatron", "megatron-core is not installed, so its options cannot be checked")]
    return [p for section, options in given.items() for p in _check_section(section, options, fields(section, core))]


def core_folder() -> Path | None:
    """Where megatron-core lies, without importing it: ``megatron`` is a namespace, so finding its spec runs no code."""
    spec = importlib.util.find_spec("megatron")
    places = [Path(p) / "core" for p in (spec.submodule_search_locations or [])] if spec is not None else []
    return next((p for p in places if (p / "package_info.py").is_file()), None)


@cache
def fields(section: str, core: Path) -> Mapping[str, Accepts]:
    """The options of one section in the installed version, base classes included."""
    name, file = CLASSES[section]
    return dict(_fields_of(name, core / file, core))


def _fields_of(name: str, file: Path, core: Path) -> Iterator[tuple[str, Accepts]]:
    module = ast.parse(file.read_text(encoding="utf-8"))
    found = next(n for n in module.body if isinstance(n, ast.ClassDef) and n.name == name)
    for base in found.bases:
        if isinstance(base, ast.Name) and base.id in _BASES:
            yield from _fields_of(base.id, core / _BASES[base.id], core)
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            yield node.target.id, _accepts(node.annotation)


def _accepts(node: ast.expr) -> Accepts:
    """What an annotation lets through, as far as YAML can write it."""
    if isinstance(node, ast.Constant) and node.value is None:
        return Accepts(frozenset({"None"}))
    if isinstance(node, ast.BinOp):
        return _accepts(node.left) | _accepts(node.right)
    if isinstance(node, ast.Name):
        kind = {"List": "list", "Tuple": "list", "tuple": "list", "Dict": "dict"}.get(node.id, node.id)
        return Accepts(frozenset({kind} & {"bool", "int", "float", "str", "list", "dict"}))
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
        return Accepts()
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if node.value.id == "Literal":
        return Accepts(values=tuple(n.value for n in inner if isinstance(n, ast.Constant)))
    if node.value.id in ("Optional", "Union"):
        kinds = Accepts(frozenset({"None"} if node.value.id == "Optional" else ()))
        for part in inner:
            kinds |= _accepts(part)
        return kinds if kinds.kinds - {"None"} or kinds.values else Accepts()
    return _accepts(node.value)


def _check_section(section: str, options: Mapping[str, Any], known: Mapping[str, Accepts]) -> Iterator[Problem]:
    name, _ = CLASSES[section]
    for option, value in options.items():
        key = f"megatron.{section}.{option}"
        reason = _owned(section, option)
        if option not in known:
            near = close(option, known)
            meant = f", did you mean megatron.{section}.{near}?" if near else ""
            yield Problem(key, f"the installed megatron-core has no such option in its {name}{meant}")
        elif reason is not None:
            yield Problem(key, reason)
        elif not known[option].kinds and not known[option].values:
            yield Problem(key, "cannot be given in YAML: it takes a Python object")
        elif not known[option].fits(value):
            yield Problem(key, f"must be {known[option].words()}, not {describe(value)}")


def _owned(section: str, option: str) -> str | None:
    table = OWNED[section]
    prefixes = (reason for name, reason in table.items() if name.endswith("*") and option.startswith(name[:-1]))
    return table.get(option) or next(prefixes, None)
