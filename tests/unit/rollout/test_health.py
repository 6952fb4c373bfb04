"""One server's states: what may serve, what is restarted, and that nothing leads out of the wrong door."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.rollout.health import Health, HealthLimits, State

LIMITS = HealthLimits(failures=3, restarts=2, window_s=100.0, restart_wait_s=1.0, restart_wait_max_s=8.0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def machine(*, can_restart: bool = True, limits: HealthLimits = LIMITS) -> tuple[Health, Clock]:
    clock = Clock()
    return Health(can_restart=can_restart, limits=limits, clock=clock), clock


def fail(health: Health, clock: Clock, times: int = 1) -> None:
    for _ in range(times):
        clock.now += 1.0
        health.failed("it broke", began=clock.now)


def test_a_server_serves_after_its_weights_and_only_their_version() -> None:
    health, clock = machine()
    assert health.state is State.STALE
    health.answered(began=clock.now)
    assert not health.serves(0)
    health.synced(4)
    assert health.serves(4)
    assert not health.serves(3)
    assert not health.serves(5)


def test_one_failure_makes_a_suspect_which_an_answer_clears_and_three_in_a_row_kill() -> None:
    health, clock = machine()
    health.synced(1)
    fail(health, clock, 2)
    assert (health.state, health.serves(1)) == (State.SUSPECT, True)
    health.worked(began=clock.now)
    assert health.state is State.HEALTHY
    fail(health, clock, 2)
    assert health.state is State.SUSPECT  # the two before the answer are forgotten
    fail(health, clock)
    assert (health.state, health.serves(1), health.cause) == (State.DEAD, False, "it broke")


def test_saying_that_it_is_well_does_not_keep_a_server_that_does_nothing_alive() -> None:
    health, clock = machine()
    health.synced(1)
    for state in (State.SUSPECT, State.SUSPECT, State.DEAD):
        fail(health, clock)
        assert health.state is state
        if state is State.SUSPECT:
            health.answered(began=clock.now)
            assert health.state is State.HEALTHY  # else it would get no work to show that it can


def test_silence_when_asked_kills_as_failed_work_does() -> None:
    health, clock = machine()
    health.synced(1)
    for state in (State.SUSPECT, State.SUSPECT, State.DEAD):
        clock.now += 1.0
        health.silent("no answer", began=clock.now)
        assert health.state is state


def test_requests_lost_in_one_moment_are_one_failure() -> None:
    health, clock = machine()
    health.synced(1)
    clock.now = 5.0
    for began in (0.0, 1.0, 4.9):
        health.failed("reset", began=began)
    assert health.state is State.SUSPECT
    clock.now = 6.0
    health.failed("reset", began=5.5)
    clock.now = 7.0
    health.failed("reset", began=6.5)
    assert health.state is State.DEAD


def test_a_missed_update_is_stale_until_synced() -> None:
    health, clock = machine()
    health.synced(1)
    health.missed("the update to version 2 failed half way")
    assert (health.state, health.serves(1), health.serves(2)) == (State.STALE, False, False)
    health.answered(began=clock.now)
    assert health.state is State.STALE
    health.synced(2)
    assert health.serves(2)
    fail(health, clock)
    health.missed("again")
    assert health.state is State.STALE  # a suspect too


def test_a_restart_waits_longer_each_time_and_the_budget_ends_it() -> None:
    health, clock = machine()
    health.synced(1)
    health.died("killed")
    assert health.restart_at == 1.0
    assert not health.begin_restart()
    clock.now = 1.0
    assert health.begin_restart()
    assert not health.begin_restart()
    health.started()
    assert (health.state, health.serves(1), health.restarts) == (State.STALE, False, 1)
    health.synced(1)
    clock.now = 10.0
    health.died("killed again")
    assert health.restart_at == 12.0
    clock.now = 12.0
    assert health.begin_restart()
    health.start_failed("port taken")
    assert health.state is State.RETIRED
    assert health.cause == "port taken (after 2 restarts within 100 s)"
    assert health.restart_at is None
    assert not health.begin_restart()


def test_restarts_out_of_the_window_are_forgotten() -> None:
    health, clock = machine()
    for round_ in range(6):
        clock.now = 200.0 * round_
        health.synced(round_)
        health.died("killed")
        clock.now += 1.0
        assert health.begin_restart()
        health.started()
    assert (health.state, health.restarts) == (State.STALE, 6)


def test_a_server_of_others_comes_back_by_answering_and_is_stale() -> None:
    health, clock = machine(can_restart=False)
    health.synced(1)
    fail(health, clock, 3)
    assert health.restart_at is None
    health.answered(began=clock.now - 0.5)  # on its way when it died
    assert health.state is State.DEAD
    clock.now += 1e6
    assert not health.begin_restart()
    health.answered(began=clock.now)
    assert (health.state, health.serves(1)) == (State.STALE, False)
    health.synced(1)
    assert health.serves(1)


EVENTS: dict[str, Callable[[Health, Clock, int], Any]] = {
    "answered": lambda h, c, n: h.answered(began=c.now),
    "answered_late": lambda h, c, n: h.answered(began=c.now - n),
    "worked": lambda h, c, n: h.worked(began=c.now - n),
    "failed": lambda h, c, n: h.failed("f", began=c.now),
    "silent": lambda h, c, n: h.silent("f", began=c.now),
    "failed_late": lambda h, c, n: h.failed("f", began=c.now - n),
    "died": lambda h, c, n: h.died("d"),
    "missed": lambda h, c, n: h.missed("m"),
    "synced": lambda h, c, n: h.synced(n),
    "begin_restart": lambda h, c, n: h.begin_restart(),
    "started": lambda h, c, n: h.started(),
    "start_failed": lambda h, c, n: h.start_failed("s"),
    "retire": lambda h, c, n: h.retire("r"),
    "time": lambda h, c, n: setattr(c, "now", c.now + n),
}
HISTORIES = st.lists(st.tuples(st.sampled_from(sorted(EVENTS)), st.integers(0, 120)), max_size=60)


@settings(max_examples=400, deadline=None)
@given(history=HISTORIES, can_restart=st.booleans())
def test_no_history_makes_a_stale_dead_or_retired_server_serve(
    history: list[tuple[str, int]], can_restart: bool
) -> None:
    """Against a second account, kept apart from the machine: the version of the last sync that nothing has undone."""
    health, clock = machine(can_restart=can_restart)
    vouched: int | None = None
    for name, n in history:
        before = health.state
        EVENTS[name](health, clock, n)
        if name == "synced" and before in (State.HEALTHY, State.SUSPECT, State.STALE):
            vouched = n
        if name == "missed" or health.state in (State.DEAD, State.RESTARTING, State.RETIRED):
            vouched = None
        served = [v for v in range(-1, 122) if health.serves(v)]
        assert served == ([vouched] if vouched is not None else [])
        if health.state in (State.STALE, State.DEAD, State.RESTARTING, State.RETIRED):
            assert not served
        if before in (State.DEAD, State.RESTARTING):  # the way back is through stale
            assert health.state not in (State.HEALTHY, State.SUSPECT)
        if before is State.RETIRED:
            assert health.state is State.RETIRED


@settings(max_examples=200, deadline=None)
@given(history=HISTORIES, can_restart=st.booleans())
def test_every_state_is_left_or_terminal(history: list[tuple[str, int]], can_restart: bool) -> None:
    """From wherever a history ends, good news lead to serving, and nothing but bad news to an end that is final (for a
    server that somebody restarts) or one that an answer undoes (for others')."""
    for good in (True, False):
        health, clock = machine(can_restart=can_restart)
        for name, n in history:
            EVENTS[name](health, clock, n)
        retired = health.state is State.RETIRED
        for _ in range(20):
            clock.now += 10.0
            if good:
                health.begin_restart()
                health.started()
                health.answered(began=clock.now)
                health.synced(7)
            else:
                health.failed("f", began=clock.now)
                health.begin_restart()
                health.start_failed("s")
        if retired or (can_restart and not good):
            assert health.state is State.RETIRED
        elif good:
            assert health.serves(7)
        else:
            assert health.state in (State.DEAD, State.RESTARTING)
            health.start_failed("s")
            clock.now += 1.0
            health.answered(began=clock.now)
            assert health.state is State.STALE


@settings(deadline=None)
@given(history=HISTORIES)
def test_no_more_restarts_than_the_budget_in_any_window(history: list[tuple[str, int]]) -> None:
    health, clock = machine()
    times = []
    for name, n in history:
        before = health.restarts
        EVENTS[name](health, clock, n)
        times += [clock.now] * (health.restarts - before)
    for start in times:
        assert sum(start <= t < start + LIMITS.window_s for t in times) <= LIMITS.restarts


def test_changes_are_told_once_each() -> None:
    told: list[tuple[State, State, str]] = []
    clock = Clock()
    health = Health(can_restart=True, limits=LIMITS, clock=clock, notify=lambda *change: told.append(change))
    health.synced(0)
    health.synced(1)
    fail(health, clock, 2)
    health.died("gone")
    assert [(old, new) for old, new, _ in told] == [
        (State.STALE, State.HEALTHY),
        (State.HEALTHY, State.SUSPECT),
        (State.SUSPECT, State.DEAD),
    ]
