"""Files of rows -> ``Prompt``s, with every malformed row named as ``file:line: field: what``.

Three shapes are read: verl's (``prompt`` as a message list, ``data_source``, ``reward_model.ground_truth``,
``extra_info``), ``messages``, and plain ``question`` / ``answer``. All other columns go to ``Prompt.extra``.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from mdapo.config.paths import why_no_file
from mdapo.types import Message, Prompt, Role

MAX_LINE = 16 << 20  # bytes of one jsonl line
MAX_DEPTH = 32  # levels of nesting
MAX_SHOWN = 20  # problems listed before "and n more"
_ROLES = get_args(Role)
_SURROGATE = re.compile("[\ud800-\udfff]")
_BOM = b"\xef\xbb\xbf"
_CONSUMED = ("data_source", "reward_model", "extra_info", "uid", "ground_truth")
Row = Mapping[str, Any]


@dataclass
class Problems:
    """All problems, of which the first ``MAX_SHOWN`` are kept as text."""

    shown: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, problem: str) -> None:
        self.count += 1
        if self.count <= MAX_SHOWN:
            self.shown.append(problem)

    @property
    def lines(self) -> list[str]:
        more = self.count - len(self.shown)
        return [*self.shown, f"... and {more} more"] if more else self.shown


class RowError(ValueError):
    """One field of one row is not usable: ``field: what``."""


def read_rows(file: Path, problems: Problems) -> Iterator[tuple[int, Row]]:
    """(line from 1, row) of a ``.jsonl`` or ``.parquet`` file; unreadable lines become problems."""
    if file.suffix not in (".jsonl", ".parquet"):
        problems.add(f"{file}: not a .jsonl or .parquet file")
        return
    if why := why_no_file(file):
        problems.add(f"{file}: {why}")
        return
    reader = _read_parquet if file.suffix == ".parquet" else _read_jsonl
    try:
        yield from reader(file, problems)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        problems.add(f"{file}: " + str(error).split("\n")[0])


def _read_jsonl(file: Path, problems: Problems) -> Iterator[tuple[int, Row]]:
    with file.open("rb") as lines:
        for number, raw in enumerate(_bounded_lines(lines), start=1):
            if not raw.strip():
                continue
            try:
                row = _parse(raw)
            except RowError as error:
                problems.add(f"{file}:{number}: {error}")
            else:
                yield number, row


def _bounded_lines(lines: Any) -> Iterator[bytes]:
    """Lines of a binary file; of an oversized one only the first ``MAX_LINE + 1`` bytes are ever held."""
    while raw := lines.readline(MAX_LINE + 1):
        yield raw
        while len(raw) > MAX_LINE and not raw.endswith(b"\n"):
            raw = lines.readline(MAX_LINE + 1)


def _parse(raw: bytes) -> Row:
    if len(raw) > MAX_LINE:
        raise RowError(f"row: longer than {MAX_LINE >> 20} MiB")
    if raw.startswith(_BOM):
        raise RowError("row: starts with a byte order mark; save the file as plain UTF-8")
    try:
        row = json.loads(
            raw.decode("utf-8").rstrip(), parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_object
        )
    except RowError:
        raise
    except UnicodeDecodeError as error:
        raise RowError(f"row: not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise RowError(f"row: nested deeper than {MAX_DEPTH} levels") from error
    except json.JSONDecodeError as error:
        raise RowError(f"row: not JSON ({error.msg}, column {error.colno})") from error
    except ValueError as error:
        raise RowError(f"row: not JSON ({str(error).split(';')[0]})") from error
    if not isinstance(row, dict):
        raise RowError(f"row: must be an object, is {_kind(row)}")
    return row


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise RowError(f"row: {text:.40} is beyond the largest number, 1.8e308")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python would keep the last of two equal keys without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
        raise RowError(f"row: key {twice!r:.60} comes twice in one object")
    return found


def _read_parquet(file: Path, problems: Problems) -> Iterator[tuple[int, Row]]:
    number = 0
    with pq.ParquetFile(file) as table:
        for batch in table.iter_batches(batch_size=1024):
            for i in range(batch.num_rows):
                number += 1
                try:
                    row = batch.slice(i, 1).to_pylist()[0]
                except (UnicodeDecodeError, pa.ArrowException) as error:
                    problems.add(f"{file}:{number}: row: {str(error).split(chr(10))[0]}")
                else:
                    yield number, row


def make_prompt(row: Row, *, uid: str, index: int, prompt_key: str, system_prompt: str | None) -> Prompt:
    """One checked row. ``uid`` is used where the row has none. Raises ``RowError``."""
    _check_data(row, "")
    messages, used = _messages(row, prompt_key)
    if system_prompt is not None and messages[0].role != "system":
        messages = (Message("system", system_prompt), *messages)
    extra = {k: v for k, v in row.items() if k not in used and k not in _CONSUMED}
    return Prompt(
        uid=_uid(row, uid),
        row=index,
        messages=messages,
        data_source=_optional(row, "data_source", str, "text") or "default",
        ground_truth=_ground_truth(row),
        extra={**extra, **(_optional(row, "extra_info", dict, "an object") or {})},
    )


def _messages(row: Row, prompt_key: str) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """The row's messages and the columns they came from."""
    for key in dict.fromkeys((prompt_key, "messages")):
        if key in row:
            value = row[key]
            if isinstance(value, str):
                value = [{"role": "user", "content": value}]
            if not isinstance(value, list) or not value:
                raise RowError(f"{key}: must be a list of messages, is {_kind(value)}")
            messages = tuple(_message(m, f"{key}[{i}]") for i, m in enumerate(value))
            if messages[-1].role == "assistant":
                raise RowError(
                    f"{key}[{len(value) - 1}].role: the last message is the assistant's; the policy writes it"
                )
            return messages, (key,)
    if "question" in row:
        return (Message("user", _text(row["question"], "question")),), ("question",)
    wanted = (prompt_key, "messages", "question")
    near = next((k for k in row if isinstance(k, str) and difflib.get_close_matches(k, wanted, n=1, cutoff=0.75)), None)
    hint = f" (did you mean {near}?)" if near else ""
    raise RowError(f"{prompt_key}: missing; a row has {prompt_key}, messages or question{hint}")


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise RowError(f"{where}: must be an object with role and content, is {_kind(value)}")
    for key in ("role", "content"):
        if key not in value:
            raise RowError(f"{where}.{key}: missing")
    more = next((k for k, v in value.items() if k not in ("role", "content") and v is not None), None)
    if more is not None:
        raise RowError(f"{where}.{more}: unknown; a message has role and content")
    role = value["role"]
    if role not in _ROLES:
        raise RowError(f"{where}.role: must be one of {', '.join(_ROLES)}, is {role!r:.60}")
    return Message(role, _text(value["content"], f"{where}.content"))


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{where}: must be text, is {_kind(value)}")
    if not value.strip():
        raise RowError(f"{where}: is empty")
    return value


