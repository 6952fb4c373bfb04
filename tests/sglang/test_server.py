"""The real SGLang server: started, asked, and gone without a trace."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from mdapo.rollout import sglang_server
from mdapo.rollout.sglang_guard import LOOK_S
from mdapo.rollout.sglang_options import ServerOptions
from mdapo.rollout.sglang_server import Server, ServerFailed

from .conftest import START_S
from .stage import PROMPT, lives, processes, scheduler, traces, until

pytestmark = [pytest.mark.sglang, pytest.mark.model, pytest.mark.timeout(2400)]
WITH_WEIGHTS = 900 << 20  # bytes that only a scheduler has
OWNER = """
import asyncio, json, sys, time
from pathlib import Path
from mdapo.rollout.sglang_options import ServerOptions
from mdapo.rollout.sglang_server import Server

async def main():
    server = Server(ServerOptions(**json.loads(sys.argv[1])), log=Path(sys.argv[2]))
    await server.start(float(sys.argv[3]))
    print(server._guard.pid, flush=True)
    time.sleep(3600)

asyncio.run(main())
"""


async def post(server: Server, path: str, body: dict[str, Any], *, key: str | None = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {server.key if key is None else key}"}
    timeout = aiohttp.ClientTimeout(total=300)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(server.url + path, json=body, headers=headers if key != "" else {}) as reply,
    ):
        return reply.status, await reply.json(content_type=None)


def generate(server: Server, ids: list[int], new: int, **params: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True, **params}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    status, reply = asyncio.run(post(server, "/generate", body))
    assert status == 200, reply
    return reply


def leftovers(pids: set[int], before: set[str]) -> list[object]:
    return [*(pid for pid in pids if lives(pid)), *(traces() - before)]


def test_a_dialogue_may_be_as_long_as_max_context(server: Server) -> None:
    most, new = server.options.max_context, 8
    reply = generate(server, (PROMPT * most)[: most - new], new)
    assert len(reply["output_ids"]) == new


def test_only_who_has_the_key_is_answered(server: Server) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    assert asyncio.run(post(server, "/generate", body, key=""))[0] == 401
    assert asyncio.run(post(server, "/generate", body, key="<redacted>"))[0] == 401
    assert asyncio.run(post(server, "/flush_cache", {}, key="x"))[0] == 401
    assert asyncio.run(post(server, "/generate", body))[0] == 200


def test_the_key_is_in_no_command_line_environment_or_log(server: Server) -> None:
    for process in psutil.process_iter():
        try:
            assert server.key not in " ".join(process.cmdline()), process
            assert server.key not in " ".join(process.environ().values()), process
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    said = server.log.read_text(encoding="utf-8")
    assert "'api_key': '<redacted>'" in said, "SGLang writes all its options"
    assert server.key not in said


def test_it_listens_on_loopback_only(server: Server) -> None:
    found = [
        connection.laddr
        for process in processes(server)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert server.url.rsplit(":", 1)[1] in {str(address.port) for address in found}
    assert [a for a in found if not ipaddress.ip_address(a.ip).is_loopback] == []


def test_an_option_that_sglang_does_not_know_is_named(options: ServerOptions, tmp_path: Path) -> None:
    """So is the beginning of one that mdapo gives itself, which else would open the server to every address."""
    for given, said in (("no_such_option", "--no-such-option 5"), ("hos", "--hos 5")):
        wrong = Server(replace(options, engine_args={given: 5}), log=tmp_path / "log")
        with pytest.raises(ServerFailed) as error:
            asyncio.run(wrong.start(START_S))
        assert str(error.value) == f"rollout.engine_args: SGLang refuses an option: unrecognized arguments: {said}"


def test_a_wrong_model_is_told_with_the_logs_reason(options: ServerOptions, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "llama"}')
    before = traces()
    with pytest.raises(ServerFailed) as error:
        asyncio.run(Server(replace(options, model_path=str(tmp_path / "model")), log=tmp_path / "log").start(START_S))
    first = str(error.value).splitlines()[0]
    assert first.startswith(f"an SGLang server for {tmp_path / 'model'} ended with exit code ")
    assert "Error: " in first
    assert traces() - before == set()


def test_a_port_that_is_taken_meanwhile_is_told_and_nothing_is_left(
    options: ServerOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = traces()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(sglang_server, "_free_port", lambda: port)
        monkeypatch.setattr(sglang_server, "PORT_TRIES", 1)
        with pytest.raises(ServerFailed, match=f"cannot listen on 127.0.0.1:{port}: the port is taken"):
            asyncio.run(Server(options, log=tmp_path / "log").start(START_S))
    assert traces() - before == set()


def test_a_server_that_dies_while_it_starts_is_told_with_the_end_of_its_log(
    options: ServerOptions, tmp_path: Path
) -> None:
    """Its scheduler is killed, as the kernel does where memory ends."""
    before, server = traces(), Server(options, log=tmp_path / "log")

    async def work() -> list[int]:
        starting = asyncio.ensure_future(server.start(START_S))
        await until(lambda: server._guard is not None and len(processes(server)) >= 3)
        await until(lambda: scheduler(server).memory_info().rss > WITH_WEIGHTS)  # till then all are of one size
        await asyncio.sleep(1.5 * LOOK_S)  # what was made in the guard's last second of sight may stay
        pids = [process.pid for process in processes(server)]
        scheduler(server).kill()
        with pytest.raises(ServerFailed) as error:
            await starting
        lines = str(error.value).splitlines()
        assert lines[0].startswith(f"an SGLang server for {options.model_path} ended with exit code ")
        assert lines[-1] == f"    (all of it in {tmp_path / 'log'})"
        said = server.log.read_text(encoding="utf-8").splitlines()
        assert [line.strip() for line in lines[-11:-1]] == [line.strip() for line in said[-10:]]
        return pids

    assert leftovers(set(asyncio.run(work())), before) == []


def test_nothing_is_left_when_the_owner_is_killed_and_the_server_hangs(options: ServerOptions, tmp_path: Path) -> None:
    before = traces()
    command = [sys.executable, "-c", OWNER, json.dumps(asdict(options)), str(tmp_path / "log"), str(START_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        guard = psutil.Process(int(owner.stdout.readline()))
        servers = guard.children(recursive=True)
        assert len(servers) >= 3, "the server, its scheduler, its detokenizer"
        time.sleep(3)  # the guard looks at the server's shared memory once a second
        for process in servers:
            os.kill(process.pid, signal.SIGSTOP)
        owner.kill()
    pids, end = {guard.pid, *(p.pid for p in servers)}, time.monotonic() + 120
    while leftovers(pids, before) and time.monotonic() < end:
        time.sleep(0.2)
    assert leftovers(pids, before) == []
