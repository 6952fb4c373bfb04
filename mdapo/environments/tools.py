"""Tools that a policy may call: plain functions, declared by their own signature.

    def forecast(city: Annotated[str, "Where"], days: Annotated[int, {"minimum": 1, "maximum": 7}] = 1) -> str:
        \"\"\"The weather of the next days.\"\"\"

Parameters are text, numbers, booleans, lists, mappings or a ``Literal``; ``Annotated`` adds a description (text) or any
keywords of JSON schema (a mapping). The first paragraph of the docstring describes the tool. A parameter ``prompt`` is
not the policy's: it gets the data row. What a tool returns is text, or JSON data that is written as such; what it
raises is told to the policy.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from mdapo import plugins
from mdapo.environments.calculator import CalculationError, calculate
from mdapo.environments.json_schema import declaration_problems
from mdapo.errors import UserError, shortened
from mdapo.types import Prompt

KEY = "environment.args.tools"
BUILTIN_TOOLS: dict[str, str] = {
    "calculator": "mdapo.environments.tools:calculator",
    "lookup": "mdapo.environments.tools:lookup",
}
MAX_WHY = 300  # characters of what a tool raised
_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    list: {"type": "array"},
    dict: {"type": "object", "additionalProperties": True},
    type(None): {"type": "null"},
}


@dataclass(frozen=True)
class Tool:
    """A function with what the policy is told of it. ``foreign``: not mdapo's own, and so to be run in a process that
    can be killed."""

    source: str  # the configured name
    function: Callable[..., Any]
    declaration: Mapping[str, Any]
    foreign: bool

    @property
    def name(self) -> str:
        return str(self.declaration["function"]["name"])

    def __call__(self, arguments: Mapping[str, Any], prompt: Prompt) -> str:
        """The answer as text. Raises whatever the function does, and ``TypeError`` for an answer that is no text."""
        row = {"prompt": prompt} if "prompt" in inspect.signature(self.function).parameters else {}
        return as_text(self.function(**arguments, **row))


def load_tool(source: str) -> Tool:
    """A built-in's name, ``pkg.mod:name`` or ``file.py:name``. ``UserError``: no such function, or none that can be
    declared."""
    function = plugins.load(source, builtin=BUILTIN_TOOLS)
    try:
        declaration = declare(function)
    except (TypeError, ValueError, NameError) as error:
        raise UserError(f"{KEY}: {source}: {error}") from error
    if problems := declaration_problems(declaration):
        raise UserError([f"{KEY}: {source}: {problem}" for problem in problems])
    return Tool(source, function, declaration, foreign=not BUILTIN_TOOLS.get(source, source).startswith("mdapo."))


def declare(function: Callable[..., Any]) -> dict[str, Any]:
    """The declaration that chat templates take. ``TypeError``: a parameter without a type, or one that JSON lacks."""
    hints = typing.get_type_hints(function, include_extras=True)
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "prompt":
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"parameter {name}: a tool is called by keyword, with parameters that have names")
        if name not in hints:
            raise TypeError(f"parameter {name}: needs a type, such as {name}: str")
        properties[name] = _schema(hints[name], name)
        if parameter.default is parameter.empty:
            required.append(name)
    described = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
    parameters = {"type": "object", "properties": properties, "required": required}
    name = getattr(function, "__name__", type(function).__name__)
    return {"type": "function", "function": {"name": name, "description": described, "parameters": parameters}}


def _schema(hint: Any, name: str) -> dict[str, Any]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        schema = _schema(inner[0], name)
        for note in inner[1:]:
            schema |= {"description": note} if isinstance(note, str) else note if isinstance(note, dict) else {}
        return schema
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(choice, name) for choice in inner]}
    if origin is list and inner:
        return {"type": "array", "items": _schema(inner[0], name)}
    plain = _PLAIN.get(origin or hint)
    if plain is None:
        raise TypeError(
            f"parameter {name}: {hint} is no type of JSON; there are str, int, float, bool, list, dict, Literal"
        )
    return dict(plain)


def as_text(value: Any) -> str:
    """Text as it is, JSON data as JSON. ``TypeError`` for all else, NaN and infinity among it."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"returned a {type(value).__name__} that is neither text nor JSON data") from error


def why_of(error: BaseException) -> str:
    """What a tool raised, for the policy to read."""
    told = str(error).strip()
    name = "" if type(error) is ValueError or isinstance(error, NotFound | CalculationError) else type(error).__name__
    return shortened(": ".join(part for part in (name, told) if part) or type(error).__name__, limit=MAX_WHY)


# ---- built in ------------------------------------------------------------------------------------------------------


class NotFound(ValueError):
    """The policy asked for what is not there."""


def calculator(expression: Annotated[str, "Arithmetic, such as (3 + 4) * 2 / 5"]) -> str:
    """Computes an arithmetic expression exactly: + - * / // % ^ and parentheses."""
    return calculate(expression)


def lookup(key: Annotated[str, "What to look up"], *, prompt: Prompt) -> str:
    """Looks something up by its name."""
    table = prompt.extra.get("table")
    if not isinstance(table, Mapping) or not all(isinstance(value, str | int | float) for value in table.values()):
        raise UserError(
            f"{prompt.uid}: table: the tool lookup needs a row with a table, an object of texts and numbers"
        )
    folded = {name.casefold().strip(): value for name, value in table.items()}
    wanted = key.casefold().strip()
    if wanted not in folded:
        raise NotFound(f"nothing is known of {shortened(key, limit=60)!r}; known are {', '.join(list(table)[:20])}")
    return str(folded[wanted])
