"""Whatever a person names, the answer is words: no traceback, and no wait for the other end of a pipe."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mdapo.config.model_facts import read_model, tokenizer_problems
from mdapo.config.paths import why_no_file, why_no_folder
from mdapo.data.rows import Problems, read_rows
from mdapo.errors import UserError
from mdapo.plugins import load

ODD = ["pipe", "loop", "long", "NUL", "below a file"]


def odd(folder: Path, kind: str, suffix: str) -> Path:
    path = folder / f"odd{suffix}"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "below a file":
        (folder / "file").touch()
        path = folder / "file" / f"odd{suffix}"
    else:
        path = folder / (("x" * 300 if kind == "long" else "o\0d") + suffix)
    return path


@pytest.mark.parametrize("kind", ODD)
def test_odd_files_and_folders_are_told_by_every_reader(tmp_path: Path, kind: str) -> None:
    problems = Problems()
    assert list(read_rows(odd(tmp_path, kind, ".jsonl"), problems)) == []
    assert problems.count == 1
    model = odd(tmp_path, kind, "") if kind != "below a file" else tmp_path / "file" / "odd"
    facts, told = read_model(model)
    assert facts is None and len(told) == 1 and told[0].key == "model.path"
    assert tokenizer_problems(model, key="model.path")
    with pytest.raises(UserError, match="plug-in"):
        load(f"{tmp_path / 'file' / 'odd.py' if kind == 'below a file' else odd(tmp_path, kind, '.py')}:x", builtin={})


def test_a_pipe_in_a_model_folder_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer_config.json")
    assert "tokenizer_config.json: cannot be read: not a regular file" in read_model(tmp_path)[1][0].text


def test_a_file_is_a_file_and_a_folder_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert (why_no_file(file), why_no_folder(tmp_path)) == ("", "")
    assert why_no_file(tmp_path) == "cannot be read: is a folder"
    assert why_no_folder(file) == why_no_folder(tmp_path / "none") == "no such folder"
