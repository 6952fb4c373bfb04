"""Plug-ins by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mdapo import plugins
from mdapo.environments import BUILTIN
from mdapo.errors import UserError


def problem(name: str, **args: object) -> str:
    with pytest.raises(UserError) as error:
        plugins.load(name, builtin=BUILTIN, **args)  # type: ignore[arg-type]
    (line,) = error.value.problems
    return line


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass\nclass Good:\n    prompt: object\n    seed: int\n    patience: int = 2\n\n"
        "def anything(**args): ...\n\ndef needs(prompt, seed, shop): ...\n\ndef lacks(prompt): ...\n\nnumber = 3\n"
    )
    return path


def test_a_short_name_a_module_and_a_file_all_lead_to_the_object(file: Path) -> None:
    built_in = plugins.load("single_turn", builtin=BUILTIN, required=("prompt", "seed"))
    assert plugins.load("mdapo.environments.single_turn:SingleTurn", builtin={}) is built_in
    mine = plugins.load(f"{file}:Good", builtin=BUILTIN, required=("prompt", "seed"), args={"patience": 1})
    assert mine(None, seed=1).seed == 1
    assert plugins.load(f"{file}:Good", builtin=BUILTIN) is mine, "a file is imported once"


def test_files_of_the_same_name_do_not_meet(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "sub" / "mine.py"
    other.parent.mkdir()
    other.write_text("class Good: ...\n")
    assert plugins.load(f"{other}:Good", builtin={}) is not plugins.load(f"{file}:Good", builtin={})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("customer_servise", "neither built-in nor pkg.mod:name nor file.py:name, did you mean customer_service?"),
        ("zzz", "built-in are customer_service, gsm8k, llm_user, single_turn, tool_use"),
        ("zzz:", "neither built-in"),
        (":zzz", "neither built-in"),
        ("no_such_package.mod:x", "no module 'no_such_package'"),
        ("mdapo.no_such_module:x", "no module 'mdapo.no_such_module'"),
        ("mdapo.environments.single_turn:SingelTurn", "has no SingelTurn, did you mean SingleTurn?"),
        ("nowhere/x.py:f", "plug-in 'nowhere/x.py:f': no such file"),
    ],
)
def test_a_name_that_leads_nowhere_is_told(name: str, says: str) -> None:
    assert says in problem(name)


def test_the_signature_is_checked_against_the_call(file: Path) -> None:
    assert "must be a class or a function, not int" in problem(f"{file}:number")
    lacks = problem(f"{file}:lacks", required=("prompt", "seed"))
    assert lacks.endswith("is called with prompt, seed; it lacks seed (its signature: (prompt))")
    needs = problem(f"{file}:needs", required=("prompt", "seed"), args={})
    assert "needs the argument shop" in needs
    plugins.load(f"{file}:needs", builtin={}, required=("prompt", "seed"), args={"shop"})
    plugins.load(f"{file}:needs", builtin={}, required=("prompt", "seed"))
    wrong = problem(f"{file}:Good", required=("prompt", "seed"), args={"patient": 3})
    assert "has no argument patient, did you mean patience?" in wrong
    plugins.load(f"{file}:anything", builtin={}, required=("prompt", "seed"), args={"x": 1})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\nraise RuntimeError('no licence')\n", "line 2: RuntimeError: no licence"),
        ("def f(:\n", "line 1: SyntaxError: "),
        ("import json\n\nimport no_such_thing\n", "line 3: ModuleNotFoundError: No module named 'no_such_thing'"),
        ("import json\njson.loads('{')\n", "line 2: JSONDecodeError"),
    ],
)
def test_a_module_that_fails_is_one_message_with_file_and_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    before = set(sys.modules)
    told = problem(f"{path}:f")
    assert f"plug-in '{path}:f': {says}" in told
    assert told.count("broken.py") == 1, "its file is named once"
    assert not [m for m in set(sys.modules) - before if m.startswith("mdapo_plugin_")]


def test_a_failure_in_another_file_names_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helper_of_it.py").write_text("x = 1 / 0\n")
    (tmp_path / "mine.py").write_text("import helper_of_it\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "mine.py"
    assert (
        problem(f"{path}:f") == f"plug-in '{path}:f': {tmp_path}/helper_of_it.py:1: ZeroDivisionError: division by zero"
    )
