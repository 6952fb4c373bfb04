"""YAML subset, base files, overrides."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mdapo.config.load import SECTIONS
from mdapo.config.source import Dumper, Tree, apply_overrides, read_file
from mdapo.errors import UserError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str | bytes, name: str = "x.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def read(path: Path, *overrides: str) -> Tree:
    tree = read_file(path, sections=SECTIONS)
    apply_overrides(tree, overrides, sections=SECTIONS)
    return tree


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as error:
        read(path, *overrides)
    return error.value.problems


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("0x10", 16),
        ("010", 10),
        ("-7", -7),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("yes", "yes"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"),
        (".inf", ".inf"),
        ("1e", "1e"),
        ("'1'", "1"),
        ("[1, 2.5, a]", [1, 2.5, "a"]),
        ("{a: 1}", {"a": 1}),
    ],
)
def test_plain_values_are_read_as_in_yaml_1_2(write: Write, text: str, value: Any) -> None:
    found = read(write(f"run: {{name: x}}\nactor: {{lr: {text}}}\n")).data["actor"]["lr"]
    assert found == value
    assert type(found) is type(value)
    overridden = read(write("run: {name: x}"), f"actor.lr={text}").data["actor"]["lr"]
    assert overridden == value
    assert type(overridden) is type(value)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**30), 10**30)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),  # NUL is refused: see below
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=8,
    )
)
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.mktemp("y") / "x.yaml"
    path.write_text(yaml.dump({"a": value}, Dumper=Dumper, allow_unicode=True), encoding="utf-8")
    assert read(path).data == {"a": value}


def test_every_key_knows_its_line(write: Write) -> None:
    path = write("run:\n  name: x\n\ndata:\n  train_files:\n    - a\n    - b\n")
    places = read(path).places
    assert places["run.name"] == f"{path}:2"
    assert places["data.train_files.1"] == f"{path}:7"


def test_a_key_that_is_set_twice_names_both_lines(write: Write) -> None:
    path = write("run:\n  seed: 1\n  name: x\n  seed: 2\nrun:\n  name: y\n")
    assert problems(path) == [
        f"run.seed: set twice, first in line 2 ({path}:4)",
        f"run: set twice, first in line 1 ({path}:5)",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run: [1", "x.yaml:1: not valid YAML"),
        ("run:\n\tseed: 1", "x.yaml:2: not valid YAML"),
        ("a: &x 1\nb: *x", "anchors and aliases are not used"),
        ("a: !!python/object/apply:os.system [ls]", "tags such as tag:yaml.org,2002:python/object/apply:os.system"),
        ("a: !!float 1", "tags such as"),
        ("1: x", "top level: a key must be a name, not the number 1 ("),
        ("run:\n  ~: x", "run: a key must be a name, not nothing (null) ("),
        ("? [a, b]\n: x", "top level: a key must be a name, not a list ("),
        ("? {a: b}\n: x", "top level: a key must be a name, not a mapping ("),
        ("True: x", "top level: a key must be a name, not true ("),
        ("'': x", "top level: a key must be a name, not an empty text ("),
        ("a..b: x", "top level: a key must be a name, not text 'a..b' ("),
        ('"a\\tb": x', "top level: a key must be a name, not text 'a\\tb' ("),
        ("run.seed: 1", "run.seed: no dots in a file's keys; write run: {seed: ...} ("),
        ("- a\n- b", "must hold sections with keys, not list"),
        ("just text", "must hold sections with keys, not str"),
        ("a: " + "9" * 50, "a: a number of 50 digits"),
        ("a: 1\n---\nb: 1", "not valid YAML"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"a: \x00", "not valid YAML"),
        ("[" * 1500, "x.yaml: nested too deeply"),
    ],
)
def test_what_is_not_ours_is_refused_with_a_message(write: Write, text: str | bytes, says: str) -> None:
    (problem, *_) = problems(write(text))
    assert says in problem


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_is_an_empty_configuration(write: Write, text: str) -> None:
    assert read(write(text)).data == {}


def test_a_byte_order_mark_is_no_part_of_a_key(write: Write) -> None:
    assert read(write(b"\xef\xbb\xbfrun: {seed: 1}")).data == {"run": {"seed": 1}}


def test_a_missing_file_is_named_with_its_neighbour(write: Write) -> None:
    path = write("run: {}", "quickstart.yaml")
    assert problems(path.with_name("quikstart.yaml")) == [
        f"{path.with_name('quikstart.yaml')}: no such file, did you mean {path}?"
    ]
    (problem,) = problems(path.parent)
    assert "cannot be read" in problem


def test_base_files_lie_below_in_order_and_lists_are_replaced(write: Write) -> None:
    write("run: {seed: 1, name: a}\ndata: {train_files: [a, b]}\n", "sub/a.yaml")
    write("run: {name: b, threads: 2}\n", "sub/b.yaml")
    write("base: [a.yaml, b.yaml]\n", "sub/both.yaml")
    path = write("base: sub/both.yaml\ndata: {train_files: [c]}\n")
    tree = read(path)
    assert tree.data == {"run": {"seed": 1, "name": "b", "threads": 2}, "data": {"train_files": ["c"]}}
    assert tree.places["run.seed"].endswith("sub/a.yaml:1")
    assert tree.places["run.name"].endswith("sub/b.yaml:1")
    assert tree.places["data.train_files.0"] == f"{path}:2"
    assert "data.train_files.1" not in tree.places


def test_an_empty_section_changes_nothing(write: Write) -> None:
    write("run: {seed: 1}\n", "a.yaml")
    assert read(write("base: a.yaml\nrun:\n  # nothing here now\n")).data == {"run": {"seed": 1}}


def test_a_circle_of_base_files_is_an_error(write: Write) -> None:
    a = write("base: b.yaml", "a.yaml")
    b = write("base: a.yaml", "b.yaml")
    assert problems(a) == [f"base: a cycle: {a} -> {b} -> {a}"]
    own = write("base: own.yaml", "own.yaml")
    assert problems(own) == [f"base: a cycle: {own} -> {own}"]


def test_all_that_is_wrong_with_base_is_told(write: Write) -> None:
    write("a: [", "broken.yaml")
    path = write("base: [zz.yaml, broken.yaml]\n")
    first, second = problems(path)
    assert first == f"base: no such file: {path.with_name('zz.yaml')} ({path}:1)"
    assert "broken.yaml" in second
    for value in ("3", "{a: b}", "[1]", "''", "null"):
        assert problems(write(f"base: {value}\n")) == [f"base: must be a file or a list of files ({path}:1)"]


def test_the_same_base_twice_is_no_circle(write: Write) -> None:
    write("run: {seed: 4}", "root.yaml")
    write("base: root.yaml", "a.yaml")
    write("base: root.yaml", "b.yaml")
    assert read(write("base: [a.yaml, b.yaml]")).data == {"run": {"seed": 4}}


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("a.b=1", 1),
        ("a.b=[1, 2]", [1, 2]),
        ("a.b=x=y", "x=y"),
        ("a.b='5'", "5"),
        ("a.b=''", ""),
        ("a.b=null", None),
        ("a.b= 3 ", 3),
        ("a.b={c: {d: 1}}", {"c": {"d": 1}}),
        ("a.b='two words: here'", "two words: here"),
        ("a.b=http://host:30000", "http://host:30000"),
        ("a.b=reinforce++", "reinforce++"),
    ],
)
def test_overrides_hold_yaml(write: Write, override: str, value: Any) -> None:
    tree = read(write("a: {z: 1}"), override)
    assert tree.data == {"a": {"z": 1, "b": value}}
    assert tree.places["a.b"] == "command line"
    assert tree.places["a.z"].endswith("x.yaml:1")
    assert tree.places["a"].endswith("x.yaml:1")


def test_later_overrides_win_and_lists_are_replaced(write: Write) -> None:
    tree = read(write("a: {b: [1, 2, 3]}"), "a.b=[4]", "a.c=1", "a.c=2")
    assert tree.data == {"a": {"b": [4], "c": 2}}
    assert "a.b.2" not in tree.places


def test_every_override_that_cannot_be_read_is_told(write: Write) -> None:
    bad = ["nothing", "=1", "a..b=1", "--a.b=1", "+a.b=1", "a.b=", "base=y.yaml", "a.b=[1", "a.b=@x", "a b=1", "~a=1"]
    found = problems(write(""), *bad)
    assert len(found) == len(bad)
    assert found[0] == "'nothing': an override is written section.key=value (command line)"
    assert "write a.b=null, or a.b=\"''\"" in found[5]
    assert "quote text" in found[7]


def test_each_file_is_read_once_however_many_stand_on_it(write: Write) -> None:
    """Forty levels that name the next twice: 2**40 reads otherwise. What is wrong below is told once."""
    for level in range(40):
        write(f"base: [{level + 1}.yaml, {level + 1}.yaml]\n", f"{level}.yaml")
    write("run: {seed: 5}\n", "40.yaml")
    path = write("base: [0.yaml]\n")
    assert read(path).data == {"run": {"seed": 5}}
    write("run: [\n", "40.yaml")
    assert len(problems(path)) == 1


def test_a_tower_of_base_files_has_an_end(write: Write) -> None:
    for level in range(1200):
        write(f"base: {level + 1}.yaml\n", f"{level}.yaml")
    assert "more than 50 files" in problems(write("base: 0.yaml\n"))[0]


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop", "long", "NUL"])
@pytest.mark.parametrize("as_base", [False, True])
def test_what_is_no_regular_file_is_refused_at_once(write: Write, tmp_path: Path, kind: str, as_base: bool) -> None:
    path = tmp_path / "odd.yaml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "long":
        path = tmp_path / ("x" * 300)
    else:
        path = Path("od\0d")
    if not as_base:
        (told,) = problems(path)
    else:
        shown = str(path).replace("\0", "\\0")
        (told,) = problems(write(f'base: "{shown}"\n'))
    assert "cannot be read" in told or "NUL" in told


def test_a_text_with_a_nul_character_is_refused(write: Write) -> None:
    assert problems(write('run: {dir: "a\\0b"}\n')) == [f"run.dir: a NUL character ({write('x', 'y').parent}/x.yaml:1)"]
