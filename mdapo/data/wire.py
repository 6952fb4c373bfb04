"""Shares and groups as bytes: safetensors, no pickle. For scatter, replay, carried groups and checkpoints.

A share is its packed fields and where rows and micro-batches begin. Groups are a few long arrays (all turns of all
episodes end to end) and one JSON text with everything else; the text travels as a byte tensor, for a safetensors header
is limited in size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from mdapo.data.shares import FIELDS, Share
from mdapo.errors import UserError
from mdapo.types import Episode, Group, Message, Prompt, Score, Turn

SHARE_FORMAT, GROUPS_FORMAT = "mdapo-share-4", "mdapo-groups-1"
# numpy's types and safetensors' names; numpy's own names are slow to come by.
TYPES = {np.dtype(np.int64): "I64", np.dtype(np.int32): "I32", np.dtype(np.float32): "F32", np.dtype(np.bool_): "BOOL"}
# What reading bytes that are not ours can raise: all of it means the same to a user.
MALFORMED = (SafetensorError, ValueError, KeyError, TypeError, IndexError, AttributeError)


def dump_share(share: Share) -> bytes:
    """One rank's share, as bytes. Written here: a step has one for every rank, and this copies each byte once."""
    counts = np.array(share.micro_batches, np.int64)
    arrays = {"micro_batches": counts, "cu_seqlens": share.cu_seqlens_N1, "bounds": share.bounds_G1, **share.fields}
    header, end = f'{{"__metadata__":{{"format":"{SHARE_FORMAT}"}}', 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        header += f',"{name}":{{"dtype":"{TYPES[array.dtype]}","shape":[{len(array)}],"data_offsets":[{start},{end}]}}'
    header += "}"
    header += " " * (-len(header) % 8)  # the data begins aligned
    return b"".join([len(header).to_bytes(8, "little"), header.encode(), *(array.data for array in arrays.values())])


def load_share(data: bytes) -> Share:
    """The share again, on the CPU. ``UserError`` when the bytes are not one."""
    try:
        arrays = load_arrays(data)
        _check_format(_metadata(data), SHARE_FORMAT)
        share = Share(
            {name: _typed(arrays[name], dtype) for name, dtype in FIELDS.items()},
            _typed(arrays["cu_seqlens"], np.int64),
            _typed(arrays["bounds"], np.int64),
            tuple(_typed(arrays["micro_batches"], np.int64).tolist()),
        )
        _check(share)
        return share
    except MALFORMED as error:
        raise UserError(f"not a share of micro-batches: {_reason(error)}") from error


def dump_groups(groups: Sequence[Group]) -> bytes:
    """Groups with all their ids, masks, log-probs, texts and scores, as bytes.

    ``Prompt.extra`` and ``ground_truth`` must be JSON data, as they are when they come from a data file.
    """
    turns = [turn for group in groups for episode in group.episodes for turn in episode.turns]
    prompts = [episode.prompt_ids for group in groups for episode in group.episodes]
    header = {"format": GROUPS_FORMAT, "groups": [_group_header(group) for group in groups]}
    return save_arrays(
        {
            "header": _json_array(header),
            "prompt_ids": _joined(prompts, np.int32),
            "turn_ids": _joined([t.ids for t in turns], np.int32),
            "turn_mask": _joined([t.mask for t in turns], np.bool_),
            "turn_logps": _joined([t.logps for t in turns], np.float32),
        }
    )


def load_groups(data: bytes, *, source: str = "groups") -> list[Group]:
    """The groups again, equal in every bit. ``UserError`` naming ``source`` when the bytes are not groups or are cut
    short.
    """
    try:
        arrays = load_arrays(data)
        header = _from_json(arrays["header"].tobytes(), GROUPS_FORMAT)
        prompt_ids = _Reader(arrays["prompt_ids"])
        turns = [_Reader(arrays[name]) for name in ("turn_ids", "turn_mask", "turn_logps")]
        groups = [_group(entry, prompt_ids, turns) for entry in header["groups"]]
        if any(reader.left for reader in (prompt_ids, *turns)):
            raise ValueError("more tokens than the header speaks of")
        return groups
    except MALFORMED as error:
        raise UserError(f"{source}: not recorded groups: {_reason(error)}") from error


def save_groups_file(path: Path, groups: Sequence[Group]) -> None:
    """Write ``path`` in one piece: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(dump_groups(groups))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load_groups_file(path: Path) -> list[Group]:
    """Groups written by `save_groups_file`. ``UserError`` when the file is missing or is not one."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot read recorded groups: {error.strerror}") from error
    return load_groups(data, source=str(path))


def _check(share: Share) -> None:
    """ValueError unless rows and micro-batches follow one another up to the last token."""
    cu, bounds, tokens = share.cu_seqlens_N1, share.bounds_G1, {len(field) for field in share.fields.values()}
    for name, edges, end in (("cu_seqlens", cu, tokens.pop()), ("bounds", bounds, len(cu) - 1)):
        if tokens or edges[0] != 0 or edges[-1] != end or (np.diff(edges) < 0).any():
            raise ValueError(f"{name} does not lead from 0 to {end}")
    if sum(share.micro_batches) != len(bounds) - 1 or min(share.micro_batches, default=0) < 0:
        raise ValueError(f"{share.micro_batches} micro-batches, {len(bounds) - 1} bounds")


