"""The part of JSON schema that function declarations are written in, checked without recursion into anything unbounded.

A keyword that is not checked here is refused where the declaration is read, never ignored: a promise to the model that
nobody holds would be a trap. Left out on purpose: ``pattern`` (a regular expression of others may take for ever) and
``$ref``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 16  # levels of a schema, and so of the arguments it describes
MAX_TOLD = 5  # violations told at once
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_SIZES = ("minLength", "maxLength", "minItems", "maxItems")
_NOTES = frozenset({"title", "description", "default", "examples", "format", "$schema", "deprecated"})
_KNOWN = frozenset({"type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf"})
_KEYWORDS = _KNOWN | _NOTES | {*_NUMBERS, *_SIZES}


def declaration_problems(tool: Any) -> list[str]:
    """What is wrong with ``{"type": "function", "function": {"name", "description", "parameters"}}``, if anything."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
        return ['a tool is declared as {"type": "function", "function": {"name": ..., "parameters": ...}}']
    function = tool["function"]
    name, parameters = function.get("name"), function.get("parameters", {})
    if not isinstance(name, str) or not name.isidentifier() or not name.isascii():
        return [f"a tool's name is letters, digits and _, not {name!r:.60}"]
    if not isinstance(function.get("description", ""), str):
        return [f"{name}: description must be text"]
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        return [f"{name}: parameters must be a JSON schema of type object"]
    return [f"{name}: {problem}" for problem in _schema_problems(parameters, "parameters", 0)]


def violations(value: Any, schema: Mapping[str, Any], where: str = "") -> list[str]:
    """Where ``value`` is not what ``schema`` (checked by `declaration_problems`) asks for, at most ``MAX_TOLD`` lines.
    Stricter than JSON schema in one thing: keys that are not declared need ``additionalProperties``."""
    found = []
    for problem in _violations(value, schema, where):
        found.append(problem)
        if len(found) == MAX_TOLD:
            break
    return found


def _schema_problems(schema: Any, where: str, depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        yield f"{where}: must be an object"
        return
    if depth > MAX_DEPTH:
        yield f"{where}: deeper than {MAX_DEPTH} levels"
        return
    for key in schema:
        if key not in _KEYWORDS:
            yield f"{where}: {key!r:.60} is not supported; there are {', '.join(sorted(_KEYWORDS - _NOTES))}"
    types = schema.get("type", [])
    for name in [types] if isinstance(types, str) else types if isinstance(types, list) else [None]:
        if not isinstance(name, str) or name not in _TYPES:
            yield f"{where}.type: must be one or a list of {', '.join(_TYPES)}"
    for key in _NUMBERS + _SIZES:
        if key in schema and (isinstance(schema[key], bool) or not isinstance(schema[key], int | float)):
            yield f"{where}.{key}: must be a number"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        yield f"{where}.required: must be a list of names"
    if not isinstance(schema.get("enum", []), list):
        yield f"{where}.enum: must be a list"
    yield from _inner_problems(schema, where, depth)


def _inner_problems(schema: Mapping[str, Any], where: str, depth: int) -> Iterator[str]:
    properties, choices = schema.get("properties", {}), schema.get("anyOf", [])
    if not isinstance(properties, Mapping) or not all(isinstance(name, str) for name in properties):
        yield f"{where}.properties: must be an object"
        properties = {}
    if not isinstance(choices, list):
        yield f"{where}.anyOf: must be a list"
        choices = []
    for name, inner in properties.items():
        yield from _schema_problems(inner, f"{where}.{name:.60}", depth + 1)
    for inner in choices:
        yield from _schema_problems(inner, f"{where}.anyOf", depth + 1)
    if "items" in schema:
        yield from _schema_problems(schema["items"], f"{where}.items", depth + 1)
    if not isinstance(more := schema.get("additionalProperties", False), bool):
        yield from _schema_problems(more, f"{where}.additionalProperties", depth + 1)


def _violations(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(_is(value, name) for name in types):
        yield f"{where or 'arguments'}: must be {' or '.join(types)}, is {_kind(value)}"
        return
    if "enum" in schema and not any(_same(value, choice) for choice in schema["enum"]):
        yield f"{where}: must be one of {_shown(schema['enum'])}, is {_shown(value)}"
    if "const" in schema and not _same(value, schema["const"]):
        yield f"{where}: must be {_shown(schema['const'])}, is {_shown(value)}"
    choices = schema.get("anyOf", [])
    if choices and all(next(_violations(value, inner, where), None) is not None for inner in choices):
        yield f"{where}: is none of what is allowed here"
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield from _number(value, schema, where)
    elif isinstance(value, str):
        yield from _size(len(value), schema, where, "Length", "characters")
    elif isinstance(value, list):
        yield from _size(len(value), schema, where, "Items", "items")
        for i, item in enumerate(value if "items" in schema else []):
            yield from _violations(item, schema["items"], f"{where}[{i}]")
    elif isinstance(value, dict):
        yield from _object(value, schema, where)


def _object(value: dict[str, Any], schema: Mapping[str, Any], where: str) -> Iterator[str]:
    properties, more = schema.get("properties", {}), schema.get("additionalProperties", False)
    prefix = f"{where}." if where else ""
    for name in schema.get("required", []):
        if name not in value:
            yield f"{prefix}{name}: missing"
    for name, item in value.items():
        if name in properties:
            yield from _violations(item, properties[name], f"{prefix}{name}")
        elif isinstance(more, Mapping):
            yield from _violations(item, more, f"{prefix}{name:.60}")
        elif not more and ("properties" in schema or not where):
            yield f"{prefix}{name:.60}: unknown; there are {', '.join(properties) or 'none'}"


def _number(value: float, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    if "minimum" in schema and value < schema["minimum"]:
        yield f"{where}: must be at least {schema['minimum']}, is {_shown(value)}"
    if "maximum" in schema and value > schema["maximum"]:
        yield f"{where}: must be at most {schema['maximum']}, is {_shown(value)}"
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        yield f"{where}: must be more than {schema['exclusiveMinimum']}, is {_shown(value)}"
    if "exclusiveMaximum" in schema and value >= schema["exclusiveMaximum"]:
        yield f"{where}: must be less than {schema['exclusiveMaximum']}, is {_shown(value)}"


def _size(size: int, schema: Mapping[str, Any], where: str, what: str, unit: str) -> Iterator[str]:
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    if size < least:
        yield f"{where}: must have at least {least} {unit}, has {size}"
    if most is not None and size > most:
        yield f"{where}: must have at most {most} {unit}, has {size}"


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _same(a: Any, b: Any) -> bool:
    """Equal as JSON: true is not 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _kind(value: Any) -> str:
    return next(name for name in _TYPES if _is(value, name))


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
