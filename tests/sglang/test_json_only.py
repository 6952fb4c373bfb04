"""What crosses the sockets between us and a real server, in a step and in each way of the weights: JSON, and no pickle.

What our code may import and call is held by ``tests/test_architecture.py``; here the bytes are looked at.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import pickle  # noqa: TID251 - to watch it
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mdapo.rollout.sglang_server import Server
from mdapo.rollout.sglang_servers import Address

from .stage import play, stage, weights, whole

pytestmark = [pytest.mark.sglang, pytest.mark.model, pytest.mark.timeout(900)]
PICKLING = ("dump", "dumps", "load", "loads", "Pickler", "Unpickler")


@dataclass
class Tap:
    """Between us and a server: passes all on, and keeps the requests as (path, content type, body)."""

    port: int  # of the server
    url: str = ""
    requests: list[tuple[str, str, bytes]] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self.port)
            back = asyncio.ensure_future(self.answers(from_server, writer))
            try:
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    first, *lines = head.decode().split("\r\n")
                    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                    body = await reader.readexactly(int(fields.get("content-length", 0)))
                    assert "transfer-encoding" not in fields
                    self.requests.append((first.split(" ")[1], fields.get("content-type", ""), body))
                    to_server.write(head + body)
                    await to_server.drain()
            finally:
                to_server.close()
                back.cancel()
        except (asyncio.IncompleteReadError, OSError):
            pass  # one side has closed the connection

    async def answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(65536):
            writer.write(part)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def tapped(server: Server) -> AsyncGenerator[Tap]:
    tap = Tap(int(server.url.rsplit(":", 1)[1]))
    async with await asyncio.start_server(tap.serve, "127.0.0.1", 0) as listening:
        tap.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        yield tap


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts(part)


def holds_a_pickle(body: bytes) -> bool:
    """Protocol 2 and later begin with 0x80 and their number; in JSON they are written in base64."""
    found = [body]
    for text in texts(json.loads(body)) if body else ():
        try:
            found.append(base64.b64decode(text, validate=True))
        except binascii.Error:
            pass  # any other text
    return any(raw[:1] == b"\x80" and raw[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") for raw in found)


def test_a_pickle_is_found() -> None:
    packed = base64.b64encode(pickle.dumps([1, 2])).decode()
    assert holds_a_pickle(json.dumps({"serialized": [packed]}).encode())
    assert not holds_a_pickle(json.dumps({"names": ["model.norm.weight", "x"], "ids": [1, 2]}).encode())


@pytest.mark.parametrize("mode", ["tensor", "distributed", "disk"])
def test_all_that_a_server_is_sent_is_json_and_nothing_is_pickled(
    server: Server, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickled: list[str] = []

    def noted(name: str) -> Any:
        real = getattr(pickle, name)
        return lambda *args, **kwargs: (pickled.append(name), real(*args, **kwargs))[1]

    async def work() -> list[tuple[str, str, bytes]]:
        async with (
            tapped(server) as tap,
            stage([Address(tap.url, server.key)], tmp_path, mode=mode, groups=2, n=2, restarts=False) as on,
        ):
            for name in PICKLING:
                monkeypatch.setattr(pickle, name, noted(name))
            await on.engine.update_weights(weights(), 1)
            whole(await on.step(1), version=1, groups=2, n=2)
            await on.engine.abort()
            return tap.requests

    requests = play(work())
    assert pickled == []
    paths = {path for path, _, _ in requests}
    assert {"/generate", "/pause_generation", "/update_weight_version", "/continue_generation"} <= paths
    assert paths & {"/update_weights_from_disk", "/update_weights_from_distributed"}
    assert "/update_weights_from_tensor" not in paths, "which takes pickles"
    assert {kind for _, kind, body in requests if body} == {"application/json"}
    assert [path for path, _, body in requests if holds_a_pickle(body)] == []
