"""A call that hangs is given up by whoever waits for it; a quick one is back before anything else happens."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mdapo.config.schema import Plugin
from mdapo.environments.aside import Aside
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
