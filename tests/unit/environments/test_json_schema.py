"""The part of JSON schema that declarations use: what is refused in a schema, and what breaks one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.environments.json_schema import MAX_TOLD, declaration_problems, violations


def declare(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **parameters}}}


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        (None, "a tool is declared as"),
        ({"type": "function"}, "a tool is declared as"),
        ({"type": "function", "function": {"name": "no name"}}, "name is letters"),
        ({"type": "function", "function": {"name": "f", "description": 5}}, "description must be text"),
        ({"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}, "of type object"),
        (declare(properties={"x": {"type": "text"}}), "parameters.x.type: must be one"),
        (declare(properties={"x": {"type": ["string", 5]}}), "parameters.x.type: must be one"),
        (declare(properties={"x": {"pattern": "a"}}), "'pattern' is not supported"),
        (declare(properties={"x": {"$ref": "#"}}), "'$ref' is not supported"),
        (declare(properties={"x": {"minimum": "1"}}), "parameters.x.minimum: must be a number"),
        (declare(properties={"x": {"enum": "a"}}), "parameters.x.enum: must be a list"),
        (declare(properties=[]), "properties: must be an object"),
        (declare(required="x"), "required: must be a list"),
        (declare(properties={"x": {"items": 5}}), "parameters.x.items: must be an object"),
        (declare(properties={"x": {"anyOf": [{"type": "x"}]}}), "parameters.x.anyOf.type"),
    ],
)
def test_a_declaration_that_could_not_be_held_is_refused(tool: Any, problem: str) -> None:
    assert any(problem in found for found in declaration_problems(tool)), declaration_problems(tool)


def test_a_schema_that_is_too_deep_is_refused() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(100):
        deep = {"type": "array", "items": deep}
    assert any("deeper than" in p for p in declaration_problems(declare(properties={"x": deep})))


@pytest.mark.parametrize(
    ("schema", "good", "bad", "why"),
    [
        ({"type": "string"}, "a", 1, "x: must be string, is integer"),
        ({"type": "integer"}, 2.0, 2.5, "x: must be integer, is number"),
        ({"type": "integer"}, 2, True, "x: must be integer, is boolean"),
        ({"type": "number"}, 2.5, "2", "x: must be number, is string"),
        ({"type": ["string", "null"]}, None, 1, "x: must be string or null"),
        ({"enum": ["a", 1]}, 1, True, 'x: must be one of ["a", 1], is true'),
        ({"const": 3}, 3, 4, "x: must be 3, is 4"),
        ({"minimum": 1, "maximum": 3}, 3, 4, "x: must be at most 3, is 4"),
        ({"exclusiveMinimum": 1}, 2, 1, "x: must be more than 1"),
        ({"exclusiveMaximum": 1}, 0, 1, "x: must be less than 1"),
        ({"type": "string", "minLength": 2}, "ab", "a", "x: must have at least 2 characters, has 1"),
        ({"type": "array", "maxItems": 1}, [1], [1, 2], "x: must have at most 1 items, has 2"),
        ({"type": "array", "items": {"type": "string"}}, ["a"], ["a", 1], "x[1]: must be string"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, None, 1, "x: is none of what is allowed"),
        ({"type": "object", "properties": {"y": {}}, "required": ["y"]}, {"y": "a"}, {}, "x.y: missing"),
        ({"type": "object", "properties": {}}, {}, {"z": 1}, "x.z: unknown; there are none"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"z": 1}, {"z": "a"}, "x.z: must be integer"),
        ({"type": "object", "additionalProperties": True}, {"z": [1]}, 1, "x: must be object"),
    ],
)  # fmt: skip
def test_values_are_checked(schema: dict[str, Any], good: Any, bad: Any, why: str) -> None:
    parameters = declare(properties={"x": schema})["function"]["parameters"]
    assert declaration_problems(declare(properties={"x": schema})) == []
    assert violations({"x": good}, parameters) == []
    assert any(why in found for found in violations({"x": bad}, parameters)), violations({"x": bad}, parameters)


def test_few_violations_are_told() -> None:
    parameters = declare(properties={"x": {"type": "array", "items": {"type": "string"}}})["function"]["parameters"]
    assert len(violations({"x": list(range(100_000))}, parameters)) == MAX_TOLD


PLAIN = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3)
KEYS = st.sampled_from(["type", "properties", "items", "enum", "required", "x", "anyOf", "minimum"])
JSON = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=12
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(["type", "properties", "required", "items", "enum"]), JSON), JSON)
def test_a_schema_that_is_accepted_can_check_anything(schema: dict[str, Any], value: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    if not declaration_problems(tool):
        assert all(isinstance(v, str) for v in violations(value, schema))
