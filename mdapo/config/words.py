"""Schema errors in words: the key, what was found, what is expected, and the key that was probably meant."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from mdapo.config.foreign import ELSEWHERE, VERL
from mdapo.config.problems import Problem
from mdapo.config.schema import Config
from mdapo.config.source import close

NEAR = 0.72  # of difflib: "lrr" is lr, "max_tokens" is not max_turns
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
    result: list[Problem] = []
    choices: dict[str, list[str]] = {}  # what a key of several types may be
    for item in error.errors(include_url=False):
        key = _key(item["loc"])
        if item["type"] == "extra_forbidden":
            result += _unknown([str(p) for p in item["loc"]], item["input"])
        elif key != _dotted(item["loc"]):
            found = describe(item["input"])
            choices.setdefault(key, []).append(_say(item).removeprefix("must be ").removesuffix(f", not {found}"))
            wanted = ", or ".join(choices[key]).replace("one of ", "")
            result = [p for p in result if p.key != key]
            result.append(Problem(key, f"must be {wanted}, not {found}"))
        else:
            keys = _required_in(key) if item["type"] == "missing" else [key]
            result += [Problem(k, _say(item)) for k in keys]
    return result


def spoilt_by(error: ValidationError) -> set[str]:
    """The keys to take out so that the rest can be looked at."""
    return {_key(item["loc"]) for item in error.errors(include_url=False)}


def _key(loc: Sequence[int | str]) -> str:
    """The dotted key; pydantic puts the type it tried behind one that may be of several."""
    above = _dotted(loc[:-1])
    annotation = next((field.annotation for key, field in keys_of() if key == above), None)
    several = sum(kind is not type(None) for kind in get_args(annotation)) > 1
    return above if several and get_origin(annotation) in (Union, UnionType) else _dotted(loc)


def _dotted(loc: Iterable[int | str]) -> str:
    return ".".join(str(p) for p in loc)


def _required_in(key: str) -> list[str]:
    """The keys that a missing section must hold; the key itself if it is none."""
    return [k for k, field in keys_of() if k.startswith(f"{key}.") and field.is_required()] or [key]


def _say(item: Mapping[str, Any]) -> str:
    kind, value, context = item["type"], item["input"], item.get("ctx", {})
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
        return f"must be {words} {context[name]:.10g}, not {describe(value)}"
    if kind in ("too_short", "too_long", "missing_argument"):
        wanted = context.get("min_length", context.get("max_length"))
        return f"must have {wanted} entries, not {context.get('actual_length')}"
    if kind == "string_too_short":
        assert context["min_length"] == 1, "no text has another limit"
        return "must not be empty"
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}, not {describe(value)}"
    return f"{item['msg'][:1].lower()}{item['msg'][1:]}, not {describe(value)}"


def _unknown(parts: list[str], value: Any) -> list[Problem]:
    """One problem for an unknown key; for a section that another trainer has, one for each key in it that has a name
    here."""
    if isinstance(value, dict) and close(parts[-1], _beside(parts), cutoff=NEAR) is None:
        inner = [(keys, _meant(keys)) for keys in _leaves(value, parts)]
        if known := [Problem(_dotted(keys), f"unknown key, did you mean {meant}?") for keys, meant in inner if meant]:
            unknown = [Problem(_dotted(keys), "unknown key") for keys, meant in inner if not meant]
            return [*known, *unknown]
    meant = _meant(parts)
    return [Problem(_dotted(parts), "unknown key" + (f", did you mean {meant}?" if meant else ""))]


def _leaves(value: Any, parts: list[str]) -> Iterator[list[str]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, [*parts, name])
    else:
        yield parts


def _beside(parts: list[str]) -> Collection[str]:
    """The keys of the section that an unknown key stands in; none where the section is unknown too."""
    section: Any = Config
    for part in parts[:-1]:
        if not part.isdecimal():  # the number of an entry: the list has told its section already
            field = section.model_fields.get(part)
            section = section_of(field.annotation) if field is not None else None
            if section is None:
                return ()
    return section.model_fields


def _meant(parts: list[str]) -> str | None:
    """What an unknown key was probably meant to be: what it is called elsewhere, the same name in another section, the
    nearest name beside it, the nearest anywhere."""
    last, names = parts[-1], [key for key, _ in keys_of()]
    for start in range(len(parts) - 1):
        tail = _dotted(parts[start:])
        for theirs, ours in VERL.items():
            if theirs == tail or theirs.endswith(f".{tail}"):
                return ours
    if last in ELSEWHERE:
        return ELSEWHERE[last]
    if same := [name for name in names if name.rpartition(".")[2] == last]:
        return close(_dotted(parts), same, cutoff=0.0)
    if near := close(last, _beside(parts), cutoff=NEAR):
        return _dotted([*parts[:-1], near])
    theirs = {name.rpartition(".")[2]: ours for name, ours in VERL.items()} | ELSEWHERE
    ours = {name.rpartition(".")[2]: name for name in reversed(names)}
    known = theirs | ours
    return known.get(close(last, known, cutoff=NEAR) or "")
