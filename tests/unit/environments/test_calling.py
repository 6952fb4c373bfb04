"""A plug-in's environment is held to its contract: each breach is one message with its name, never a traceback."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mdapo.config.schema import EnvironmentCfg, Plugin
from mdapo.environments.aside import Aside
from mdapo.environments.base import Observation, Resumable
from mdapo.environments.calling import Opening, load_environment, openings_of
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

    def openings(prompt: Prompt) -> list[Opening]:
        return asyncio.run(openings_of(factory, "gsm8k", [prompt], seed=0, calls=Aside(), timeout_s=60.0))

    with pytest.raises(UserError, match=r"environment.name=gsm8k: refuses bare: bare: ground_truth must be"):
        openings(bare)
    assert openings(PROMPT) == [Opening(PROMPT.messages)]


def test_arguments_that_it_does_not_take_are_named() -> None:
    with pytest.raises(UserError, match="has no argument zzz"):
        load_environment(Plugin(name="gsm8k", args={"zzz": 1}))


def test_an_exit_on_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(UserError, match=r"leaves.py:\w+.: line 2: called sys.exit\(0\) on import"):
        load_environment(Plugin(name=f"{tmp_path}/leaves.py:Env"))


class Shared:
    """Made by a factory that is made once a run."""

    made: ClassVar[list[str]] = []

    @classmethod
    def for_run(cls, *, word: str = "a") -> Shared:
        if word == "bad":
            raise ValueError("word: not that one")
        if word == "exit":
            sys.exit(0)
        cls.made.append(word)
        return cls()

    def __init__(self, prompt: Prompt | None = None, *, seed: int = 0, word: str = "") -> None:
        self.opened = 0

    def __call__(self, prompt: Prompt, *, seed: int) -> Any:
        self.opened += 1
        return Says(prompt, seed=seed)

    def close(self) -> None:
        self.made.append("closed")


def test_what_environments_share_is_made_once_a_run_and_closed() -> None:
    name = f"{__name__}:Shared"
    made = sys.modules[__name__].Shared.made
    environments = load_environment(Plugin(name=name, args={"word": "b"}))
    assert made == ["b"]
    for seed in range(3):
        environments(PROMPT, seed=seed)
    environments.close()
    assert made == ["b", "closed"]
    with pytest.raises(UserError, match=r"environment.args: .*Shared: word: not that one"):
        load_environment(Plugin(name=name, args={"word": "bad"}))
    with pytest.raises(UserError, match=r"for_run\(\) called sys.exit"):
        load_environment(Plugin(name=name, args={"word": "exit"}))


class Later(Says):
    """Answers in a coroutine."""

    async def observe(self, messages: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return self.opening()


def later(monkeypatch: pytest.MonkeyPatch, result: Any) -> Any:
    environments = load_environment(Plugin(name=f"{__name__}:Later"))
    assert environments.pace == "waits"
    monkeypatch.setattr(sys.modules[__name__].Says, "result", result)
    env = environments(PROMPT, seed=0)
    calls = environments.calls(EnvironmentCfg(timeout_s=60.0))
    return asyncio.run(calls.call(lambda: env.observe(PROMPT.messages)))


def test_an_answer_that_comes_later_is_held_to_the_same_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    assert later(monkeypatch, Observation((user(),))) == Observation((user(),))
    with pytest.raises(UserError, match=r"observe\(\) returned None; expected an mdapo"):
        later(monkeypatch, None)
    with pytest.raises(UserError, match=r"observe\(\) raised CancelledError"):
        later(monkeypatch, raising(asyncio.CancelledError()))
    with pytest.raises(UserError, match=r"observe\(\) called sys.exit\(3\)"):
        later(monkeypatch, raising(SystemExit(3)))
    with pytest.raises(ConnectionError):
        later(monkeypatch, raising(ConnectionError()))


class TakesUp(Says):
    """Goes on from messages, with what ``Says.result`` does."""

    def resume(self, messages: Any) -> Any:
        return self.opening()


class TakesUpLater(TakesUp):
    async def resume(self, messages: Any) -> Any:
        await asyncio.sleep(0)
        return self.opening()


@pytest.mark.parametrize("kind", ["TakesUp", "TakesUpLater"])
def test_what_goes_on_from_messages_is_held_to_its_contract(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    environments = load_environment(Plugin(name=f"{__name__}:{kind}"))

    def resume(result: Any) -> None:
        monkeypatch.setattr(sys.modules[__name__].Says, "result", result)
        env: Any = environments(PROMPT, seed=0)
        assert isinstance(env, Resumable)
        calls = environments.calls(EnvironmentCfg(timeout_s=60.0))
        asyncio.run(calls.call(lambda: env.resume(PROMPT.messages)))
        calls.close()

    resume(lambda: None)
    with pytest.raises(UserError, match=r"resume\(\) returned False \(bool\); expected None"):
        resume(lambda: False)
    with pytest.raises(UserError, match=r"resume\(\) called sys.exit\(3\)"):
        resume(raising(SystemExit(3)))
    with pytest.raises(UserError, match=r"resume\(\) raised CancelledError"):
        resume(raising(asyncio.CancelledError()))
    with pytest.raises(ConnectionError):
        resume(raising(ConnectionError()))


def test_an_environment_that_cannot_go_on_from_messages_does_not_seem_to() -> None:
    assert not isinstance(load_environment(Plugin(name=f"{__name__}:Says"))(PROMPT, seed=0), Resumable)


def test_mdapos_own_environments_are_called_in_the_event_loop_others_are_not() -> None:
    assert {load_environment(Plugin(name=name)).pace for name in ("single_turn", "gsm8k", "customer_service")} == {
        "inline"
    }
    assert load_environment(Plugin(name=f"{__name__}:Says")).pace == "quick"


@pytest.mark.parametrize("tools", ["f", [{"name": "f"}], [{"type": "function", "function": {"name": "no name"}}]])
def test_tools_that_are_none_are_named(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = load_environment(Plugin(name=f"{__name__}:Says"))
    monkeypatch.setattr(sys.modules[__name__].Says, "tools", tools, raising=False)
    with pytest.raises(UserError, match=f"environment.name={__name__}:Says: tools"):
        _ = environment(PROMPT, seed=0).tools


def test_the_first_row_that_is_refused_is_named_whatever_comes_back_first(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text(
        "import time\nfrom mdapo.environments.base import Observation\n"
        "class Env:\n    waits = True\n    def __init__(self, prompt, *, seed): self.prompt = prompt\n"
        "    def opening(self):\n        n = self.prompt.row\n        time.sleep(0.2 if n == 1 else 0.0)\n"
        "        if n in (1, 2): raise ValueError(f'no {n}')\n        return self.prompt.messages\n"
        "    def observe(self, messages): ...\n",
        encoding="utf-8",
    )
    environments = load_environment(Plugin(name=f"{file}:Env"))
    calls = environments.calls(EnvironmentCfg())
    rows = [Prompt(f"r{i}", i, PROMPT.messages) for i in (0, 1, 2, 3)]
    with pytest.raises(UserError, match="refuses r1: no 1"):
        asyncio.run(openings_of(environments, "slow", rows, seed=0, calls=calls, timeout_s=60.0))
    rows = [Prompt(f"r{i}", i, (user(f"{i}"),)) for i in range(3, 40)]
    found = asyncio.run(openings_of(environments, "slow", rows, seed=0, calls=calls, timeout_s=60.0))
    assert [o.messages[0].content for o in found] == [str(i) for i in range(3, 40)]
