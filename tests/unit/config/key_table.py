"""Every key of the schema as a row: key, type in words, default. What ``configs/README.md`` is held against."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mdapo.config.words import keys_of, section_of


def rows() -> Iterator[tuple[str, str, str]]:
    """(dotted key, type in words, default as code) of every key that is not itself a section."""
    for key, field in keys_of():
        if section_of(field.annotation) is not field.annotation:
            yield key, words(field.annotation, list(field.metadata)), default(field)


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "(must be set)"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{json.dumps(value)}`"


def words(annotation: Any, bounds: list[Any]) -> str:
    """``Annotated[int, Field(ge=1)]`` -> ``whole number >= 1``."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return words(inner, [m for part in more for m in getattr(part, "metadata", [part])] + bounds)
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join("null" if a is type(None) else words(a, bounds) for a in get_args(annotation))
    if get_origin(annotation) is Literal:
        return " / ".join(f"`{a}`" for a in get_args(annotation))
    if get_origin(annotation) is list:
        (inner,) = get_args(annotation)
        return "list of " + words(inner, [])
    if get_origin(annotation) is tuple:
        return "list of two numbers"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "`{" + ", ".join(annotation.model_fields) + "}`"
    limits = [f" {sign} {getattr(b, name):.10g}" for b in bounds for name, sign in SIGNS.items() if hasattr(b, name)]
    return KINDS[get_origin(annotation) or annotation] + ",".join(limits)


SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
KINDS = {int: "whole number", float: "number", bool: "true / false", str: "text", dict: "mapping"}
