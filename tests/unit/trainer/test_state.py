"""What a run writes down holds numbers that are not finite as null: NaN is no JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

from mdapo.trainer.journal import write_json
from mdapo.trainer.state import TrainState, read, written


def test_numbers_that_wait_to_be_noted_survive_a_restart_nan_too() -> None:
    state = TrainState(step=3, waiting={"actor/loss": math.nan, "reward/mean": 0.5}, before={"eval/reward": 0.25})
    text = json.dumps(written(state, seconds=2.0), allow_nan=False)
    found = read(json.loads(text))
    assert found.waiting is not None and math.isnan(found.waiting["actor/loss"])
    assert (found.step, found.seconds, found.before) == (3, 2.0, {"eval/reward": 0.25})
    assert found.waiting["reward/mean"] == 0.5
    assert read(json.loads(json.dumps(written(TrainState(), seconds=0.0)))) == TrainState()


def test_a_summary_holds_null_for_what_is_not_finite(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", {"steps": 2, "reward_after": math.inf, "model": "m"})
    text = (tmp_path / "summary.json").read_text()
    assert json.loads(text) == {"steps": 2, "reward_after": None, "model": "m"}
