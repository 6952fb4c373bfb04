"""A call that hangs is given up by whoever waits for it; a quick one is back before anything else happens."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mdapo.config.schema import Plugin
from mdapo.environments.aside import Aside, Pace
from mdapo.environments.calling import load_environment, openings_of
from mdapo.errors import UserError
from mdapo.types import Message, Prompt

ROOT = Path(__file__).resolve().parents[3]
HANGS = """
import asyncio, sys, time
from mdapo.environments.aside import Aside

async def main():
    async with asyncio.timeout(0.05):
        await Aside(patience_s=0.01).call(lambda: time.sleep(1000))

try:
    asyncio.run(main())
except TimeoutError:
    sys.exit(7)
"""


def test_quick_calls_are_made_in_order_in_one_thread_and_nothing_comes_between() -> None:
    said: list[object] = []

    async def speak(calls: Aside, number: int) -> None:
        for turn in range(3):
            said.append((number, turn, await calls.call(threading.get_ident)))

    async def main() -> None:
        calls = Aside(patience_s=60.0)
        async with asyncio.TaskGroup() as tasks:
            for number in range(8):
                tasks.create_task(speak(calls, number))
        calls.close()

    asyncio.run(main())
    assert [s[:2] for s in said] == [(number, turn) for number in range(8) for turn in range(3)]
    assert {s[2] for s in said} != {threading.get_ident()} and len({s[2] for s in said}) == 1


def test_a_call_that_hangs_holds_nobody_else_up_and_ends_at_its_deadline() -> None:
    free = threading.Event()

    async def main() -> None:
        calls = Aside(patience_s=0.01)

        async def hang() -> None:
            async with asyncio.timeout(0.5):
                await calls.call(free.wait)

        hanging = asyncio.create_task(hang())
        await asyncio.sleep(0)
        assert [await calls.call(lambda n=n: n) for n in range(100)] == list(range(100))
        assert not hanging.done()
        with pytest.raises(TimeoutError):
            await hanging
        free.set()
        assert await calls.call(lambda: "after") == "after"

    asyncio.run(main())


@pytest.mark.parametrize("patience_s", [60.0, 0.0])
@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3)])
def test_what_a_call_raises_is_raised_where_it_is_waited_for(error: BaseException, patience_s: float) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        asyncio.run(Aside(patience_s=patience_s).call(fail))
    assert raised.value is error


def test_a_process_ends_though_a_call_hangs() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], cwd=ROOT, timeout=60, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 7


def test_an_opening_that_hangs_is_named_at_the_deadline(tmp_path: Path) -> None:
    file = tmp_path / "hangs.py"
    file.write_text(
        "import time\nclass Env:\n    def __init__(self, prompt, *, seed): pass\n"
        "    def opening(self): time.sleep(1000)\n    def observe(self, messages): ...\n",
        encoding="utf-8",
    )
    name = f"{file}:Env"
    factory = load_environment(Plugin(name=name))
    row = Prompt("row", 0, (Message("user", "x"),))
    work = openings_of(factory, name, [row], seed=0, calls=Aside(patience_s=0.01), timeout_s=0.05)
    with pytest.raises(UserError, match=r"hangs.py:Env: row: no opening after 0.05 s \(rollout.episode_timeout_s\)"):
        asyncio.run(work)


@pytest.mark.parametrize("pace", ["quick", "waits"])
def test_calls_of_many_dialogues_run_at_the_same_time_and_each_gets_its_own_answer(pace: Pace) -> None:
    """All meet at a barrier, which none would pass if they came one after the other."""
    together = threading.Barrier(8, timeout=60.0)

    def work(number: int) -> int:
        together.wait()
        return number

    async def main() -> list[int]:
        calls = Aside(pace=pace, patience_s=0.01)
        return await asyncio.gather(*(calls.call(lambda n=n: work(n)) for n in range(8)))

    assert asyncio.run(main()) == list(range(8))


def test_no_more_calls_run_at_once_than_allowed_and_they_begin_in_order() -> None:
    running, most, begun = 0, 0, []
    lock = threading.Lock()

    def work(number: int) -> None:
        nonlocal running, most
        with lock:
            begun.append(number)
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1

    async def main() -> None:
        calls = Aside(pace="waits", max_running=3)
        await asyncio.gather(*(calls.call(lambda n=n: work(n)) for n in range(12)))

    asyncio.run(main())
    assert most <= 3 and sorted(begun[:3]) == [0, 1, 2] and sorted(begun) == list(range(12))


def test_an_environment_that_is_slow_throughout_is_soon_not_waited_for_on_the_spot() -> None:
    """The bound is on what all calls together take from the event loop; quick ones give it back."""

    async def main() -> None:
        calls = Aside(patience_s=0.15)
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0.005)

        beating = asyncio.create_task(beat())
        for _ in range(4):
            await calls.call(lambda: time.sleep(0.06))
        before = beats
        await calls.call(lambda: time.sleep(0.2))
        assert beats > before + 1, "others went on during the call"
        for _ in range(20):
            await calls.call(lambda: None)
        before = beats
        await calls.call(lambda: time.sleep(0.06))
        assert beats <= before + 1, "quick calls have given the patience back"
        beating.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("pace", ["quick", "waits"])
def test_a_call_past_its_own_deadline_is_given_up_by_name(pace: Pace) -> None:
    calls = Aside(pace=pace, patience_s=0.01, timeout_s=0.05)
    with pytest.raises(TimeoutError, match=r"no answer after 0.05 s \(environment.timeout_s\)"):
        asyncio.run(calls.call(lambda: time.sleep(1000)))


def test_calls_that_never_come_back_end_the_run_before_they_fill_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdapo.environments.aside.MOST_LEFT", 3)
    free = threading.Event()

    async def main() -> None:
        calls = Aside(pace="waits", timeout_s=0.01, max_running=2)
        for _ in range(4):
            with pytest.raises(TimeoutError):
                await calls.call(free.wait)
        with pytest.raises(UserError, match="4 of its calls never came back"):
            await calls.call(free.wait)
        free.set()

    asyncio.run(main())


async def answer(value: str) -> str:
    await asyncio.sleep(0)
    return value


@pytest.mark.parametrize("pace", ["inline", "quick", "waits"])
def test_coroutines_run_in_a_loop_of_their_own_and_are_cancelled_at_the_deadline(pace: Pace) -> None:
    threads, cancelled = [], threading.Event()

    async def hang() -> None:
        threads.append(threading.get_ident())
        try:
            await asyncio.sleep(1000)
        finally:
            cancelled.set()

    async def main() -> None:
        calls = Aside(pace=pace, timeout_s=0.2)
        assert await calls.call(lambda: answer("a")) == "a"
        with pytest.raises(TimeoutError, match=r"no answer after 0\.2 s"):
            await calls.call(hang)
        assert await asyncio.to_thread(cancelled.wait, 60.0)
        calls.close()

    asyncio.run(main())
    assert threads != [threading.get_ident()]


def test_a_coroutine_that_blocks_holds_up_neither_the_loop_nor_the_exit() -> None:
    text = HANGS.replace("call(lambda: time.sleep(1000))", "call(bad)").replace(
        "async def main", "async def bad():\n    time.sleep(1000)\n\nasync def main"
    )
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, timeout=60, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 7


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), KeyboardInterrupt()])
def test_what_a_coroutine_raises_is_raised_where_it_is_waited_for(error: BaseException) -> None:
    async def fail() -> None:
        raise error

    async def main() -> None:
        calls = Aside(pace="waits")
        for _ in range(2):  # the other loop lives on
            with pytest.raises(type(error)) as raised:
                await calls.call(fail)
            assert raised.value is error

    asyncio.run(main())


def test_a_call_whose_caller_has_gone_keeps_its_place_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations are put off at every step: their threads must not pile up, nor end the run as if they hung."""
    monkeypatch.setattr("mdapo.environments.aside.MOST_LEFT", 0)
    running, most, free = 0, 0, threading.Event()
    lock = threading.Lock()

    def work() -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        assert free.wait(60.0)
        with lock:
            running -= 1
        return "over"

    async def main() -> None:
        calls = Aside(pace="waits", timeout_s=60.0, max_running=2)
        for _ in range(5):  # as many pauses
            asked = [asyncio.create_task(calls.call(work)) for _ in range(4)]
            while running < 2:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            assert all(task.cancelled() for task in asked)
        free.set()
        assert await asyncio.gather(*(calls.call(work) for _ in range(4))) == ["over"] * 4
        calls.close()

    asyncio.run(main())
    assert most == 2


