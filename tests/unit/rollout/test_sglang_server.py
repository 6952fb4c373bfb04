"""What a server's owner promises, with a mock of SGLang that misbehaves on demand; tests/sglang has the real one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from mdapo.errors import UserError
from mdapo.rollout import sglang_server
from mdapo.rollout.sglang_options import ServerOptions
from mdapo.rollout.sglang_server import Server, ServerFailed

FAKE = Path(__file__).with_name("fake_sglang.py")
OWNER = """
import asyncio, sys, time
from pathlib import Path
from mdapo.rollout.sglang_options import ServerOptions
from mdapo.rollout.sglang_server import Server

async def main():
    await Server(ServerOptions("models/m", python=sys.argv[1]), log=Path(sys.argv[2])).start(200)
    print("ready", flush=True)
    time.sleep(600)

asyncio.run(main())
"""
GONE_S = 60.0
START_S = 200.0  # a moment on a machine that has nothing else to do


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FAKE_SGLANG_REPORT", str(tmp_path / "report.json"))
    monkeypatch.delenv("FAKE_SGLANG", raising=False)
    return tmp_path / "report.json"


def make(tmp_path: Path, **args: Any) -> Server:
    return Server(ServerOptions("models/m", python=str(FAKE)), log=tmp_path / "servers" / "0.log", **args)


def told(report: Path) -> dict[str, Any]:
    return json.loads(report.read_text(encoding="utf-8"))


def left(report: Path) -> list[object]:
    """What is still there of a server: processes, shared memory, temporary files."""
    said = told(report)
    running = [pid for pid in said["pids"] if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    return [*running, *(path for path in (said["shm"], said["tmp"]) if os.path.exists(path))]


def wait_until_nothing_is_left(report: Path) -> None:
    end = time.monotonic() + GONE_S
    while left(report) and time.monotonic() < end:
        time.sleep(0.1)
    assert left(report) == []


def test_a_server_starts_answers_and_leaves_nothing(tmp_path: Path, report: Path) -> None:
    async def work() -> None:
        server = make(tmp_path)
        assert not server.alive
        await server.start(START_S)
        assert server.alive
        assert server.url == f"http://127.0.0.1:{told(report)['port']}"
        assert server.key == told(report)["key"] and len(server.key) >= 32
        assert len(left(report)) == 5
        assert stat.S_IMODE(os.stat(server.log).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(told(report)["tmp"]).st_mode) == 0o700
        await server.stop()
        assert not server.alive
        assert left(report) == [], "as soon as stop returns"
        await server.stop()

    asyncio.run(work())


def test_each_start_has_a_key_of_its_own(tmp_path: Path, report: Path) -> None:
    async def work() -> set[str]:
        server, keys = make(tmp_path), set()
        for _ in range(2):
            await server.start(START_S)
            keys.add(server.key)
            await server.stop()
        return keys

    assert len(asyncio.run(work())) == 2


def test_the_key_is_in_no_command_line_environment_or_log(tmp_path: Path, report: Path) -> None:
    async def work() -> None:
        server = make(tmp_path)
        await server.start(START_S)
        try:
            for process in psutil.process_iter():
                try:
                    assert server.key not in " ".join(process.cmdline())
                    assert server.key not in process.environ().values()
                except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
                    continue
            assert server.key not in server.log.read_text()
        finally:
            await server.stop()

    asyncio.run(work())


@pytest.mark.parametrize("stopped", ["server", "guard", "nobody"])
def test_stop_ends_a_server_that_hangs_and_what_left_its_group(tmp_path: Path, report: Path, stopped: str) -> None:
    async def work() -> None:
        server = make(tmp_path)
        await server.start(START_S)
        assert server._guard is not None
        pid = {"server": told(report)["pids"][0], "guard": server._guard.pid}.get(stopped)
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
        await server.stop()
        assert left(report) == []

    asyncio.run(work())


@pytest.mark.parametrize("stop_first", [False, True])
def test_nothing_is_left_when_the_owner_is_killed(tmp_path: Path, report: Path, stop_first: bool) -> None:
    command = [sys.executable, "-c", OWNER, str(FAKE), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "ready\n"
        if stop_first:
            os.kill(told(report)["pids"][0], signal.SIGSTOP)
        owner.kill()
    wait_until_nothing_is_left(report)


def test_processes_die_with_a_guard_that_is_killed(tmp_path: Path, report: Path) -> None:
    """Only the server's own: SGLang's processes ask for the same, as the real test shows."""

    async def work() -> None:
        server = make(tmp_path)
        await server.start(START_S)
        assert server._guard is not None
        server._guard.kill()
        end = time.monotonic() + GONE_S
        while told(report)["pids"][0] in left(report) and time.monotonic() < end:
            await asyncio.sleep(0.1)
        assert told(report)["pids"][0] not in left(report)
        assert not server.alive
        await server.stop()

    try:
        asyncio.run(work())
    finally:
        for pid in told(report)["pids"][1:]:  # the mock's children, which do not ask for it
            os.kill(pid, signal.SIGKILL)
        os.unlink(told(report)["shm"])
        os.rmdir(told(report)["tmp"])  # else a later guard does, in a minute


def test_a_server_that_dies_is_seen_and_cleaned_up_after(tmp_path: Path, report: Path) -> None:
    async def work() -> None:
        server = make(tmp_path)
        await server.start(START_S)
        os.kill(told(report)["pids"][0], signal.SIGKILL)
        end = time.monotonic() + GONE_S
        while server.alive and time.monotonic() < end:
            await asyncio.sleep(0.1)
        assert not server.alive
        assert [p for p in left(report) if isinstance(p, int)] == []
        if os.path.exists(told(report)["shm"]):  # it was killed before the guard had a look at what it uses
            os.unlink(told(report)["shm"])
        await server.stop()
        await server.start(START_S)
        await server.stop()

    asyncio.run(work())


def test_a_start_that_fails_says_the_reason_of_the_log(
    tmp_path: Path, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SGLANG", "dies")
    server = make(tmp_path)
    with pytest.raises(ServerFailed) as error:
        asyncio.run(server.start(START_S))
    first, *rest = str(error.value).splitlines()
    assert first == "an SGLang server for models/m ended with exit code 1: OSError: models/m has no weights"
    assert "    Traceback (most recent call last):" in rest
    assert rest[-1] == f"    (all of it in {server.log})"
    assert not server.alive


def test_an_option_that_sglang_does_not_know_is_named(
    tmp_path: Path, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SGLANG", "refuses")
    with pytest.raises(ServerFailed) as error:
        asyncio.run(make(tmp_path).start(START_S))
    assert str(error.value) == "rollout.engine_args: SGLang refuses an option: unrecognized arguments: --no-such 5"


def test_a_start_has_a_deadline_and_leaves_nothing(
    tmp_path: Path, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SGLANG", "hangs")
    with pytest.raises(ServerFailed, match=r"was not ready after 3 s \(rollout.start_timeout_s\)"):
        asyncio.run(make(tmp_path).start(3))
    if report.exists():  # a slow machine may not have got that far
        assert left(report) == []


def test_a_start_that_is_cancelled_leaves_nothing(
    tmp_path: Path, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SGLANG", "hangs")

    async def work() -> None:
        task = asyncio.create_task(make(tmp_path).start(600))
        while not report.exists() or not report.read_text():
            await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    assert left(report) == []


def test_a_port_that_is_taken_meanwhile_makes_it_choose_another(
    tmp_path: Path, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken, choose = other.getsockname()[1], sglang_server._free_port
        ports = [taken, choose()]
        monkeypatch.setattr(sglang_server, "_free_port", lambda: ports.pop(0))

        async def work() -> None:
            server = make(tmp_path)
            await server.start(START_S)
            assert not server.url.endswith(f":{taken}")
            await server.stop()

        asyncio.run(work())
    assert list(Path("/dev/shm").glob("mdapo_fake_*")) == [], "not the first one's either"


def test_a_port_that_was_asked_for_and_is_taken_is_one_clear_error(tmp_path: Path, report: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ServerFailed) as error:
            asyncio.run(make(tmp_path, port=port).start(START_S))
    assert str(error.value) == f"an SGLang server cannot listen on 127.0.0.1:{port}: the port is taken; choose another"
    assert left(report) == []


def test_a_log_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "servers").write_text("a file")
    with pytest.raises(UserError, match="the log of an SGLang server cannot be written"):
        asyncio.run(make(tmp_path).start(START_S))
