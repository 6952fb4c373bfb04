"""Whether the weights of a model folder are those that its ``config.json`` speaks of, from the files' headers alone.

A safetensors file begins with the length of its header (8 bytes, little endian) and the header, a JSON object: name to
``dtype``, ``shape`` and ``data_offsets`` [begin, end) in bytes behind the header.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from mdapo.config.model_facts import ModelFacts
from mdapo.config.problems import Problem, require_none

MAX_HEADER_BYTES = 100_000_000  # what the safetensors library accepts
INDEX = "model.safetensors.index.json"
TRAINABLE = ("F64", "F32", "F16", "BF16")  # integers and 8-bit floats are quantized: numbers without their scale
NAMED = 3  # of the weights that a message lists


def require_weights(folder: str | Path, facts: ModelFacts, *, key: str = "model.path") -> dict[str, Path]:
    """The file of every weight of the model. Raises ``UserError`` with every reason why they cannot be used."""
    found, problems = _judged(Path(folder), facts, key)
    require_none(problems)
    return {name: found[name].file for name in facts.weight_shapes()}


def weight_problems(folder: str | Path, facts: ModelFacts, *, key: str = "model.path") -> list[Problem]:
    """What is wrong with the ``*.safetensors`` of a folder: unreadable, cut short, or not the model's weights."""
    return _judged(Path(folder), facts, key)[1]


def _judged(folder: Path, facts: ModelFacts, key: str) -> tuple[dict[str, _Stored], list[Problem]]:
    """Where each weight lies, and what is wrong; the headers are read once."""
    found, unreadable = _find(folder)
    reasons = unreadable or _unfit(folder, found, facts)
    return found, [Problem(key, reason) for reason in reasons]


def _unfit(folder: Path, found: dict[str, _Stored], facts: ModelFacts) -> list[str]:
    if not found:
        return [f"no weights in {folder}: it needs *.safetensors"]
    if facts.layers > len(found):  # before a list of so many layers is made
        text = f"config.json means {facts.layers} layers, but the files hold {len(found)} tensors in all"
        return [f"{folder}: {text}"]
    wanted = facts.weight_shapes()
    misshapen = [
        f"{name} has shape {list(found[name].shape)}, config.json means {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]
    untrainable = [
        f"{name} is {found[name].dtype}" for name in wanted if name in found and found[name].dtype not in TRAINABLE
    ]
    needless = {"lm_head.weight"} if facts.tied else set()  # some folders store the tied head a second time
    strange = [n for n in found if n not in wanted and n not in needless and not n.endswith(".rotary_emb.inv_freq")]
    reasons = [_some("tensors missing from *.safetensors", [name for name in wanted if name not in found])]
    reasons += [_some("weights that do not fit config.json", misshapen)]
    reasons += [_some(f"weights that are none of {', '.join(TRAINABLE)}", untrainable)]
    reasons += [_some("weights that such a model does not have", strange)]
    return [f"{folder}: {reason}" for reason in reasons if reason]


class _Stored(NamedTuple):
    file: Path
    shape: tuple[int, ...]
    dtype: str


def _find(folder: Path) -> tuple[dict[str, _Stored], list[str]]:
    """Where each weight lies, and what is wrong. The index says so, if there is one; else each file has its own."""
    found: dict[str, _Stored] = {}
    problems: list[str] = []
    index = folder / INDEX
    try:
        listed = _listed(index) if index.exists() else None
    except (OSError, ValueError, RecursionError) as error:
        return {}, [f"{index}: {error}"]
    for file in sorted(folder.glob("*.safetensors") if listed is None else {folder / f for f in listed.values()}):
        try:
            stored = _header(file)
        except FileNotFoundError:
            problems.append(f"{file}: missing, named by the index")
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{file}: {error}")
        else:
            own = stored if listed is None else [name for name in stored if listed.get(name) == file.name]
            problems += [f"{file}: {name} is in {found[name].file.name} too" for name in own if name in found]
            found |= {name: stored[name] for name in own}
    return found, problems


def _listed(index: Path) -> dict[str, str]:
    """Weight to file name, as an index has it."""
    raw = json.loads(index.read_text(encoding="utf-8"))
    listed = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise ValueError("no index of weights: it has no weight_map")
    for name in listed.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{name!r} must be a plain file name")
    return listed


def _some(what: str, names: list[str]) -> str:
    more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{what}: {', '.join(names[:NAMED])}{more}" if names else ""


def _header(file: Path) -> dict[str, _Stored]:
    """What a file holds, by name. ValueError for what is no safetensors file, or one cut short."""
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
        stored = {
            name: _Stored(file, tuple(int(n) for n in entry["shape"]), str(entry["dtype"]))
            for name, entry in entries.items()
        }
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError("no safetensors file: its header cannot be read") from error
    if (held := file.stat().st_size - 8 - length) < end:
        raise ValueError(f"cut short: it holds {held:,} of {end:,} bytes of weights")
    return stored