def _typed(array: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    if array.dtype != dtype or array.ndim != 1:
        raise ValueError(f"an array of {array.dtype} {array.shape} where {np.dtype(dtype)} [...] belongs")
    return array


def _metadata(data: bytes) -> dict[str, str]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size])["__metadata__"]


def _group_header(group: Group) -> dict[str, Any]:
    prompt = group.prompt
    scale = {} if group.length_scale == 1.0 else {"length_scale": group.length_scale}
    return {
        "version": group.version,
        **scale,
        "prompt": {
            "uid": prompt.uid,
            "row": prompt.row,
            "messages": _messages_out(prompt.messages),
            "data_source": prompt.data_source,
            "ground_truth": prompt.ground_truth,
            "extra": dict(prompt.extra),
        },
        "episodes": [_episode_header(episode) for episode in group.episodes],
    }


def _episode_header(episode: Episode) -> dict[str, Any]:
    return {
        "index": episode.index,
        "prompt_tokens": len(episode.prompt_ids),
        "messages": _messages_out(episode.messages),
        "end": episode.end,
        "score": None if episode.score is None else {**vars(episode.score), "parts": dict(episode.score.parts)},
        "turns": [_turn_header(turn) for turn in episode.turns],
    }


def _turn_header(turn: Turn) -> dict[str, Any]:
    header: dict[str, Any] = {
        "role": turn.role,
        "tokens": len(turn.ids),
        "version": turn.version,
        "finish": turn.finish,
    }
    return {**header, "pieces": turn.pieces} if turn.pieces else header


def _group(entry: dict[str, Any], prompt_ids: _Reader, turns: Sequence[_Reader]) -> Group:
    fields: dict[str, Any] = {**entry["prompt"], "messages": _messages_in(entry["prompt"]["messages"])}
    prompt = Prompt(**fields)
    episodes = [
        Episode(
            prompt=prompt,
            index=e["index"],
            prompt_ids=prompt_ids.take(e["prompt_tokens"]),
            turns=tuple(_turn(t, turns) for t in e["turns"]),
            messages=_messages_in(e["messages"]),
            end=e["end"],
            score=None if e["score"] is None else _score(e["score"]),
        )
        for e in entry["episodes"]
    ]
    scale = float(entry.get("length_scale", 1.0))
    return Group(prompt=prompt, episodes=tuple(episodes), version=entry["version"], length_scale=scale)


def _score(entry: dict[str, Any]) -> Score:
    fields: dict[str, Any] = {**entry, "before": tuple(entry.get("before", ()))}
    return Score(**fields)


def _turn(entry: dict[str, Any], readers: Sequence[_Reader]) -> Turn:
    ids, mask, logps = (reader.take(entry["tokens"]) for reader in readers)
    pieces = tuple((int(version), int(tokens)) for version, tokens in entry.get("pieces", ()))
    if any(tokens < 0 for _, tokens in pieces) or sum(tokens for _, tokens in pieces) > len(ids):
        raise ValueError(f"pieces {pieces} of a turn of {len(ids)} tokens")
    fields: dict[str, Any] = {name: entry[name] for name in ("role", "version", "finish")}
    return Turn(ids=ids, mask=mask, logps=logps, pieces=pieces, **fields)


class _Reader:
    """Cuts one long array into consecutive pieces."""

    def __init__(self, values: np.ndarray) -> None:
        self._values, self._at = values, 0

    def take(self, count: int) -> np.ndarray:
        if not 0 <= count <= self.left:
            raise ValueError(f"the header asks for {count} tokens where {self.left} are left")
        self._at += count
        return self._values[self._at - count : self._at]

    @property
    def left(self) -> int:
        return len(self._values) - self._at


def _messages_out(messages: Sequence[Message]) -> list[list[str]]:
    return [[m.role, m.content] for m in messages]


def _messages_in(entries: Sequence[Sequence[Any]]) -> tuple[Message, ...]:
    return tuple(Message(role=role, content=content) for role, content in entries)


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)


def _json_array(value: object) -> np.ndarray:
    # Escaped to ASCII: half a character (a lone surrogate) comes back as it was.
    return np.frombuffer(json.dumps(value, ensure_ascii=True).encode("ascii"), np.uint8)


def _from_json(data: bytes, expected: str) -> dict[str, Any]:
    value = json.loads(data)
    _check_format(value, expected)
    return value


def _check_format(header: dict[str, Any], expected: str) -> None:
    if header["format"] != expected:
        raise ValueError(f"format {header['format']!r}, expected {expected!r}")


def _reason(error: Exception) -> str:
    return f"no {error.args[0]!r} in it" if isinstance(error, KeyError) and error.args else str(error)
