"""What a Hugging Face model folder says about its model, read with ``json`` alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from mdapo.config.paths import odd_files, why_no_folder
from mdapo.config.problems import Problem, require_none

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
QUICKSTART_MODEL = "SmolLM2-135M-Instruct"
_NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))


@dataclass(frozen=True)
class Experts:
    """In ``layers`` of the layers, ``count`` experts of ``ffn`` columns, ``active`` of them for a token, and shared
    ones of ``shared_ffn`` columns in all."""

    layers: int
    count: int
    active: int
    ffn: int
    shared_ffn: int


@dataclass(frozen=True)
class ModelFacts:
    """The shape of a decoder; counts, not bytes. Parameters are those of a dense one: others are not trained yet."""

    architecture: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    tied: bool
    dtype: str
    qkv_bias: bool
    qk_norm: bool
    rope_theta: float = 10000.0
    eps: float = 1e-6  # of the RMS norms
    experts: Experts | None = None

    @property
    def layer_parameters(self) -> int:
        """Of one layer: attention, SwiGLU, two norms."""
        return self.split_layer_parameters + 2 * self.hidden + 2 * self.head_dim * self.qk_norm

    @property
    def split_layer_parameters(self) -> int:
        """Of one layer, those that tensor parallelism divides."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        return (
            self.hidden * qkv
            + qkv * self.qkv_bias
            + self.heads * self.head_dim * self.hidden
            + 3 * self.hidden * self.ffn
        )

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + self.hidden

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the model: Hugging Face name -> shape, in Hugging Face's usual order."""
        q, kv, hidden, ffn = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden, self.ffn
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (ffn, hidden),
            "mlp.up_proj.weight": (ffn, hidden),
            "mlp.down_proj.weight": (hidden, ffn),
        }
        if self.qkv_bias:
            layer |= {f"self_attn.{p}_proj.bias": (q if p == "q" else kv,) for p in "qkv"}
        if self.qk_norm:
            layer |= {f"self_attn.{p}_norm.weight": (self.head_dim,) for p in "qk"}
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, hidden)}
        shapes |= {f"model.layers.{i}.{name}": shape for i in range(self.layers) for name, shape in layer.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, hidden)
        return shapes


def read_model(folder: str | Path, *, key: str = "model.path") -> tuple[ModelFacts | None, list[Problem]]:
    """The facts of a model folder (None when ``config.json`` cannot be used), and everything that is wrong with it."""
    facts, problems = _read(folder, key)
    if why_no_folder(folder):
        return facts, problems
    return facts, [*problems, *_weights(Path(folder), key)]


def require_facts(folder: str | Path, *, key: str = "model.path") -> ModelFacts:
    """The facts of a folder whose ``config.json`` is that of a model we run. Raises ``UserError`` with every reason."""
    facts, problems = _read(folder, key)
    require_none(problems)
    assert facts is not None, "what cannot be read is a problem"
    return facts


def _read(folder: str | Path, key: str) -> tuple[ModelFacts | None, list[Problem]]:
    path = Path(folder)
    if why := why_no_folder(path):
        hint = "; nothing is downloaded"
        if _is_hub_name(str(folder)):
            hint += f": hf download {folder} --local-dir {folder}"
        if path.name == QUICKSTART_MODEL:
            hint = "; scripts/fetch_model.py makes it"
        return None, [Problem(key, f"{why}: {path}{hint if why.startswith('no such') else ''}")]
    if odd := odd_files(path):
        return None, [Problem(key, f"{path / odd[0]}: cannot be read: not a regular file")]
    raw, why = _json(path / "config.json")
    if raw is None:
        return None, [Problem(key, why)]
    wrong = [k for k in _NEEDED if not _positive(raw.get(k))]
    reasons = [f"{k} must be a positive whole number, not {raw.get(k)!r}" for k in wrong]
    named = raw.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else "none"
    reasons += _impossible(raw)
    facts = None if reasons else _facts(raw, architecture)
    reasons += _refused(raw, architecture)
    return facts, [Problem(key, f"{path}/config.json: {reason}") for reason in reasons]


