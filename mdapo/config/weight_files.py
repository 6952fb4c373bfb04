"""Whether the weights of a model folder are those that its ``config.json`` speaks of, from the files' headers alone.

A safetensors file begins with the length of its header (8 bytes, little endian) and the header, a JSON object: name to
``dtype``, ``shape`` and ``data_offsets`` [begin, end) in bytes behind the header.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mdapo.config.model_facts import ModelFacts
from mdapo.config.problems import Problem, require_none

MAX_HEADER_BYTES = 100_000_000  # what the safetensors library accepts
NAMED = 3  # of the weights that a message lists


def require_weights(folder: str | Path, facts: ModelFacts, *, key: str = "model.path") -> dict[str, Path]:
    """The file of every weight. Raises ``UserError`` with every reason why these weights cannot be used."""
    require_none(weight_problems(folder, facts, key=key))
    return {name: file for file in _files(folder) for name in _shapes(file)}


def _files(folder: str | Path) -> list[Path]:
    """In the order in which the engine reads them too: where a weight comes twice, the last file has it."""
    return sorted(Path(folder).glob("*.safetensors"))


def weight_problems(folder: str | Path, facts: ModelFacts, *, key: str = "model.path") -> list[Problem]:
    """What is wrong with the ``*.safetensors`` of a folder: unreadable, cut short, or not the model's weights."""
    found: dict[str, tuple[int, ...]] = {}
    problems: list[Problem] = []
    for file in _files(folder):
        try:
            found |= _shapes(file)
        except (OSError, ValueError, RecursionError) as error:
            problems.append(Problem(key, f"{file}: {error}"))
    if problems:
        return problems
    if not found:
        return [Problem(key, f"no weights in {folder}: it needs *.safetensors")]
    if facts.layers > len(found):  # before a list of so many layers is made
        text = f"config.json means {facts.layers} layers, but the files hold {len(found)} tensors in all"
        return [Problem(key, f"{folder}: {text}")]
    wanted = facts.weight_shapes()
    misshapen = [
        f"{name} has shape {list(found[name])}, config.json means {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    reasons = [_some("tensors missing from *.safetensors", [name for name in wanted if name not in found])]
    reasons += [_some("weights that do not fit config.json", misshapen)]
    return [Problem(key, f"{folder}: {reason}") for reason in reasons if reason]


def _some(what: str, names: list[str]) -> str:
    more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{what}: {', '.join(names[:NAMED])}{more}" if names else ""


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Name to shape. ValueError for what is no safetensors file, or one cut short."""
    with file.open("rb") as source:
        length = int.from_bytes(source.read(8), "little")
        if not 0 < length <= MAX_HEADER_BYTES:
            raise ValueError("no safetensors file: its header cannot be read")
        text = source.read(length)
    if len(text) < length:
        raise ValueError("no safetensors file: its header cannot be read")
    try:
        header: dict[str, Any] = json.loads(text)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        shapes = {name: tuple(int(n) for n in entry["shape"]) for name, entry in entries.items()}
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError("no safetensors file: its header cannot be read") from error
    if (held := file.stat().st_size - 8 - length) < end:
        raise ValueError(f"cut short: it holds {held:,} of {end:,} bytes of weights")
    return shapes
