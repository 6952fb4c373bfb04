from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mdapo.config.schema import Tracking
from mdapo.tracking import tracker as tracker_module
from mdapo.tracking.metrics import Metrics
from mdapo.tracking.tracker import Tracker

PLAIN, BOARD = Tracking(), Tracking(tensorboard=True)


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def use_backend(monkeypatch: pytest.MonkeyPatch, make: Callable[[Path, int], object]) -> None:
    monkeypatch.setattr(tracker_module, "_TensorBoard", make)


class Remembers:
    def __init__(self, fail_at: int | None = None, wait: threading.Event | None = None) -> None:
        self.steps: list[int] = []
        self.closed = False
        self.fail_at, self.wait = fail_at, wait

    def log(self, step: int, metrics: Metrics) -> None:
        if self.wait is not None:
            self.wait.wait()
        if step == self.fail_at:
            raise ConnectionError("no route")
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


def test_each_step_is_there_once_over_restarts_at_every_point(tmp_path: Path) -> None:
    committed_step, committed_offset = 0, 0
    for killed_after in (3, 5, 5, 9):
        tracker = Tracker(tmp_path, PLAIN, committed_offset, resume_step=committed_step)
        for step in range(committed_step + 1, killed_after + 1):
            tracker.log(step, {"x": step})
            if step % 2 == 0:
                committed_step, committed_offset = step, tracker.offset
    assert steps_in(tmp_path) == list(range(1, 10))


def test_a_line_cut_by_a_kill_is_removed_on_resume(tmp_path: Path) -> None:
    first = Tracker(tmp_path, PLAIN)
    first.log(1, {"x": 1.0})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "x"')
    again = Tracker(tmp_path, PLAIN, first.offset, resume_step=1)
    again.log(2, {"x": 2.0})
    assert steps_in(tmp_path) == [1, 2]


def test_a_file_shorter_than_its_checkpoint_says_so_and_goes_on_with_whole_lines(tmp_path: Path) -> None:
    first = Tracker(tmp_path, PLAIN)
    for step in (1, 2, 3):
        first.log(step, {"x": 1.0})
    os.truncate(tmp_path / "metrics.jsonl", first.offset - 5)
    said: list[str] = []
    again = Tracker(tmp_path, PLAIN, first.offset, resume_step=3, notify=said.append)
    again.log(4, {"x": 1.0})
    assert steps_in(tmp_path) == [1, 2, 4]
    assert len(said) == 1 and "metrics.jsonl" in said[0]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda rows: [rows[0], b"\xff" * (len(rows[1]) - 1) + b"\n", rows[2]], "line 2 is no step's"),
        (lambda rows: [rows[0], b"[]".ljust(len(rows[1]) - 1) + b"\n", rows[2]], "line 2 is no step's"),
        (lambda rows: [rows[1], rows[0], rows[2]], "line 2 is of step 1, after step 2"),
        (lambda rows: rows, ""),
    ],
)
def test_lines_damaged_before_the_checkpoint_are_told(
    tmp_path: Path, damage: Callable[[list[bytes]], list[bytes]], says: str
) -> None:
    first = Tracker(tmp_path, PLAIN)
    for step in (1, 2, 3):
        first.log(step, {"x": 1.0})
    file = tmp_path / "metrics.jsonl"
    changed = b"".join(damage(file.read_bytes().splitlines(keepends=True)))
    file.write_bytes(changed)
    said: list[str] = []
    Tracker(tmp_path, PLAIN, first.offset, resume_step=3, notify=said.append)
    assert file.read_bytes() == changed
    assert [says in line for line in said] == [True] * bool(says)


def test_a_step_can_not_be_written_twice(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, PLAIN, resume_step=4)
    tracker.log(5, {})
    with pytest.raises(AssertionError, match="step 5 after step 5"):
        tracker.log(5, {})


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    Tracker(tmp_path, PLAIN).log(1, {"actor/loss": float("nan")})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "actor/loss": None}


def test_a_backend_gets_every_step_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Remembers()
    use_backend(monkeypatch, lambda folder, step: backend)
    tracker = Tracker(tmp_path, BOARD)
    for step in range(1, 40):
        tracker.log(step, {"x": step})
    tracker.close()
    assert backend.steps == list(range(1, 40)) and backend.closed


def test_a_backend_that_can_not_start_is_off_with_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def make(folder: Path, step: int) -> object:
        raise ModuleNotFoundError("No module named 'tensorboard'")

    use_backend(monkeypatch, make)
    tracker = Tracker(tmp_path, BOARD, notify=said.append)
    for step in range(1, 200):
        tracker.log(step, {})
    tracker.close()
    assert steps_in(tmp_path) == list(range(1, 200))
    assert len(said) == 1 and "tensorboard" in said[0] and "off" in said[0]


def test_a_backend_that_breaks_is_off_from_there_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, said = Remembers(fail_at=3), []
    use_backend(monkeypatch, lambda folder, step: backend)
    tracker = Tracker(tmp_path, BOARD, notify=said.append)
    for step in range(1, 8):
        tracker.log(step, {})
    tracker.close()
    assert backend.steps == [1, 2]
    assert len(said) == 1 and "no route" in said[0]
    assert steps_in(tmp_path) == list(range(1, 8))


def test_a_backend_that_hangs_never_blocks_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend waits for an event that only the test sets: were it waited for, this test would hang."""
    event, said = threading.Event(), []
    use_backend(monkeypatch, lambda folder, step: Remembers(wait=event))
    monkeypatch.setattr(tracker_module, "CLOSE_S", 0.05)
    tracker = Tracker(tmp_path, BOARD, notify=said.append)
    for step in range(1, 2 * tracker_module.QUEUE_STEPS):
        tracker.log(step, {})
    tracker.close()
    event.set()
    assert len(said) == 1 and "behind" in said[0]
    assert steps_in(tmp_path) == list(range(1, 2 * tracker_module.QUEUE_STEPS))


def test_tensorboard_has_each_point_once_after_a_resume(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first, offsets = Tracker(tmp_path, BOARD), {}
    for step in (1, 2, 3):
        first.log(step, {"reward/mean": 0.1 * step})
        offsets[step] = first.offset
    first.close()
    again = Tracker(tmp_path, BOARD, offsets[2], resume_step=2)
    for step in (3, 4):
        again.log(step, {"reward/mean": 1.0})
    again.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward/mean")
    assert [event.step for event in events] == [1, 2, 3, 4]
    assert [event.value for event in events] == pytest.approx([0.1, 0.2, 1.0, 1.0])
