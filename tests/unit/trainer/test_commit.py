"""Commits: complete or not there, damage noticed, the newest good one found."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mdapo.errors import StorageError
from mdapo.trainer.commit import FORMER, MANIFEST, close_commit, newest_commit, open_commit, verify


def write(root: Path, step: int, *, keep: int = 9) -> Path:
    folder = open_commit(root, step)
    (folder / "model").mkdir()
    (folder / "model" / "shard").write_bytes(bytes(range(200)) * step)
    (folder / "state.json").write_text(f'{{"step": {step}}}')
    return close_commit(folder, keep=keep)


def test_newest_is_found_and_older_ones_are_pruned(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, keep=2)
    assert newest_commit(tmp_path).path == tmp_path / "step_000003"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["step_000002", "step_000003"]


def test_unfinished_commit_is_never_found_and_is_cleared(tmp_path: Path) -> None:
    good = write(tmp_path, 1)
    (open_commit(tmp_path, 2) / "half").write_text("x")
    assert newest_commit(tmp_path).path == good
    open_commit(tmp_path, 2)
    assert not list(tmp_path.glob(".tmp-*/half"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGE = {
    "flipped": flip,
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "zeroed": lambda p: p.write_bytes(bytes(p.stat().st_size)),
    "deleted": lambda p: p.unlink(),
    "emptied": lambda p: p.write_bytes(b""),
}


@pytest.mark.parametrize("name", ["model/shard", "state.json", MANIFEST])
@pytest.mark.parametrize("damage", DAMAGE)
def test_any_damage_to_any_file_is_noticed_and_the_older_commit_is_used(tmp_path: Path, name: str, damage: str) -> None:
    older, newer = write(tmp_path, 1), write(tmp_path, 2)
    DAMAGE[damage](newer / name)
    found = newest_commit(tmp_path)
    assert found.path == older
    assert len(found.problems) == 1 and str(newer) in found.problems[0]


def test_files_of_two_commits_swapped_is_noticed(tmp_path: Path) -> None:
    older, newer = write(tmp_path, 1), write(tmp_path, 2)
    (newer / "state.json").write_bytes((older / "state.json").read_bytes())
    assert verify(newer) is not None


@pytest.mark.parametrize("text", ["[]", "{}", "3", "null", '{"state.json": 3}', '{"state.json": {}}', "[" * 99999])
def test_a_manifest_that_is_json_and_none_of_ours_is_passed_over(tmp_path: Path, text: str) -> None:
    older, newer = write(tmp_path, 1), write(tmp_path, 2)
    (newer / MANIFEST).write_text(text)
    found = newest_commit(tmp_path, needs=("state.json",))
    assert found.path == older
    assert len(found.problems) == 1 and f"{newer}: " in found.problems[0] and "manifest" in found.problems[0]


def test_a_commit_whose_manifest_leaves_out_what_is_needed_is_passed_over(tmp_path: Path) -> None:
    older, newer = write(tmp_path, 1), write(tmp_path, 2)
    listing = json.loads((newer / MANIFEST).read_text())
    del listing["state.json"]
    (newer / MANIFEST).write_text(json.dumps(listing))
    assert newest_commit(tmp_path, needs=("state.json",)).path == older


def test_a_file_that_cannot_be_read_is_no_reason_to_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(hashlib, "file_digest", broken)
    with pytest.raises(StorageError, match="cannot be read: Input/output error"):
        newest_commit(tmp_path)


def test_links_and_odd_names_are_not_taken_for_commits(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "step_000009").symlink_to(tmp_path / "step_000001")
    (tmp_path / "step_x").mkdir()
    assert newest_commit(tmp_path).path == tmp_path / "step_000001"


@pytest.mark.parametrize("make", [lambda p: p.write_text("x"), lambda p: p.symlink_to("/nowhere")])
def test_what_has_a_commits_name_and_is_none_hinders_no_save(tmp_path: Path, make: Callable[[Path], object]) -> None:
    for name in ("step_000001", ".tmp-step_000001", f"{FORMER}step_000001"):
        make(tmp_path / name)
    for step in (1, 2):
        assert write(tmp_path, step) == newest_commit(tmp_path).path
    assert sorted(f.name for f in tmp_path.iterdir()) == ["step_000001", "step_000002"]


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 1)
    assert write(tmp_path, 1) == newest_commit(tmp_path).path


def test_a_kill_while_a_commit_is_replaced_loses_neither(tmp_path: Path) -> None:
    """Between the two renames there is no folder of the step's name: the former one is put back."""
    former = write(tmp_path, 1)
    former.rename(tmp_path / f"{FORMER}step_000001")
    assert newest_commit(tmp_path).path == former
    (tmp_path / f"{FORMER}step_000001").mkdir()  # and where it was killed after the second one, it goes
    write(tmp_path, 2)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["step_000001", "step_000002"]
