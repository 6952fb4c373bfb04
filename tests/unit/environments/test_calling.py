"""A plug-in's environment is held to its contract: each breach is one message with its name, never a traceback."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from mdapo.config.schema import Plugin
from mdapo.environments.aside import Aside
from mdapo.environments.base import Observation
from mdapo.environments.calling import load_environment, openings_of
from mdapo.errors import UserError
from mdapo.types import Message, Prompt

PROMPT = Prompt(uid="p", row=0, messages=(Message("user", "3 + 4?"),), ground_truth="7")


class Says:
    """Returns what it is told to; calls it where it can be called."""

    result: Any = None

    def __init__(self, prompt: Prompt, *, seed: int) -> None:
        if Says.result is sys.exit:
            sys.exit(0)

    def opening(self) -> Any:
        return Says.result() if callable(Says.result) else Says.result

    observe = lambda self, messages: self.opening()  # noqa: E731


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    factory = load_environment(Plugin(name=f"{__name__}:Says"))

    def returning(result: Any) -> Any:
        monkeypatch.setattr(sys.modules[__name__].Says, "result", result)
        return factory(PROMPT, seed=0)

    return returning


def raising(error: BaseException) -> Any:
    def fail() -> None:
        raise error

    return fail


def user(text: Any = "x", role: Any = "user") -> Message:
    return Message(role, text)


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (None, "observe() returned None; expected an mdapo.environments.base.Observation"),
        ((user(),), "(tuple); expected an mdapo.environments.base.Observation"),
        (Observation(({"role": "user", "content": "x"},)), "(dict) among its messages; expected"),  # type: ignore[arg-type]
        (Observation(None), "expected an Observation whose messages"),  # type: ignore[arg-type]
        (Observation((user(role="assistant"),)), "expected messages of role system, user, tool"),
        (Observation((user(5),)), "returned 5 (int) among its messages; expected messages whose content is text"),
        (Observation((user("\ud800"),)), "'\\ud800' (str) among its messages; expected text without lone surrogates"),
        (Observation((user(),), "finished"), "'finished' (str); expected an Observation whose end is None or one of"),  # type: ignore[arg-type]
        (lambda: sys.exit(0), "observe() called sys.exit(0)"),
        (raising(asyncio.CancelledError()), "observe() raised CancelledError"),
        (raising(KeyboardInterrupt()), "observe() raised KeyboardInterrupt"),
        (raising(GeneratorExit()), "observe() raised GeneratorExit"),
        (raising(BaseExceptionGroup("two", [KeyboardInterrupt()])), "observe() raised BaseExceptionGroup"),
    ],
)
def test_an_observation_that_is_none_is_named_with_what_is_expected(make: Any, result: Any, says: str) -> None:
    with pytest.raises(UserError) as caught:
        make(result).observe([*PROMPT.messages, user("hi", "assistant")])
    (line,) = caught.value.problems
    assert line.startswith(f"environment.name={__name__}:Says: observe() ") and says in line, line


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (None, "returned None"),
        ((), "returned () (tuple); expected a sequence of one or more"),
        ([{"role": "user"}], "returned {'role': 'user'} (dict) among its messages"),
        ((user("\udfff"),), "lone surrogates"),
        ((user(role="robot"),), "expected messages of role system, user, assistant, tool"),
        (lambda: sys.exit(3), "opening() called sys.exit(3)"),
    ],
)
def test_an_opening_that_is_none_is_named_with_what_is_expected(make: Any, result: Any, says: str) -> None:
    with pytest.raises(UserError) as caught:
        make(result).opening()
    (line,) = caught.value.problems
    assert line.startswith(f"environment.name={__name__}:Says: opening() ") and says in line, line


def test_what_keeps_the_contract_is_passed_on(make: Any) -> None:
    assert make([user("a", "assistant"), user()]).opening() == (user("a", "assistant"), user())
    answer = Observation((user(role="tool"),), "gave_up")
    assert make(answer).observe(PROMPT.messages) == answer
    assert make(Observation()).observe(PROMPT.messages) == Observation()


def test_an_exit_in_the_constructor_is_named(make: Any) -> None:
    with pytest.raises(UserError, match=r"Says: the constructor called sys.exit\(0\)"):
        make(sys.exit)


def test_what_an_environment_raises_stays_its_own_except_for_a_row_that_it_refuses() -> None:
    factory = load_environment(Plugin(name="gsm8k"))
    bare = Prompt(uid="bare", row=0, messages=PROMPT.messages)
    with pytest.raises(ValueError, match="ground_truth") as raised:
        factory(bare, seed=0)
    assert not isinstance(raised.value, UserError)

    def openings(prompt: Prompt) -> list[tuple[Message, ...]]:
        return asyncio.run(openings_of(factory, "gsm8k", [prompt], seed=0, calls=Aside(), timeout_s=60.0))

    with pytest.raises(UserError, match=r"environment.name=gsm8k: refuses bare: bare: ground_truth must be"):
        openings(bare)
    assert openings(PROMPT) == [PROMPT.messages]


def test_arguments_that_it_does_not_take_are_named() -> None:
    with pytest.raises(UserError, match="has no argument zzz"):
        load_environment(Plugin(name="gsm8k", args={"zzz": 1}))


def test_an_exit_on_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(UserError, match=r"leaves.py:\w+.: line 2: called sys.exit\(0\) on import"):
        load_environment(Plugin(name=f"{tmp_path}/leaves.py:Env"))