def _optional(row: Row, key: str, kind: type, name: str) -> Any:
    value = row.get(key)  # parquet fills columns that a row does not have with null
    if value is not None and not isinstance(value, kind):
        raise RowError(f"{key}: must be {name}, is {_kind(value)}")
    return value


def _uid(row: Row, default: str) -> str:
    uid = row.get("uid")
    if uid is None:
        return default
    if isinstance(uid, bool) or not isinstance(uid, str | int) or uid == "":
        raise RowError(f"uid: must be text or an integer, is {_kind(uid)}")
    return str(uid)


def _ground_truth(row: Row) -> Any:
    """verl's place, a ``ground_truth`` column, or what an ``answer`` says after its last ``####`` (or all of it)."""
    reward_model = _optional(row, "reward_model", dict, "an object")
    if reward_model and reward_model.get("ground_truth") is not None:
        return reward_model["ground_truth"]
    if row.get("ground_truth") is not None:
        return row["ground_truth"]
    answer = row.get("answer")
    if "question" not in row or answer is None:
        return None
    final = _text(answer, "answer").rpartition("####")[2].strip()
    if not final:
        raise RowError("answer: nothing after ####")
    return final


def _check_data(value: Any, where: str, depth: int = 0) -> None:
    """JSON data only, texts that are Unicode, no NUL, not too deep."""
    name = where or "row"
    if depth > MAX_DEPTH:
        raise RowError(f"{name[:80]}: nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        if "\x00" in value:
            raise RowError(f"{name}: has a NUL character")
        if not value.isascii() and _SURROGATE.search(value):
            raise RowError(f"{name}: has half of a surrogate pair; not Unicode text")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RowError(f"{name}: has a key that is no text")
            _check_data(key, f"{name}: a key")
            _check_data(item, f"{where}.{key}" if where else key, depth + 1)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check_data(item, f"{where}[{i}]", depth + 1)
    elif value is not None and not isinstance(value, bool | int | float):
        raise RowError(f"{name}: {type(value).__name__} is not JSON data")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if value in ("", [], {}):
        return {str: "an empty text", list: "an empty list", dict: "an empty object"}[type(value)]
    names = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
