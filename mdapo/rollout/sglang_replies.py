"""What an SGLang server may answer, checked to the last field before anything of it is believed.

Log-probs: SGLang 0.5.19 returns ``log softmax(logits / temperature)`` of the sampled token, before top-k and top-p, and
at temperature 1 of a greedy one. That is what ``SamplingParams`` promises, unless the server runs with
``SGLANG_RETURN_ORIGINAL_LOGPROB``, which ``Client.check_logprobs`` finds out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from mdapo.rollout.engine import Completion, EngineError, SamplingParams

SLACK = 1e-3  # a log-prob of a token that is all but certain may round to a little above 0


class Unavailable(EngineError):
    """No whole answer: reset, time-out, 5xx. Another server may be asked."""


class NothingListens(Unavailable):
    """The connection was refused: no process is there."""


class BadReply(EngineError):
    """An answer that is not one. Another server may be asked; what came is not used."""


class WrongVersion(BadReply):
    """The tokens are of other weights than those asked for: the server is stale."""


class Refused(EngineError):
    """The request or the server's set-up is at fault (4xx, a redirect, a context that is too small): never retried."""


@dataclass(frozen=True)
class Asked:
    """What a reply is held against."""

    rid: str
    prompt_tokens: int
    params: SamplingParams
    version: int
    vocab_size: int


def parse_json(body: bytes) -> Any:
    """Strict JSON: NaN and infinities are none. ``BadReply``."""
    try:
        return json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise BadReply(f"not JSON: {type(error).__name__}, {len(body)} bytes") from None


def _no_number(text: str) -> NoReturn:
    raise ValueError(text)


def read_completion(reply: object, asked: Asked) -> Completion:
    """The completion in a reply of ``/generate``. ``BadReply`` names the first field that is not as it must be,
    ``WrongVersion`` the version that came, ``Refused`` a server that cuts turns short."""
    answer = _mapping(reply, "the reply")
    meta = _mapping(answer.get("meta_info"), "meta_info")
    _require(meta.get("id") == asked.rid, "meta_info.id is another request's")
    ids = _ids(answer.get("output_ids"), asked)
    logps = _logps(meta.get("output_token_logprobs"), ids)
    _check_version(meta, len(ids), asked.version)
    finish = _finish(meta.get("finish_reason"), ids, asked)
    counted = meta.get("completion_tokens")
    _require(counted == len(ids) and _is_int(counted), "meta_info.completion_tokens is not the number of output_ids")
    if finish == "abort" and "prompt_tokens" not in meta:  # it never left the queue
        cached = 0
    else:
        _require(meta.get("prompt_tokens") == asked.prompt_tokens, "the prompt was cut: meta_info.prompt_tokens")
        cached = _count(meta.get("cached_tokens"), most=asked.prompt_tokens, name="meta_info.cached_tokens")
    return Completion(ids, logps, finish, asked.version, cached)


def _ids(value: object, asked: Asked) -> tuple[int, ...]:
    _require(isinstance(value, list), "output_ids is not a list")
    assert isinstance(value, list)
    _require(len(value) <= asked.params.max_new_tokens, "more output_ids than asked for")
    _require(all(_is_int(token) for token in value), "output_ids holds what is no id")
    _require(all(0 <= token < asked.vocab_size for token in value), "an id beyond the vocabulary")
    return tuple(value)


def _logps(value: object, ids: tuple[int, ...]) -> tuple[float, ...]:
    """``value``: [log-prob, id, text or null] for each id."""
    _require(isinstance(value, list), "output_token_logprobs is not a list")
    assert isinstance(value, list)
    _require(len(value) == len(ids), f"{len(value)} log-probs for {len(ids)} ids")
    logps = []
    for entry, token in zip(value, ids, strict=True):
        _require(isinstance(entry, list) and len(entry) >= 2, "output_token_logprobs is not made of pairs")
        _require(_is_int(entry[1]) and entry[1] == token, "a log-prob is another token's")
        _require(type(entry[0]) in (int, float) and math.isfinite(entry[0]), "a log-prob is not a finite number")
        _require(entry[0] <= SLACK, "a log-prob is above 0")
        logps.append(float(entry[0]))
    return tuple(logps)


def _check_version(meta: Mapping[str, Any], tokens: int, expected: int) -> None:
    """Every token was made by ``expected``. ``weight_versions`` has the spans; ``weight_version`` alone is that at the
    end."""
    spans = meta.get("weight_versions", [])
    _require(isinstance(spans, list), "meta_info.weight_versions is not a list")
    found = [meta.get("weight_version")]
    reached = 0
    for span in spans:
        entry = _mapping(span, "meta_info.weight_versions")
        _require(entry.get("start") == reached and _is_int(entry.get("end")), "meta_info.weight_versions has a gap")
        reached = entry["end"]
        found.append(entry.get("version"))
    _require(not spans or reached == tokens, "meta_info.weight_versions does not cover the tokens")
    other = [version for version in found if version != str(expected)]
    if other:
        raise WrongVersion(f"weights of version {_short(other[0])}, expected {expected}")


def _finish(value: object, ids: tuple[int, ...], asked: Asked) -> str:
    reason, params = _mapping(value, "meta_info.finish_reason"), asked.params
    kind = reason.get("type")
    before = ids if kind == "length" else ids[:-1]
    _require(params.ignore_eos or not set(before) & set(params.stop_ids), "tokens after a stop token")
    if kind == "stop":
        matched = reason.get("matched")
        _require(not params.ignore_eos, "it stopped where stop tokens are to be ignored")
        _require(bool(ids) and _is_int(matched) and matched == ids[-1], f"it stopped at {_short(matched)}")
    elif kind == "length":
        if len(ids) < params.max_new_tokens:
            raise Refused(
                f"it cut a turn to {len(ids)} of {params.max_new_tokens} tokens: the server needs a larger "
                "--context-length (or --max-total-tokens) than model.max_context"
            )
    else:
        _require(kind == "abort", f"finish_reason {_short(kind)} is unknown")
    return str(kind)


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadReply(f"{name} is not an object")
    return value


def _count(value: object, *, most: int, name: str) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise BadReply(f"{name} is not a number from 0 to {most}")
    return value


def _is_int(value: object) -> bool:
    return type(value) is int  # True is no id


def _require(good: bool, what: str) -> None:  # noqa: FBT001 - a claim and what to say where it does not hold
    if not good:
        raise BadReply(what)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
