"""Tasks with tools: what is called, what is told, how it ends; and tools that misbehave cost bounded time and text."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mdapo.config.schema import Data, EnvironmentCfg
from mdapo.data.chat import ChatFormat
from mdapo.data.prompts import load_prompts
from mdapo.environments.base import Observation
from mdapo.environments.calling import Environments, load_environment
from mdapo.environments.json_schema import declaration_problems
from mdapo.environments.tool_use import NONE_LEFT
from mdapo.environments.tools import load_tool
from mdapo.errors import UserError
from mdapo.rewards.tool_use import tool_use as reward
from mdapo.types import Message, Prompt

from ..data import templates as t

FILE = Path(__file__).with_name("tools_for_tests.py")
PROMPT = Prompt("p", 0, (Message("user", "6 * 7?"),), ground_truth="42", extra={"note": "n", "table": {"Bread": 5}})


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def load(*tools: str, **args: Any) -> Environments:
    return load_environment(EnvironmentCfg(name="tool_use", args={"tools": list(tools), **args}))


def says(env: Any, text: str) -> Observation:
    return env.observe((*PROMPT.messages, Message("assistant", text)))


def told(env: Any, text: str) -> list[str]:
    answer = says(env, text)
    assert answer.end is None and {m.role for m in answer.messages} == {"tool"}
    return [m.content for m in answer.messages]


def error_of(text: str) -> str:
    (key,) = json.loads(text)
    assert key == "error"
    return str(json.loads(text)["error"])


def test_calls_are_answered_in_order_and_a_turn_without_one_is_the_end() -> None:
    env = load("calculator", "lookup")(PROMPT, seed=0)
    assert env.opening() == PROMPT.messages
    text = f"First {call('calculator', expression='6 * 7')} and {call('lookup', key='bread')}."
    assert told(env, text) == ["42", "5"]
    assert says(env, "It is 42.") == Observation(end="done")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (call("sqrt", x=4), "there is no function sqrt; there are calculator, lookup"),
        ("<tool_call>{oops}</tool_call>", "not valid JSON"),
        (call("calculator"), "calculator: expression: missing"),
        (call("calculator", expression=4), "calculator: expression: must be string, is integer"),
        (call("calculator", expression="1", verbose=True), "calculator: verbose: unknown; there are expression"),
        (call("calculator", expression="9**9**9"), "calculator: the result is too large"),
        (call("calculator", expression="1/0"), "calculator: division by zero"),
        (call("lookup", key="milk"), "nothing is known of 'milk'; known are Bread"),
        (call("x" * 10_000), "there is no function xxx"),
    ],
)
def test_what_goes_wrong_is_told_to_the_policy(text: str, why: str) -> None:
    env = load("calculator", "lookup")(PROMPT, seed=0)
    (answer,) = told(env, text)
    assert why in error_of(answer) and len(answer) < 400


def test_calls_are_counted_and_run_out() -> None:
    env = load("calculator", max_tool_calls=3)(PROMPT, seed=0)
    one = call("calculator", expression="1 + 1")
    assert told(env, one + "<tool_call>x</tool_call>")[0] == "2"  # one that is none counts too
    assert [a if a == "2" else error_of(a) for a in told(env, one * 5)] == ["2", NONE_LEFT]
    assert says(env, one) == Observation(end="gave_up")


def test_an_answer_may_be_marked() -> None:
    make = load("calculator", answer="####")
    assert says(make(PROMPT, seed=0), "#### 42") == Observation(end="done")
    env = make(PROMPT, seed=0)
    (reminder,) = says(env, "It is 42.").messages
    assert reminder.role == "user" and "####" in reminder.content
    assert says(env, "As I said.") == Observation(end="gave_up")
    assert says(make(PROMPT, seed=0), f"#### 42 {call('calculator', expression='1')}") == Observation(end="done")


def test_a_row_names_its_tools_or_declares_them_with_recorded_answers() -> None:
    make = load("calculator", "lookup")
    named = Prompt("p", 0, PROMPT.messages, extra={"tools": ["lookup"], "table": {}})
    assert [tool["function"]["name"] for tool in make(named, seed=0).tools] == ["lookup"]
    weather = {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}  # fmt: skip
    answers = [{"name": "weather", "arguments": {"city": "Bonn"}, "answer": {"sky": "grey"}}]
    for tools in ([weather, "calculator"], json.dumps([weather, "calculator"])):
        env = make(Prompt("p", 0, PROMPT.messages, extra={"tools": tools, "tool_answers": answers}), seed=0)
        assert [tool["function"]["name"] for tool in env.tools] == ["weather", "calculator"]
        text = "".join([call("weather", city="Bonn"), call("weather", city="Rome"), call("weather", town="Bonn")])
        first, second, third = told(env, text)
        assert json.loads(first) == {"sky": "grey"}
        assert error_of(second) == "weather: no answer is known for these arguments"
        assert "city: missing" in error_of(third)


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"tools": ["nothing"]}, "no tool 'nothing'; environment.args.tools has calculator"),
        ({"tools": ["calculator", "calculator"]}, "calculator comes twice"),
        ({"tools": 5}, "must be a list"),
        ({"tools": "["}, "neither a list nor JSON"),
        ({"tools": [{"name": "f"}]}, "a tool is declared as"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}]}, "not supported"),
        ({"tool_answers": [{"name": "f"}]}, "tool_answers: must be a list"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused(extra: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=r"^p: ") as caught:
        load("calculator")(Prompt("p", 0, PROMPT.messages, extra=extra), seed=0)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"tools": "calculator"}, "tools must be a list of names"),
        ({"tools": ["calculater"]}, "did you mean calculator?"),
        ({"tools": ["calculator", "calculator"]}, "two have the same name"),
        ({"tools": [f"{FILE}:untyped"]}, "parameter x: needs a type"),
        ({"tools": [f"{FILE}:odd"]}, "parameter x: <class 'set'> is no type of JSON"),
        ({"tools": [f"{FILE}:pattern"]}, "'pattern' is not supported"),
        ({"timeout_s": 0}, "timeout_s must be a number from 0.001"),
        ({"max_tool_calls": 2.5}, "max_tool_calls must be a number"),
        ({"workers": True}, "workers must be a number"),
        ({"max_observation_chars": 10}, "max_observation_chars must be a number from 80"),
        ({"answer": ""}, "answer must be a text"),
        ({"max_calls": 1}, "has no argument max_calls, did you mean max_tool_calls?"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(args: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError) as caught:
        load_environment(EnvironmentCfg(name="tool_use", args=args))
    assert why in str(caught.value)


def test_functions_declare_themselves() -> None:
    shout, choose = (load_tool(f"{FILE}:{name}") for name in ("shout", "choose"))
    assert shout.foreign and not load_tool("calculator").foreign
    assert shout.declaration["function"] == {
        "name": "shout",
        "description": "Says it loudly.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "What to shout"},
                "times": {"type": "integer", "minimum": 1, "maximum": 3},
            },
            "required": ["text"],
        },
    }
    properties = choose.declaration["function"]["parameters"]["properties"]
    assert properties["how"] == {"enum": ["fast", "slow"]}
    assert properties["many"] == {"type": "array", "items": {"type": "integer"}}
    assert properties["more"] == {"anyOf": [{"type": "string"}, {"type": "null"}]}
    for name in ("calculator", "lookup"):
        assert declaration_problems(load_tool(name).declaration) == []
    assert "prompt" not in load_tool("lookup").declaration["function"]["parameters"]["properties"]


@pytest.fixture(scope="module")
def foreign() -> Iterator[Environments]:
    names = [f"{FILE}:{name}" for name in ("shout", "choose", "row", "bad")]
    made = load(*names, workers=2, timeout_s=1.0, max_observation_chars=200, max_tool_calls=50)
    yield made
    made.close()


def test_foreign_tools_run_in_processes_and_get_the_row(foreign: Environments) -> None:
    assert foreign.pace == "waits"
    env = foreign(PROMPT, seed=0)
    text = "".join([call("shout", text="hi", times=2), call("row", word="a"), call("choose", how="fast", many=[1, 2])])
    loud, row, chosen = told(env, text)
    assert (loud, row) == ("HIHI", "a of p: n")
    assert json.loads(chosen) == {"how": "fast", "sum": 3, "more": None, "deep": {}}
    wrong = told(env, call("shout", text="x", times=9) + call("choose", how="no", many=["x"]))
    assert "times: must be at most 3, is 9" in error_of(wrong[0])
    assert "how: must be one of" in error_of(wrong[1]) and "many[0]: must be integer" in error_of(wrong[1])


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raise", "bad: the order is unknown"),
        ("raise other", "bad: KeyError: 'xxx"),
        ("exit", "bad: SystemExit: 0"),
        ("die", "bad: died"),
        ("hang", "bad: timed out"),
        ("bytes", "bad: TypeError: returned a bytes that is neither text nor JSON data"),
        ("nan", "returned a float that is neither text nor JSON data"),
        ("object", "returned a object"),
    ],
)
def test_a_tool_that_fails_is_told_and_the_next_call_works(foreign: Environments, how: str, says: str) -> None:
    env = foreign(PROMPT, seed=0)
    answer, after = told(env, call("bad", how=how) + call("shout", text="on"))
    assert says in error_of(answer) and len(answer) <= 200
    assert after == "ON"


def test_what_else_a_tool_returns_is_bounded_text(foreign: Environments) -> None:
    env = foreign(PROMPT, seed=0)
    found = {
        how: told(env, call("bad", how=how))[0] for how in ("none", "number", "print", "fork", "long", "surrogate")
    }
    assert found["none"] == "null" and found["number"] == "4.5"
    assert found["print"] == "the real one" and found["fork"] == "the parent"
    assert len(found["long"]) == 200 and found["long"].endswith("[cut: 10000000 characters]")
    assert found["surrogate"] == "a?b\ufffd"


def test_a_tool_that_hangs_leaves_no_process_behind(foreign: Environments) -> None:
    def below() -> list[psutil.Process]:
        return [p for p in psutil.Process(os.getpid()).children(recursive=True) if "sleep" in p.name()]

    told(foreign(PROMPT, seed=0), call("bad", how="hang"))
    assert below() == []


def test_tools_of_many_dialogues_run_at_the_same_time() -> None:
    made = load(f"{FILE}:bad", f"{FILE}:shout", workers=4, timeout_s=3.0)
    try:
        envs = [made(PROMPT, seed=0) for _ in range(4)]

        async def main() -> list[Observation]:
            calls = made.calls(EnvironmentCfg())
            texts = [call("shout", text=str(i)) + call("bad", how="hang") for i in range(4)]
            work = [calls.call(lambda e=e, x=x: says(e, x)) for e, x in zip(envs, texts, strict=True)]
            return await asyncio.gather(*work)

        started = time.monotonic()
        found = asyncio.run(main())
        assert time.monotonic() - started < 12.0, "one after the other would take four deadlines"
        assert [o.messages[0].content for o in found] == ["0", "1", "2", "3"]
    finally:
        made.close()


def test_processes_end_with_the_run() -> None:
    before = set(psutil.Process().children(recursive=True))
    made = load(f"{FILE}:shout", workers=2)
    started = set(psutil.Process().children(recursive=True)) - before
    assert len(started) == 2
    made.close()
    gone, alive = psutil.wait_procs(started, timeout=30)
    assert len(gone) == 2 and not alive


def test_shipped_rows_can_be_solved_with_their_tools() -> None:
    """Each row's numbers are right: the answer follows from its tools alone."""
    asked: list[set[str]] = []
    for name in ("train", "test"):
        rows = load_prompts([f"package:tool_use_{name}.jsonl"], Data(train_files=["x"]))
        make = load("calculator", "lookup", answer="####")
        for prompt in rows:
            env = make(prompt, seed=0)
            names = [tool["function"]["name"] for tool in env.tools]
            assert set(names) <= {"calculator", "lookup"} and names
            if "lookup" in names:
                keys = [k for k in prompt.extra["table"] if f"the {k}" in prompt.messages[0].content]
                prices = [int(told(env, call("lookup", key=key))[0]) for key in keys]
                assert prices, prompt.uid
                if names == ["lookup"]:
                    assert prices == [int(prompt.ground_truth)]
        asked.append({prompt.messages[0].content for prompt in rows})
    assert not asked[0] & asked[1]


