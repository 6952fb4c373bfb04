"""Schema errors in words: the key, what was found, what is expected, and the key that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from mdapo.config.problems import Problem
from mdapo.config.schema import Config
from mdapo.config.source import close

_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping of names to values",
    "model_type": "a section with keys of its own",
    "model_attributes_type": "a section with keys of its own",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class an annotation names, alone or as the entry of a list."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def keys_of(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of the schema by dotted path, sections included, with its pydantic field."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field
        inner = section_of(field.annotation)
        if inner is not None and inner is field.annotation:
            yield from keys_of(inner, f"{prefix}{name}.")


def describe(value: Any) -> str:
    """A value as people wrote it, short."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return f"{'text ' if isinstance(value, str) else ''}{text if len(text) <= 60 else text[:57] + '...'}"


def problems_of(error: ValidationError) -> list[Problem]:
    """One problem a schema error, in the schema's order, without pydantic's own words."""
    result = []
    for item in error.errors(include_url=False):
        key = ".".join(str(p) for p in item["loc"])
        keys = _required_in(key) if item["type"] == "missing" else [key]
        result += [Problem(k, _say(item)) for k in keys]
    return result


def _required_in(key: str) -> list[str]:
    """The keys that a missing section must hold; the key itself if it is none."""
    return [k for k, field in keys_of() if k.startswith(f"{key}.") and field.is_required()] or [key]


def _say(item: Mapping[str, Any]) -> str:
    kind, value, context = item["type"], item["input"], item.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown key" + _meant(item["loc"])
    if kind == "missing":
        return "must be set"
    if kind == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        near = close(value, choices) if isinstance(value, str) else None
        return f"must be one of {', '.join(choices)}, not {describe(value)}" + (
            f"; did you mean {near}?" if near else ""
        )
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"must be {words} {context[name]:g}, not {describe(value)}"
    if kind in ("too_short", "too_long", "missing_argument"):
        wanted = context.get("min_length", context.get("max_length"))
        return f"must have {wanted} entries, not {context.get('actual_length')}"
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}, not {describe(value)}"
    return f"{item['msg'][:1].lower()}{item['msg'][1:]}, not {describe(value)}"


def _meant(loc: Iterable[int | str]) -> str:
    """The nearest key beside the unknown one; else the same name, or a near one, anywhere."""
    parts = [str(p) for p in loc]
    section: Any = Config
    for part in parts[:-1]:
        if not part.isdecimal():  # the number of an entry: the list has told its section already
            section = section_of(section.model_fields[part].annotation)
    assert section is not None, "an unknown key stands in a section"
    near = close(parts[-1], section.model_fields)
    if near is not None:
        return f", did you mean {'.'.join([*parts[:-1], near])}?"
    names = [key for key, _ in keys_of()]
    same = [n for n in names if n.rsplit(".", 1)[-1] == parts[-1]]
    near = (same or [close(".".join(parts), names)])[0]
    return f", did you mean {near}?" if near else ""
