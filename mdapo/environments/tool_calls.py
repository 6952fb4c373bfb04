"""Function calls in the text of an assistant turn, in the style of Hermes and Qwen:

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "6 * 7"}}
    </tool_call>

any number of them, with text before, between and after. Only the text is read; the turn's ids stay what the engine
wrote. Whatever the text, nothing is raised: what is no call although it begins as one becomes a `BadCall` that says
why, for the policy to read.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
MAX_DEPTH = 16  # levels of the arguments
MAX_CALLS = 64  # of one turn: a failed one may look at all the text that follows it
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class Call:
    """One function call; ``arguments`` is JSON data."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class BadCall:
    """What began as a call and is none; ``why`` is for the policy."""

    why: str


def calls_in(text: str) -> list[Call | BadCall]:
    """The calls of one assistant turn, in order; empty when it makes none.

    Thoughts are left out: all before the last ``</think>``, and all after a ``<think>`` that is not closed. A call ends
    at the first ``</tool_call>`` after its JSON, so that arguments may spell the tags. ``arguments`` may also be a text
    that holds the JSON object, as OpenAI's API has them.
    """
    said = _without_thoughts(text)
    found: list[Call | BadCall] = []
    at = said.find(OPEN)
    while at >= 0:
        start = at + len(OPEN)
        if len(found) == MAX_CALLS:
            return [*found, BadCall(f"more than {MAX_CALLS} calls in one turn")]
        call, end = _call_at(said, start)
        found.append(call)
        at = said.find(OPEN, end)
    return found


def spoken(text: str) -> str:
    """What an assistant turn says beside its thoughts and calls; nothing after ``MAX_CALLS`` of them."""
    said = _without_thoughts(text)
    parts, end, at = [], 0, said.find(OPEN)
    while at >= 0:
        parts.append(said[end:at])
        if len(parts) > MAX_CALLS:
            return " ".join(parts).strip()
        _, end = _call_at(said, at + len(OPEN))
        at = said.find(OPEN, end)
    return " ".join([*parts, said[end:]]).replace(CLOSE, " ").strip()


def _without_thoughts(text: str) -> str:
    return text.rpartition(THINK_CLOSE)[2].partition(THINK_OPEN)[0]


def _call_at(text: str, start: int) -> tuple[Call | BadCall, int]:
    """The call whose body begins at ``start``, and where to go on."""
    try:
        value, end = _DECODER.raw_decode(text, _after_space(text, start))
    except (ValueError, RecursionError) as error:
        close, following = text.find(CLOSE, start), text.find(OPEN, start)
        after = [at for at in (close + len(CLOSE) if close >= 0 else -1, following) if at >= 0]
        why = "it is nested too deeply" if isinstance(error, RecursionError) else _first_words(error)
        return BadCall(f"not valid JSON: {why}"), min(after, default=len(text))
    end = _after_space(text, end)
    if not text.startswith(CLOSE, end):
        return BadCall(f"a call is one JSON object between {OPEN} and {CLOSE}, and nothing else"), end
    return _call_of(value), end + len(CLOSE)


def _call_of(value: Any) -> Call | BadCall:
    if not isinstance(value, dict):
        return BadCall('a call is a JSON object with "name" and "arguments"')
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name:
        return BadCall('"name" must be the name of a function')
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            return BadCall('"arguments" must be a JSON object')
    if not isinstance(arguments, dict):
        return BadCall('"arguments" must be a JSON object')
    if _depth(arguments) > MAX_DEPTH:
        return BadCall(f'"arguments" are nested deeper than {MAX_DEPTH} levels')
    return Call(name, arguments)


def _depth(value: Any) -> int:
    """Levels of nesting; stops counting one beyond ``MAX_DEPTH``."""
    level, deepest = [value], 0
    while level and deepest <= MAX_DEPTH:
        level = [
            item
            for outer in level
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        deepest += 1
    return deepest


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError("a number is too large")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python would keep the last of two equal keys without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice in one object")
    return found


def _first_words(error: Exception) -> str:
    """Without Python's own advice on long integers, and without a position, which the policy cannot count."""
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error).split(";")[0].split(" (")[0]


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_object)