def test_a_call_whose_caller_has_gone_gives_its_place_up_at_its_deadline() -> None:
    free = threading.Event()

    async def main() -> None:
        calls = Aside(pace="waits", timeout_s=0.3, max_running=1)
        asked = asyncio.create_task(calls.call(lambda: free.wait(60.0)))
        await asyncio.sleep(0.05)
        asked.cancel()
        assert await calls.call(lambda: "next") == "next"
        assert not free.is_set()
        free.set()
        calls.close()

    asyncio.run(main())


def test_a_coroutine_that_nobody_waits_for_any_more_is_not_begun(recwarn: pytest.WarningsRecorder) -> None:
    """Given up while its place, or its thread, was waited for."""
    begun = []

    async def begin() -> None:
        begun.append(True)

    async def main() -> None:
        calls = Aside(pace="waits", timeout_s=60.0, max_running=1)
        free = threading.Event()
        asked = [asyncio.create_task(calls.call(lambda: (free.wait(60.0), begin())[1])) for _ in range(3)]
        await asyncio.sleep(0.05)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        free.set()
        assert await calls.call(lambda: "next") == "next"
        calls.close()

    asyncio.run(main())
    gc.collect()
    assert begun == [] and not [w for w in recwarn if "never awaited" in str(w.message)]
