"""Call a reward function in the signature it has, and read what it returns; anything but a finite number is an error.

Three signatures are told apart by the names of their parameters: ours ``(messages, prompt, end)``, verl's
``(data_source, solution_str, ground_truth, extra_info)`` and TRL's ``(prompts, completions, **columns)``.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mdapo import plugins
from mdapo.errors import UserError
from mdapo.rewards import BUILTIN
from mdapo.types import EndReason, Message, Prompt, Score

Style = Literal["ours", "verl", "trl"]
MAX_REWARD = 1e6  # in size: sums of more lose the small differences that teach, and end as infinity in float32
MAX_PART = 1e30  # of what is only logged
ROUNDING = 1e-6  # of an outcome that a sum of shares carries past 0 or 1
_ACCURACY = ("acc", "success")  # names of the raw outcome in a mapping


class BadReward(Exception):
    """A function gave no usable reward; the text is the reason that is counted (short, without the episode's data)."""


@dataclass(frozen=True)
class Verdict:
    """What one function said of one episode. ``outcome`` None: it did not say."""

    value: float
    outcome: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardFunction:
    """A loaded function with its configured arguments and its signature."""

    function: Callable[..., Any]
    style: Style
    parameters: frozenset[str] | None  # None: takes any keyword
    args: Mapping[str, Any]

    def __call__(self, messages: Sequence[Message], prompt: Prompt, end: EndReason, *, opening: int) -> Verdict:
        """``opening``: how many messages stood before the policy's first turn.

        Raises ``BadReward`` when the function raises or returns no finite number of at most ``MAX_REWARD`` in size.
        """
        try:
            result = self._call(messages, prompt, end, opening)
        except (Exception, SystemExit) as error:
            raise BadReward(f"raised {type(error).__name__}") from error
        return read_verdict(_only(result) if self.style == "trl" else result)

    def _call(self, messages: Sequence[Message], prompt: Prompt, end: EndReason, opening: int) -> Any:
        if self.style == "ours":
            result = self.function(messages, prompt, end, **self.args)
        elif self.style == "verl":
            result = self.function(**self._accepted(_verl_columns(messages[opening:], prompt)), **self.args)
        else:
            result = self.function(**self._accepted(_trl_columns(messages, prompt, opening)), **self.args)
        if inspect.isawaitable(result):
            result = asyncio.run(_wait(result))
        return result

    def _accepted(self, columns: dict[str, Any]) -> dict[str, Any]:
        known = columns if self.parameters is None else {k: v for k, v in columns.items() if k in self.parameters}
        return {k: v for k, v in known.items() if k not in self.args}


async def _wait(result: Awaitable[Any]) -> Any:
    return await result


def _only(results: Any) -> Any:
    """The one element of what a function returned for one completion."""
    if isinstance(results, str | bytes | Mapping) or not hasattr(results, "__len__") or len(results) != 1:
        raise BadReward(f"returned {type(results).__name__}, not a list of one reward")
    return results[0]


def _verl_columns(talk: Sequence[Message], prompt: Prompt) -> dict[str, Any]:
    """``solution_str`` is all that the policy wrote, one line break between turns."""
    written = "\n".join(m.content for m in talk if m.role == "assistant")
    return {
        "data_source": prompt.data_source,
        "solution_str": written,
        "ground_truth": prompt.ground_truth,
        "extra_info": dict(prompt.extra),
    }


def _trl_columns(messages: Sequence[Message], prompt: Prompt, opening: int) -> dict[str, Any]:
    """Lists of one; every column of the row comes along."""
    rows = [{"role": m.role, "content": m.content} for m in messages]
    columns = {name: [value] for name, value in prompt.extra.items()}
    columns |= {"ground_truth": [prompt.ground_truth], "data_source": [prompt.data_source]}
    return columns | {"prompts": [rows[:opening]], "completions": [rows[opening:]]}


def load_function(name: str, args: Mapping[str, Any]) -> RewardFunction:
    """``name``: a built-in, ``pkg.mod:name`` or ``file.py:name``. Raises ``UserError``."""
    function = plugins.load(name, builtin=BUILTIN)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise UserError(f"reward.functions: {name}: not a function with a signature") from error
    styles: dict[str, Style] = {"solution_str": "verl", "completions": "trl", "messages": "ours"}
    style = next((styles[p] for p in styles if p in parameters), None)
    if style is None:
        raise UserError(
            f"reward.functions: {name}: signature not known: ({', '.join(parameters)}); use (messages, prompt, end), "
            "(data_source, solution_str, ground_truth, extra_info) or (prompts, completions, **columns)"
        )
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [] if any_keyword else [a for a in args if a not in parameters]
    if unknown:
        raise UserError([f"reward.functions: {name}: has no argument {a}" for a in unknown])
    return RewardFunction(function, style, None if any_keyword else frozenset(parameters), dict(args))


def read_verdict(result: Any) -> Verdict:
    """A number, a mapping with ``score`` (and ``acc``), or a ``Score``. Raises ``BadReward``."""
    if isinstance(result, Score):
        if not result.valid:
            raise BadReward("said that it is not valid")
        return Verdict(_number(result.value), _outcome(result.outcome, "outcome"), _numbers(result.parts))
    if isinstance(result, Mapping):
        if "score" not in result:
            raise BadReward("returned a mapping without score")
        outcome = next((_outcome(result[k], k) for k in _ACCURACY if k in result), None)
        rest = {k: v for k, v in result.items() if k != "score"}
        return Verdict(_number(result["score"]), outcome, _numbers(rest))
    return Verdict(_number(result))


def _number(value: Any, *, limit: float = MAX_REWARD) -> float:
    if isinstance(value, str | bytes) or value is None:
        raise BadReward(f"returned {'None' if value is None else type(value).__name__}")
    try:
        number = float(value)  # also numpy and torch scalars
    except OverflowError as error:
        raise BadReward(f"returned a number beyond {limit:g}") from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadReward(f"returned {type(value).__name__}") from error
    if not math.isfinite(number):
        raise BadReward("returned NaN" if math.isnan(number) else "returned infinity")
    if abs(number) > limit:
        raise BadReward(f"returned a number beyond {limit:g}")
    return number


def _outcome(value: Any, name: str) -> float:
    """A raw outcome: filters and success rates take it for a share of 1."""
    number = _number(value)
    if not -ROUNDING <= number <= 1.0 + ROUNDING:
        raise BadReward(f"returned {name} outside 0 to 1")
    return min(max(number, 0.0), 1.0)


def _numbers(parts: Mapping[Any, Any]) -> dict[str, float]:
    """The entries that are finite numbers; others (verl's ``pred`` text) are no reward."""
    numbers = {}
    for name, value in parts.items():
        try:
            numbers[str(name)] = _number(value, limit=MAX_PART)
        except BadReward:
            continue
    return numbers
