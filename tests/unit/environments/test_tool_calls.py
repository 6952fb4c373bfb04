"""Calls in the text of a turn: what is one, what is told of what is none; and that no text whatever raises."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.data.chat import ChatFormat
from mdapo.environments.tool_calls import CLOSE, MAX_CALLS, MAX_DEPTH, OPEN, BadCall, Call, calls_in, outside_calls

from ..data import templates as t


def call(name: str = "f", **arguments: object) -> str:
    return f"{OPEN}{json.dumps({'name': name, 'arguments': arguments})}{CLOSE}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("The answer is 4.", []),
        (call(x=1), [Call("f", {"x": 1})]),
        (f"Let me see.\n{OPEN}\n{{\"name\": \"f\", \"arguments\": {{}}}}\n{CLOSE}\nDone.", [Call("f", {})]),
        (call("a") + "\n" + call("b", y=[1, 2]), [Call("a", {}), Call("b", {"y": [1, 2]})]),
        (f'{OPEN}{{"name": "f"}}{CLOSE}', [Call("f", {})]),
        (f'{OPEN}{{"name": "f", "arguments": "{{\\"x\\": 1}}"}}{CLOSE}', [Call("f", {"x": 1})]),
        (call(x=f"text with {CLOSE} and {OPEN} in it"), [Call("f", {"x": f"text with {CLOSE} and {OPEN} in it"})]),
        (f"<think>maybe {call('a')}</think>{call('b')}", [Call("b", {})]),
        (f"<think>maybe {call('a')}", []),
        (f"{call('a')}<think>{call('b')}", [Call("a", {})]),
        (call(x="é 漢字 \U0001f600"), [Call("f", {"x": "é 漢字 \U0001f600"})]),
    ],
)  # fmt: skip
def test_calls_are_found(text: str, found: list[Call]) -> None:
    assert calls_in(text) == found


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("calculator(1)", "not valid JSON"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN is no number of JSON"),
        ('{"name": "f", "arguments": {"x": 1e999}}', "a number is too large"),
        ('{"name": "f", "arguments": {"x": 1, "x": 2}}', "a key comes twice"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"name": "f", "arguments": {"x": ' + "[" * 20 + "]" * 20 + "}}", f"deeper than {MAX_DEPTH} levels"),
        ('["f"]', "a call is a JSON object"),
        ("7", "a call is a JSON object"),
        ('{"arguments": {}}', '"name" must be'),
        ('{"name": 5}', '"name" must be'),
        ('{"name": "f", "arguments": [1]}', '"arguments" must be a JSON object'),
        ('{"name": "f", "arguments": "no"}', '"arguments" must be a JSON object'),
        ('{"name": "f"} {"name": "g"}', "and nothing else"),
    ],
)
def test_what_is_none_is_told_why_and_the_next_call_is_found(body: str, why: str) -> None:
    bad, good = calls_in(f"{OPEN}{body}{CLOSE} {call('g')}")
    assert isinstance(bad, BadCall) and why in bad.why, bad
    assert good == Call("g", {})
    assert len(bad.why) < 200


def test_a_call_that_is_cut_is_told() -> None:
    (cut,) = calls_in(f'{OPEN}{{"name": "f", "arguments": {{}}}}')
    assert isinstance(cut, BadCall) and CLOSE in cut.why
    (cut,) = calls_in(f'{OPEN}{{"name": "f", "argum')
    assert isinstance(cut, BadCall) and "not valid JSON" in cut.why
    assert [type(c) for c in calls_in(f'{OPEN}{{"name": "f"{call("g")}')] == [BadCall, Call]


PIECES = [OPEN, CLOSE, "<think>", "</think>", '{"name": "f", "arguments": {', '"x": ', '"', "}", "}}", "[", "]", "\\",
          "\\ud800", "NaN", "1e999", "\n", " ", "é", "\ud800", "\x00", "text"]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=30).map("".join)))
def test_any_text_is_read_without_an_error(text: str) -> None:
    found = calls_in(text)
    assert len(found) <= text.count(OPEN)
    assert all(isinstance(c, BadCall) or (c.name and isinstance(c.arguments, dict)) for c in found)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), JSON, max_size=3)), max_size=4),
    st.sampled_from(["", "\n", " words "]),
    st.booleans(),
)
def test_any_calls_that_are_written_are_read_back(
    calls: list[tuple[str, dict]], between: str, ascii_only: bool
) -> None:
    text = between.join(
        f"{OPEN}\n{json.dumps({'name': n, 'arguments': a}, ensure_ascii=ascii_only)}\n{CLOSE}" for n, a in calls
    )
    if "</think>" not in text and "<think>" not in text:
        assert calls_in(text) == [Call(n, a) for n, a in calls]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 419), max_size=40))
def test_ids_of_any_turn_stay_as_they_were_whatever_is_read_in_their_text(ids: list[int]) -> None:
    """Case 18: the parser reads the decoded text; what is trained on is not made from it."""
    chat = ChatFormat.from_tokenizer(t.small_tokenizer(t.QWEN25))
    before = list(ids)
    calls_in(chat.decode(ids))
    assert ids == before


@pytest.mark.parametrize("body", ["", "[", '{"a":', '"', '["', '{"name": "f", "arguments": {"x": "'])
def test_a_turn_of_nothing_but_beginnings_is_not_read_to_its_end_each_time(body: str) -> None:
    found = calls_in((OPEN + body) * 20_000)
    assert len(found) <= MAX_CALLS + 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#### 4", "#### 4"),
        ("<think>#### 4</think>no", "no"),
        ("<think>#### 4", ""),
        (f"a {call('f', x='#### 4')} b", "a  b"),
        (f"{OPEN}#### 4{CLOSE} b", " b"),
    ],
)
def test_what_a_turn_says_is_neither_thought_nor_call(text: str, said: str) -> None:
    assert outside_calls(text) == said
