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
import torch
from transformers import AutoModelForCausalLM

from mdapo.rollout import sglang_server
from mdapo.rollout.engine import Completion, Request, SamplingParams
from mdapo.rollout.local_engine import LocalEngine
from mdapo.rollout.sglang_options import ServerOptions
from mdapo.rollout.sglang_server import Server, ServerFailed

from .conftest import START_S

pytestmark = [pytest.mark.sglang, pytest.mark.model, pytest.mark.timeout(2400)]
PROMPT = [1, 504, 3575, 282, 4649, 314]  # <|im_start|>The capital of France is
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


def family(server: Server) -> list[psutil.Process]:
    assert server._guard is not None
    return psutil.Process(server._guard.pid).children(recursive=True)


def leftovers(pids: set[int], before: set[str]) -> list[object]:
    running = [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]
    return [*running, *(traces() - before)]


def traces() -> set[str]:
    """What SGLang leaves in shared memory, and the guard's folders."""
    shared = {str(p) for pattern in ("sglang_*", "sem.mp-*", "sgl_*") for p in Path("/dev/shm").glob(pattern)}
    return shared | {str(p) for p in Path("/tmp").glob("mdapo-sgl-*")}


def test_greedy_tokens_are_those_of_transformers_and_of_the_local_engine(server: Server, small_model: Path) -> None:
    reply = generate(server, PROMPT, 24)
    ids = reply["output_ids"]
    logps = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
    reference = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).max(-1)
    assert ids == expected.indices.tolist()
    assert logps == pytest.approx(expected.values.tolist(), abs=1e-4)

    async def local() -> Completion:
        engine = LocalEngine(small_model, dtype="float32", max_running=1, max_context=256, threads=1)
        params = SamplingParams(24, temperature=0.0, ignore_eos=True)
        return await engine.generate(Request(ids=PROMPT, params=params, session="a", group="a", seed=0))

    completion = asyncio.run(local())
    assert list(completion.ids) == ids
    assert logps == pytest.approx(list(completion.logps), abs=1e-4)


def test_a_dialogue_may_be_as_long_as_max_context(server: Server) -> None:
    reply = generate(server, PROMPT, server.options.max_context - len(PROMPT))
    assert len(reply["output_ids"]) == server.options.max_context - len(PROMPT)


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
        for process in family(server)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert server.url.rsplit(":", 1)[1] in {str(address.port) for address in found}
    assert [a for a in found if not ipaddress.ip_address(a.ip).is_loopback] == []


def test_an_option_that_sglang_does_not_know_is_named(options: ServerOptions, tmp_path: Path) -> None:
    wrong = Server(replace(options, engine_args={"no_such_option": 5}), log=tmp_path / "log")
    with pytest.raises(ServerFailed) as error:
        asyncio.run(wrong.start(START_S))
    assert str(error.value) == (
        "rollout.engine_args: SGLang refuses an option: unrecognized arguments: --no-such-option 5"
    )


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