def _impossible(raw: dict[str, Any]) -> Iterator[str]:
    """Numbers that no model can have."""
    for key in ("num_key_value_heads", "head_dim", "max_position_embeddings"):  # may be left out
        if raw.get(key) is not None and not _positive(raw[key]):
            yield f"{key} must be a positive whole number, not {raw[key]!r}"
    heads, kv_heads = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if _positive(heads) and _positive(kv_heads) and heads % kv_heads:
        yield f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
    theta = (raw.get("rope_parameters") or {}).get("rope_theta", raw.get("rope_theta", 10000.0))
    for key, value in (("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)), ("rope_theta", theta)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            yield f"{key} must be a positive number, not {value!r}"


def _refused(raw: dict[str, Any], architecture: str) -> Iterator[str]:
    """What we would compute wrongly."""
    if architecture not in ARCHITECTURES:
        yield f"architecture {architecture} is not supported; {', '.join(ARCHITECTURES)} are"
    for key in ("rope_parameters", "rope_scaling"):  # transformers 5 and 4
        part = raw.get(key) or {}
        kind = part.get("rope_type", part.get("type", "default"))
        if kind != "default":
            yield f"{key} of type {kind!r} is not supported: scaled rotary embedding"
    if raw.get("hidden_act", "silu") != "silu":
        yield f"hidden_act {raw['hidden_act']!r} is not supported, only silu"
    sliding = raw.get("use_sliding_window") or any(t != "full_attention" for t in raw.get("layer_types") or ())
    if sliding or (architecture == "LlamaForCausalLM" and raw.get("sliding_window")):
        yield "sliding-window attention is not supported"
    if any(raw.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        yield "mixture-of-experts models are not supported"
    if architecture != "Qwen2ForCausalLM" and raw.get("attention_bias"):
        yield f"attention_bias is not supported for {architecture}"
    if raw.get("mlp_bias"):
        yield "mlp_bias is not supported"
    if raw.get("quantization_config"):
        yield "quantization_config: quantized weights are not supported; save the model in float32 or bfloat16"
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        yield "partial_rotary_factor is not supported"


def tokenizer_problems(folder: str | Path, *, key: str) -> list[Problem]:
    """Whether a folder holds a tokenizer at all; whether it works is seen when it is loaded."""
    path = Path(folder)
    if why := why_no_folder(path):
        return [Problem(key, f"{why}: {folder}")]
    if odd := odd_files(path):
        return [Problem(key, f"{path / odd[0]}: cannot be read: not a regular file")]
    if any(all((path / name).is_file() for name in names) for names in _TOKENIZERS):
        return []
    return [Problem(key, f"no tokenizer in {path}: needs tokenizer.json (or set model.tokenizer_path)")]


def _facts(raw: dict[str, Any], architecture: str) -> ModelFacts:
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    return ModelFacts(
        architecture=architecture,
        layers=raw["num_hidden_layers"],
        hidden=hidden,
        ffn=raw["intermediate_size"],
        heads=heads,
        kv_heads=raw["num_key_value_heads"] if _positive(raw.get("num_key_value_heads")) else heads,
        head_dim=raw["head_dim"] if _positive(raw.get("head_dim")) else max(hidden // heads, 1),
        vocab=raw["vocab_size"],
        max_positions=raw["max_position_embeddings"] if _positive(raw.get("max_position_embeddings")) else 2048,
        tied=bool(raw.get("tie_word_embeddings", False)),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        rope_theta=float((raw.get("rope_parameters") or {}).get("rope_theta", raw.get("rope_theta", 10000.0))),
        eps=float(raw.get("rms_norm_eps", 1e-6)),
        experts=_experts(raw),
    )


def _experts(raw: dict[str, Any]) -> Experts | None:
    """By the keys of Mixtral, Qwen2-MoE, Qwen3-MoE and DeepSeek."""

    def number(*keys: str, default: int = 0) -> int:
        return next((raw[key] for key in keys if _positive(raw.get(key))), default)

    count = number("num_experts", "num_local_experts", "n_routed_experts")
    if count == 0:
        return None
    ffn = number("moe_intermediate_size", default=raw["intermediate_size"])
    dense, layers = set(raw.get("mlp_only_layers") or ()), raw["num_hidden_layers"]
    dense |= set(range(number("first_k_dense_replace")))
    every = number("decoder_sparse_step", default=1)
    return Experts(
        layers=sum(layer not in dense and (layer + 1) % every == 0 for layer in range(layers)),
        count=count,
        active=number("num_experts_per_tok", default=1),
        ffn=ffn,
        shared_ffn=number("shared_expert_intermediate_size", default=number("n_shared_experts") * ffn),
    )


def _is_hub_name(name: str) -> bool:
    """Whether this reads like ``owner/model``, and not like a folder of this machine."""
    owner, _, _ = name.partition("/")
    return bool(re.fullmatch(r"\w[\w\-.]*/\w[\w\-.]*", name)) and owner != "models" and not Path(owner).exists()


def _positive(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _json(file: Path) -> tuple[dict[str, Any] | None, str]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, f"no {file.name} in {file.parent}; it must be a Hugging Face model folder"
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{file}: cannot be read as JSON: {error}"
    return (raw, "") if isinstance(raw, dict) else (None, f"{file}: must hold a JSON object")


def _weights(path: Path, key: str) -> list[Problem]:
    present = {p.name for p in path.glob("*.safetensors")}
    index = path / "model.safetensors.index.json"
    if index.is_file():
        raw, why = _json(index)
        if raw is None:
            return [Problem(key, why)]
        listed = raw.get("weight_map")
        named = {str(v) for v in listed.values()} if isinstance(listed, dict) else set()
        missing = sorted(named - present)
        if missing:
            return [
                Problem(
                    key, f"{len(missing)} of {len(named)} weight files are missing in {path}: {', '.join(missing[:3])}"
                )
            ]
    if present:
        return []
    other = sorted(p.name for p in path.glob("*.bin"))
    convert = f"; {other[0]} is of the old kind: save the model again with save_pretrained" if other else ""
    return [Problem(key, f"no *.safetensors in {path}{convert}")]
