"""What a sentence-transformers folder says of itself, read without torch: encoder, pooling, normalisation, lengths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdapo.config.paths import why_no_file, why_no_folder
from mdapo.config.problems import Problem

MODULES, POOLING_CONFIG, MAX_TOKENS = "modules.json", "config.json", "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
LONGEST = 8192  # tokens of a text, whatever the folder says
# sentence-transformers' flags of 1_Pooling/config.json, and ours.
POOLINGS: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True)
class EmbeddingFolder:
    """``encoder`` is the Hugging Face folder; ``max_tokens`` of a text, special ones included (longer texts are cut);
    ``prefix`` stands before each text, as the folder's default prompt."""

    encoder: Path
    dimension: int
    pooling: str
    normalize: bool
    max_tokens: int
    prefix: str = ""


def read_embedding_folder(
    folder: str | Path, *, key: str = "quality.embeddings"
) -> tuple[EmbeddingFolder | None, list[Problem]]:
    """The facts, or why they cannot be had: never both. Files are read as JSON only."""
    root = Path(folder)
    if why := why_no_folder(root):
        return None, [Problem(key, f"{why}: {folder}")]
    try:
        return _read(root), []
    except _Unfit as error:
        return None, [Problem(key, f"{folder} is no sentence-transformers folder that can be used: {error}")]


class _Unfit(ValueError):
    """Why a folder cannot be used."""


def _read(root: Path) -> EmbeddingFolder:
    paths = _modules(root)
    encoder = root / paths["Transformer"]
    for name in ("config.json", "tokenizer.json"):
        if why := why_no_file(encoder / name):
            raise _Unfit(f"{name}: {why}")
    if not any(encoder.glob("*.safetensors")):
        raise _Unfit("there is no .safetensors file (weights in other formats are not read)")
    model = _object(encoder / "config.json")
    dimension = _whole(model, "hidden_size", "config.json")
    lengths = [LONGEST]
    if "max_position_embeddings" in model:
        lengths.append(_whole(model, "max_position_embeddings", "config.json"))
    if not why_no_file(encoder / MAX_TOKENS) and _object(encoder / MAX_TOKENS).get("max_seq_length") is not None:
        lengths.append(_whole(_object(encoder / MAX_TOKENS), "max_seq_length", MAX_TOKENS))
    pooling = _pooling(_object(root / paths["Pooling"] / POOLING_CONFIG))
    return EmbeddingFolder(encoder, dimension, pooling, "Normalize" in paths, min(lengths), _prefix(root))


def _modules(root: Path) -> dict[str, str]:
    """Kind of module -> its folder below ``root``."""
    if why := why_no_file(root / MODULES):
        raise _Unfit(f"{MODULES}: {why}")
    modules = _json(root / MODULES)
    if not isinstance(modules, list) or not all(isinstance(m, dict) for m in modules):
        raise _Unfit(f"{MODULES} holds no list of modules")
    kinds = [str(m.get("type", "")).rpartition(".")[2] for m in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise _Unfit(
            f"its modules are {', '.join(kinds) or 'none'}; Transformer, Pooling and Normalize are known, in this order"
        )
    paths = [str(m.get("path", "")) for m in modules]
    if any(Path(path).is_absolute() or ".." in Path(path).parts for path in paths):
        raise _Unfit(f"{MODULES} names a path outside of the folder")
    return dict(zip(kinds, paths, strict=True))


def _pooling(config: Mapping[str, Any]) -> str:
    modes = [flag for flag, value in config.items() if flag.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise _Unfit(f"its pooling is {', '.join(modes) or 'not told'}; known is one of {', '.join(POOLINGS)}")
    return POOLINGS[modes[0]]


def _prefix(root: Path) -> str:
    if why_no_file(root / PROMPTS):
        return ""
    config = _object(root / PROMPTS)
    name, prompts = config.get("default_prompt_name"), config.get("prompts")
    if name is None:
        return ""
    if not isinstance(prompts, dict) or not isinstance(prompts.get(name), str):
        raise _Unfit(f"{PROMPTS} names the prompt {name!r:.60} and has no such text")
    return prompts[name]


def _whole(values: Mapping[str, Any], name: str, file: str) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _Unfit(f"{file}: {name} is no whole number above 0")
    return value


def _object(path: Path) -> dict[str, Any]:
    if why := why_no_file(path):
        raise _Unfit(f"{path.name}: {why}")
    value = _json(path)
    if not isinstance(value, dict):
        raise _Unfit(f"{path.name} is no JSON object")
    return value


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise _Unfit(f"{path.name} is not JSON ({type(error).__name__})") from error
