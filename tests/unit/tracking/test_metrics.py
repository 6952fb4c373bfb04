from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mdapo.tracking.metrics import Timers, as_json, summary


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_timers_add_up_by_name_and_start_over_after_a_pop() -> None:
    clock = Clock()
    timers = Timers(clock=clock)
    for seconds in (2.0, 3.0):
        with timers("train"):
            clock.now += seconds
    assert timers.pop() == {"time/train": 5.0, "time/step": 5.0}
    assert timers.pop() == {"time/step": 0.0}


def test_step_time_counts_outermost_timers_once_and_evaluation_apart() -> None:
    clock = Clock()
    timers = Timers(clock=clock)
    with timers("collect"):
        clock.now += 1.0
        with timers("score"):
            clock.now += 4.0
    with timers("eval"):
        clock.now += 100.0
    assert timers.pop() == {"time/score": 4.0, "time/collect": 5.0, "time/eval": 100.0, "time/step": 5.0}


def test_a_timer_whose_body_raises_still_counts_and_does_not_stay_open() -> None:
    clock = Clock()
    timers = Timers(clock=clock)
    with pytest.raises(KeyError), timers("collect"):
        clock.now += 1.0
        raise KeyError
    with timers("train"):
        clock.now += 2.0
    assert timers.pop()["time/step"] == 3.0


def test_summary_of_values_and_of_none() -> None:
    lengths = summary("length/response", [4, 1, 7])
    assert lengths == {"length/response_mean": 4.0, "length/response_min": 1.0, "length/response_max": 7.0}
    assert summary("length/response", []) == {}


def test_metrics_become_strict_json() -> None:
    torch = pytest.importorskip("torch")
    metrics = {"a": math.nan, "b": math.inf, "c": np.float32(0.5), "d": torch.tensor(2.0), "e": 3, "f": "text"}
    plain = as_json(metrics)
    assert json.loads(json.dumps(plain, allow_nan=False)) == {
        "a": None,
        "b": None,
        "c": 0.5,
        "d": 2.0,
        "e": 3,
        "f": "text",
    }
    assert isinstance(plain["e"], int)
