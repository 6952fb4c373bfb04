"""How the launcher tells what ended a run, and which ports it takes."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from pathlib import Path

import pytest

from mdapo.errors import StorageError, UserError
from mdapo.rollout.sglang_guard import LEFTOVER_S
from mdapo.trainer.launch import (
    EXITS,
    FOLDER_PREFIX,
    OUTCOME_ENV,
    check_port,
    check_threads,
    free_port,
    own_folder,
    report,
    write_outcome,
)


def leave(folder: Path, rank: int, code: int, *, time: float, lost_peer: bool = False) -> None:
    outcome = {"code": code, "message": f"rank {rank}", "time": time, "lost_peer": lost_peer}
    (folder / f"rank-{rank}.json").write_text(json.dumps(outcome))


def test_the_first_rank_that_failed_by_itself_is_the_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(tmp_path, 0, 75, time=1.0, lost_peer=True)
    leave(tmp_path, 1, 70, time=3.0)
    leave(tmp_path, 2, 74, time=2.0)
    leave(tmp_path, 3, 0, time=0.0)
    assert report(1, tmp_path, ranks=4) == 74
    assert capsys.readouterr().err == "rank 2\n"


def test_a_rank_that_left_no_word_was_killed_and_the_run_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(tmp_path, 1, 75, time=1.0, lost_peer=True)
    (tmp_path / EXITS).write_text(json.dumps({0: -9, 1: 75}))
    assert report(1, tmp_path, ranks=2) == 75
    assert "the same command resumes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("torchrun_code", "exits", "told"),
    [(0, None, "rank 0 (exit code 0)"), (1, {1: 75}, "rank 0 (exit code 0)"), (1, {0: 3}, "rank 0 (exit code 3)")],
)
def test_a_rank_that_walked_out_is_no_success_and_was_not_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], torchrun_code: int, exits: dict[int, int] | None, told: str
) -> None:
    leave(tmp_path, 1, 75 if torchrun_code else 0, time=1.0, lost_peer=bool(torchrun_code))
    if exits is not None:
        (tmp_path / EXITS).write_text(json.dumps(exits))
    assert report(torchrun_code, tmp_path, ranks=2) == 70
    assert f"mdapo: {told} ended by itself" in capsys.readouterr().err


def test_leaving_at_the_second_signal_is_an_interruption(tmp_path: Path) -> None:
    (tmp_path / EXITS).write_text(json.dumps({0: 75}))
    assert report(1, tmp_path, ranks=1) == 75


@pytest.mark.parametrize(
    ("torchrun_code", "exits", "asked", "told"),
    [
        (1, {0: -15}, True, "stopped on a signal"),  # before it could say a word
        (-9, None, True, "stopped on a signal"),  # a second signal to the launcher
        (75, None, False, "stopped on a signal"),  # a signal to torchrun
        (1, {0: 75}, False, "stopped on a signal"),  # a signal to the rank
        (1, {0: -9}, False, "a rank was killed"),
    ],
)
def test_a_stop_that_was_asked_for_is_not_told_as_a_lack_of_memory(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    torchrun_code: int,
    exits: dict[int, int] | None,
    asked: bool,
    told: str,
) -> None:
    leave(tmp_path, 1, 75, time=1.0, lost_peer=True)
    if exits is not None:
        (tmp_path / EXITS).write_text(json.dumps(exits))
    assert report(torchrun_code, tmp_path, ranks=2, asked=asked) == 75
    assert told in capsys.readouterr().err


def test_all_ranks_done_is_0(tmp_path: Path) -> None:
    leave(tmp_path, 0, 0, time=1.0)
    assert report(0, tmp_path, ranks=1) == 0


def test_an_outcome_is_what_the_launcher_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OUTCOME_ENV, raising=False)
    assert not write_outcome(2, "no launcher")
    monkeypatch.setenv(OUTCOME_ENV, str(tmp_path))
    monkeypatch.setenv("RANK", "5")
    assert write_outcome(2, "all problems")
    assert report(1, tmp_path, ranks=6) == 2


@pytest.mark.parametrize("text", ["", "http", "-1", "0", "65536", "29500.0"])
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="MASTER_PORT"):
        check_port(text)


def test_a_free_port_is_taken_and_one_in_use_refused() -> None:
    port = free_port()
    assert check_port(str(port)) == port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="in use"):
            check_port(str(taken.getsockname()[1]))


@pytest.mark.parametrize("text", ["", "abc", "0", "-1", "1.5", "2,0", "99999"])
def test_what_is_no_number_of_threads_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="OMP_NUM_THREADS"):
        check_threads(text)


@pytest.mark.parametrize("text", ["1", "64", "4,2"])
def test_what_openmp_takes_is_taken(text: str) -> None:
    check_threads(text)


def test_a_launcher_clears_what_dead_ones_left_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, other, young = (tmp_path / f"{name}" for name in (f"{FOLDER_PREFIX}dead", "other", f"{FOLDER_PREFIX}young"))
    for folder in (dead, other, young):
        (folder / "torchelastic").mkdir(parents=True)
    (tmp_path / f"{FOLDER_PREFIX}link").symlink_to(other)
    long_ago = time.time() - 2 * LEFTOVER_S
    with own_folder() as living:
        for folder in (dead, other, Path(living)):
            os.utime(folder, (long_ago, long_ago))
        with own_folder():
            pass
        assert {f.name for f in tmp_path.iterdir()} == {
            "other", young.name, f"{FOLDER_PREFIX}link", Path(living).name
        }  # fmt: skip
    assert not Path(living).exists() and (other / "torchelastic").exists()


def test_no_place_for_temporary_files_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(StorageError, match="no temporary folder can be made"), own_folder():
        pass