def test_the_reward_counts_calls_and_errors_and_asks_for_a_marked_answer() -> None:
    talk = (*PROMPT.messages, Message("assistant", call("f")), Message("tool", '{"error": "no f"}'),
            Message("assistant", "x"), Message("tool", "42"), Message("assistant", "So:\n#### 42"))  # fmt: skip
    score = reward(talk, PROMPT, "done")
    assert (score.value, score.outcome) == (1.0, 1.0)
    assert (score.parts["tool_answers"], score.parts["tool_errors"]) == (2.0, 1.0)
    assert reward((*talk[:-1], Message("assistant", "42")), PROMPT, "done").value == 0.0
    assert reward((*talk, Message("assistant", "#### 41")), PROMPT, "done").value == 0.0


@pytest.mark.parametrize("template", [t.WITH_TOOLS, t.QWEN25, t.SMOLLM2, t.LLAMA3])
def test_a_dialogue_with_tools_keeps_the_engines_ids_and_renders_all_else(template: str) -> None:
    """Cases 17 and 18: a turn with a call stays as it was written, whatever way of writing JSON the policy has; the
    separators come with the tools' answers."""
    chat = ChatFormat.from_tokenizer(t.small_tokenizer(template))
    env = load("calculator")(PROMPT, seed=0)
    ids = chat.prompt_ids(env.opening(), tools=env.tools)
    written = '<tool_call>\n{"arguments" :{ "expression":"6*7"},"name":"calculator"}\n</tool_call>'
    turn = [*chat.tokenizer(written, add_special_tokens=False).input_ids, chat.stop_ids[0]]
    answer = says(env, chat.decode(turn))
    assert [m.content for m in answer.messages] == ["42"]
    whole = [*ids, *turn, *chat.observation_ids(answer.messages, after_stop=True)]
    assert whole[len(ids) : len(ids) + len(turn)] == turn
    rows = [*env.opening(), Message("assistant", written), *answer.messages]
    assert whole == chat.prompt_ids(rows, tools=env.tools)
