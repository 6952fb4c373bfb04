from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mdapo.tracking.recorder import Recorder, pick
from mdapo.types import Episode, Group, Message, Prompt, Score, Turn


def episode(uid: str, index: int, value: float | None, text: str = "Sorry about that.") -> Episode:
    prompt = Prompt(uid=uid, row=0, messages=(Message("user", "My parcel is late."),))
    said = Turn("assistant", np.array([5, 6], np.int32), np.array([True, True]), np.zeros(2, np.float32), version=7)
    score = None if value is None else Score(value=value, outcome=value, parts={"apology": 1.0})
    messages = (*prompt.messages, Message("assistant", text))
    return Episode(prompt, index, np.array([1, 2, 3], np.int32), (said,), messages, "done", score)


def group(uid: str, values: Sequence[float | None]) -> Group:
    episodes = tuple(episode(uid, index, value) for index, value in enumerate(values))
    return Group(episodes[0].prompt, episodes, version=7)


def test_picked_episodes_come_from_all_groups_best_and_worst_first() -> None:
    groups = [group("a", [0.5, 0.9, 0.1]), group("b", [0.0, 1.0, 0.2])]
    picked = [(e.prompt.uid, e.score.value) for e in pick(groups, limit=5) if e.score]
    assert picked == [("a", 0.9), ("b", 1.0), ("a", 0.1), ("b", 0.0), ("a", 0.5)]


def test_an_episode_is_readable_as_json_and_as_text(tmp_path: Path) -> None:
    Recorder(tmp_path, episodes_per_step=1).record(6, [group("p", [0.75])])
    (line,) = (tmp_path / "episodes" / "step_000006.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert found["step"] == 6 and found["uid"] == "p/0" and found["end"] == "done" and found["versions"] == [7]
    assert found["score"] == {"value": 0.75, "outcome": 0.75, "parts": {"apology": 1.0}, "valid": True}
    assert found["tokens"] == {"prompt": 3, "all": 5, "model": 2}
    assert found["messages"][-1] == {"role": "assistant", "content": "Sorry about that."}
    text = (tmp_path / "episodes" / "step_000006.txt").read_text()
    assert "[user]\nMy parcel is late." in text and "score 0.75" in text and "apology 1" in text


def test_any_text_a_model_writes_can_be_recorded(tmp_path: Path) -> None:
    hostile = "\ud800 \x1b[2J \x00 \u2028 ünï\n\n"
    Recorder(tmp_path, episodes_per_step=1).episodes(1, [episode("p", 0, None, hostile)])
    raw = (tmp_path / "episodes" / "step_000001.jsonl").read_bytes()
    assert raw.count(b"\n") == 1
    assert json.loads(raw)["messages"][-1]["content"] == hostile
    assert b"\x1b" not in (tmp_path / "episodes" / "step_000001.txt").read_bytes()


def test_a_score_that_is_not_a_number_is_recorded_as_null(tmp_path: Path) -> None:
    Recorder(tmp_path, episodes_per_step=1).record(1, [group("p", [float("nan")])])
    assert json.loads((tmp_path / "episodes" / "step_000001.jsonl").read_text())["score"]["value"] is None


def test_a_step_that_runs_again_replaces_its_file(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, episodes_per_step=4)
    recorder.record(1, [group("old", [0.0, 1.0, 0.5])])
    recorder.record(1, [group("new", [0.0])])
    assert [f.name for f in sorted((tmp_path / "episodes").iterdir())] == ["step_000001.jsonl", "step_000001.txt"]
    assert "old" not in (tmp_path / "episodes" / "step_000001.jsonl").read_text()


def test_no_episodes_are_written_when_none_are_asked_for(tmp_path: Path) -> None:
    Recorder(tmp_path, episodes_per_step=0).record(1, [group("p", [0.0])])
    assert not list(tmp_path.iterdir())


def test_replay_gets_all_groups_of_the_step(tmp_path: Path) -> None:
    saved: dict[Path, list[str]] = {}

    def save(path: Path, groups: Sequence[Group]) -> None:
        saved[path] = [g.prompt.uid for g in groups]

    Recorder(tmp_path, episodes_per_step=1, save_groups=save).record(12, [group("a", [0.0]), group("b", [1.0])])
    assert saved == {tmp_path / "replay" / "step_000012.safetensors": ["a", "b"]}
