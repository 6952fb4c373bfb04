from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable

import pytest

from mdapo.errors import StorageError
from mdapo.tracking.console import Console, duration, number, printable

METRICS = {
    "reward/mean": 0.51234,
    "actor/loss": -0.0123456,
    "actor/grad_norm": 1.0,
    "rollout/groups_trained": 8,
    "rollout/groups_dropped": 3,
    "time/step": 12.5,
    "something/else": 1.0,
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("write", [lambda c: c.say("a"), lambda c: c.show("a"), lambda c: c.step(3, METRICS)])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EPIPE])
def test_output_that_cannot_be_written_is_named(write: Callable[[Console], None], code: int) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(code, os.strerror(code))

    with pytest.raises(StorageError, match=rf"the output \(stdout\) cannot be written: {os.strerror(code)}"):
        write(Console(60, file=Closed()))


def test_without_a_terminal_each_step_is_one_line_of_key_value_pairs() -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(60, first_step=2, file=out, clock=clock)
    clock.now = 30.0
    console.doing("collecting 3/8")
    console.step(3, METRICS)
    console.close()
    (line,) = out.getvalue().splitlines()
    pairs = dict(pair.split("=") for pair in line.split(" "))
    assert pairs["step"] == "3/60"
    assert pairs["reward"] == "0.5123" and pairs["loss"] == "-0.01235"
    assert pairs["groups"] == "8" and pairs["dropped"] == "3" and pairs["t"] == "12.5s"
    assert pairs["eta"] == duration(30.0 * 57), "one step of this process took 30 s, 57 are left"
    assert "entropy" not in pairs, "a metric that the step does not have is left out"


def test_a_long_step_line_is_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = io.StringIO()
    Console(60, file=out).step(1, METRICS)
    assert len(out.getvalue().splitlines()) == 1


def test_on_a_terminal_there_is_a_bar_with_steps_and_time_left() -> None:
    out = io.StringIO()
    console = Console(60, file=out, terminal=True)
    console.doing("collecting [3/8]")
    console.step(6, METRICS)
    console.close()
    assert "6/60" in out.getvalue() and "left" in out.getvalue() and "reward 0.5123" in out.getvalue()


def test_text_cannot_steer_the_terminal_and_is_no_markup() -> None:
    out = io.StringIO()
    Console(1, file=out).say("[bold]model said[/bold] \x1b[2J\x07 ümläut\nnext")
    assert out.getvalue() == "[bold]model said[/bold] \\x1b[2J\\x07 ümläut\nnext\n"
    assert printable("tab\tstays") == "tab\tstays"


@pytest.mark.parametrize(
    ("value", "text"), [(8, "8"), (0.43121, "0.4312"), (1.25e-6, "1.25e-06"), (float("nan"), "nan"), (-2.0, "-2")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(42.2, "42s"), (303, "5m03s"), (7620, "2h07m"), (59.9, "1m00s")])
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert duration(seconds) == text
