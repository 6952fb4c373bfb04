"""A scripted stand-in for an SGLang server that misbehaves as no real one can be made to; it speaks HTTP by hand.

Where it behaves, it answers as SGLang 0.5.19 does: tokens are a function of prompt and seed alone (``tokens_of``),
log-probs of the token alone (``logp_of``), so that a test can tell every token that is none of its. Only the standard
library: as a program, ``python hostile_server.py VERSION TOKEN_S`` prints its port and serves until it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

STOP, VOCAB, POISON = 1, 100, -9.0  # POISON: the log-prob in every bad reply that has tokens
# Not that of other processes' servers, which may get a port that has just become free; children inherit it.
KEY = os.environ.setdefault("HOSTILE_SERVER_KEY", f"the-key-of-process-{os.getpid()}")
Script = Callable[[int], str]  # number of the request for tokens -> a misdeed, "" for none


def tokens_of(prompt: Sequence[int], seed: int, limit: int) -> list[int]:
    """1 to 12 tokens, the last one STOP unless ``limit`` cuts it."""
    digest = hashlib.sha256(json.dumps([list(prompt), seed]).encode()).digest()
    words = [2 + byte % (VOCAB - 2) for byte in digest[1 : 1 + digest[0] % 12]]
    return [*words, STOP][:limit]


def logp_of(token: int) -> float:
    return -(token + 1) / 128.0


def completion(asked: dict[str, Any], tokens: Sequence[int], finish: dict[str, Any], version: str) -> dict[str, Any]:
    """A reply of /generate as SGLang 0.5.19 gives it."""
    prompt = asked["input_ids"]
    return {
        "text": "words",
        "output_ids": list(tokens),
        "meta_info": {
            "id": asked["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "cached_tokens": len(prompt) // 2,
            "weight_version": version,
            "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
            "output_token_logprobs": [[logp_of(t), t, None] for t in tokens],
            "output_token_logprobs_length": len(tokens),
        },
    }


def poisoned(reply: dict[str, Any], **changes: Any) -> bytes:
    """The reply with ``POISON`` for log-probs and fields of it or of its meta_info replaced."""
    meta = reply["meta_info"]
    meta["output_token_logprobs"] = [[POISON, t, None] for t in reply["output_ids"]]
    for name, value in changes.items():
        (reply if name in reply else meta)[name] = value
    return json.dumps(reply).encode()


def http(body: bytes, *, status: int = 200, kind: str = "application/json", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


async def hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def drip(writer: asyncio.StreamWriter, head: bytes, drop: bytes, pause_s: float) -> None:
    """A little at a time, without end: each piece comes well within any time-out between two bytes."""
    writer.write(head)
    while True:
        writer.write(drop)
        await writer.drain()
        await asyncio.sleep(pause_s)


async def reset(writer: asyncio.StreamWriter, before: bytes) -> None:
    if before:
        writer.write(before)
        await writer.drain()
    with contextlib.suppress(OSError):  # closed already
        writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def flood(writer: asyncio.StreamWriter, head: bytes) -> None:
    """A gigabyte."""
    writer.write(head)
    piece = b" " * 65536
    for _ in range(16384):
        writer.write(piece)
        await writer.drain()


Reply = dict[str, Any]
Misdeed = Callable[[asyncio.StreamWriter, Reply], Awaitable[None]]


def says(make: Callable[[Reply], bytes]) -> Misdeed:
    async def misdeed(writer: asyncio.StreamWriter, reply: Reply) -> None:
        writer.write(make(reply))
        await writer.drain()

    return misdeed


def changed(**changes: Callable[[Reply], Any]) -> Misdeed:
    return says(lambda reply: http(poisoned(reply, **{name: make(reply) for name, make in changes.items()})))


def logps(reply: Reply, change: Callable[[list[Any]], list[Any]]) -> list[Any]:
    return change([[POISON, t, None] for t in reply["output_ids"]])


ENDLESS = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
GIGABYTE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1073741824\r\n\r\n"
RETRIED: dict[str, Misdeed] = {  # another server may be asked
    "silent": lambda writer, _: hang(writer),
    "dripping": lambda writer, _: drip(writer, ENDLESS, b"1\r\n \r\n", 0.02),
    "dripping header": lambda writer, _: drip(writer, b"HTTP/1.1 200 OK\r\nX: ", b"a", 0.02),
    "endless headers": lambda writer, _: drip(writer, b"HTTP/1.1 200 OK\r\n", b"X-H: " + b"a" * 900 + b"\r\n", 0.0),
    "reset": lambda writer, _: reset(writer, b""),
    "reset in the body": lambda writer, reply: reset(writer, http(json.dumps(reply).encode())[:-40]),
    "500": says(lambda _: http(b"Internal Server Error", status=500, kind="text/plain")),
    "503": says(lambda _: http(b'{"detail": "The request queue is full."}', status=503)),
    "truncated JSON": says(lambda reply: http(json.dumps(reply).encode()[:-40])),
    "an empty body": says(lambda _: http(b"")),
    "HTML": says(lambda _: http(b"<html>It works!</html>", kind="text/html")),
    "HTML that says it is JSON": says(lambda _: http(b"<html>It works!</html>")),
    "not HTTP": says(lambda _: b"220 mail.example ESMTP\r\n\r\n"),
    "a list": says(lambda _: http(b"[]")),
    "no meta_info": says(lambda reply: http(json.dumps({"output_ids": reply["output_ids"]}).encode())),
    "nested": says(lambda _: http(b"[" * 200_000)),
    "another request's": changed(id=lambda _: "f" * 32),
    "NaN": changed(output_token_logprobs=lambda r: logps(r, lambda v: [[float("nan"), *v[0][1:]], *v[1:]])),
    "null for NaN": changed(output_token_logprobs=lambda r: logps(r, lambda v: [[None, *v[0][1:]], *v[1:]])),
    "infinite": changed(output_token_logprobs=lambda r: logps(r, lambda v: [[-1e999, *v[0][1:]], *v[1:]])),
    "positive": changed(output_token_logprobs=lambda r: logps(r, lambda v: [[0.5, *v[0][1:]], *v[1:]])),
    "a log-prob too few": changed(output_token_logprobs=lambda r: logps(r, lambda v: v[:-1])),
    "a log-prob too many": changed(output_token_logprobs=lambda r: logps(r, lambda v: [*v, v[-1]])),
    "no log-probs": changed(output_token_logprobs=lambda _: None),
    "another token's log-prob": changed(output_token_logprobs=lambda r: logps(r, lambda v: [[POISON, 0], *v[1:]])),
    "wrong version": changed(weight_version=lambda _: "12345"),
    "mixed versions": changed(
        weight_versions=lambda r: [
            {"version": "12345", "start": 0, "end": 1},
            {"version": r["meta_info"]["weight_version"], "start": 1, "end": len(r["output_ids"])},
        ]
    ),
    "a gap of versions": changed(weight_versions=lambda _: [{"version": "7", "start": 1, "end": 2}]),
    "id beyond the vocabulary": changed(output_ids=lambda r: [*r["output_ids"][:-1], VOCAB]),
    "negative id": changed(output_ids=lambda r: [*r["output_ids"][:-1], -1]),
    "fraction for an id": changed(output_ids=lambda r: [1.0] * len(r["output_ids"])),
    "true for an id": changed(output_ids=lambda r: [True] * len(r["output_ids"])),
    "text for ids": changed(output_ids=lambda _: "1"),
    "unknown finish": changed(finish_reason=lambda _: {"type": "tired"}),
    "unfinished": changed(finish_reason=lambda _: None),
    "NaN happened": changed(finish_reason=lambda _: {"type": "stop", "matched": "NaN happened"}),
    "prompt cut": changed(prompt_tokens=lambda _: 1),
    "more cached than asked": changed(cached_tokens=lambda _: 10_000_000),
    "a gigabyte announced": lambda writer, _: flood(writer, GIGABYTE),
    "a gigabyte unannounced": lambda writer, _: flood(writer, ENDLESS + b"40000000\r\n"),
    "packed": says(lambda r: http(json.dumps(r).encode(), more="Content-Encoding: gzip\r\n")),
    "204": says(lambda _: b"HTTP/1.1 204 X\r\n\r\n"),
}
REFUSED: dict[str, Misdeed] = {  # never retried
    "400": says(lambda _: http(b'{"error": {"message": "no"}}', status=400)),
    "401": says(lambda _: http(b'{"error": "Unauthorized, not ' + KEY.encode() + b'"}', status=401)),
    "429": says(lambda _: http(b"{}", status=429)),
    "redirect": says(lambda _: http(b"", status=307, more="Location: http://127.0.0.1:1/generate\r\n")),
    "cut short": changed(
        output_ids=lambda r: r["output_ids"][:0],
        output_token_logprobs=lambda _: [],
        completion_tokens=lambda _: 0,
        weight_versions=lambda _: [],
        finish_reason=lambda _: {"type": "length", "length": 0},
    ),
}
ABORTED = {"aborted by others": changed(finish_reason=lambda _: {"type": "abort", "message": "Aborted"})}
MISDEEDS = {**RETRIED, **REFUSED, **ABORTED}


class HostileServer:
    """``async with HostileServer(...) as server``. ``token_s`` seconds a token; ``requests`` counts by path, ``deeds``
    by misdeed; ``running`` has the rids under way, ``aborted`` those that an abort reached; ``ill``: no health, until
    it is told to go on."""

    def __init__(self, script: Script = lambda _: "", *, version: str = "0", token_s: float = 0.0) -> None:
        self.script, self.version, self.token_s, self.architecture = script, version, token_s, "A"
        self.requests: Counter[str] = Counter()
        self.deeds: Counter[str] = Counter()
        self.rids: list[str] = []
        self.running: dict[str, asyncio.Event] = {}
        self.aborted: list[str] = []
        self.folders: list[str] = []
        self.ill = False
        self.deaf = False  # to aborts
        self.refuse_weights = False
        self.away: set[str] = set()  # memory that it gave back
        self.vocab = VOCAB
        self.started_from = "m"
        self.original_logprobs = False  # as with SGLANG_RETURN_ORIGINAL_LOGPROB
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """As the kernel ends a killed process's connections: resets, and nothing listens."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            await reset(writer, b"")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.running.clear()

    async def __aenter__(self) -> HostileServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")
                fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                if not await self._answer(first.split(" ")[1], fields, json.loads(body or b"null"), writer):
                    break
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has gone, or this server is killed
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            with contextlib.suppress(OSError):
                writer.close()

    async def _answer(self, path: str, fields: dict[str, str], body: Any, writer: asyncio.StreamWriter) -> bool:
        """False when the connection has had its last answer."""
        self.requests[path] += 1
        answer = b"{}"
        if path != "/health" and fields.get("authorization") != f"Bearer {KEY}":
            writer.write(http(b'{"error": "Unauthorized"}', status=401))
            return True
        if path == "/generate":
            return await self._generate(body, writer)
        if path == "/health" and self.ill:
            writer.write(http(b"", status=503))
            return True
        if path == "/abort_request" and self.deaf:
            writer.write(http(b"", status=404))
            return True
        if path == "/abort_request":
            for rid in [r for r in self.running if body.get("abort_all") or r.startswith(body["rid"])]:
                self.aborted.append(rid)
                self.running[rid].set()
        elif path in ("/release_memory_occupation", "/resume_memory_occupation") and self.refuse_weights:
            writer.write(http(b"no memory saver", status=400))
            return True
        elif path == "/release_memory_occupation":
            self.away |= set(body["tags"])
        elif path == "/resume_memory_occupation":
            self.away -= set(body["tags"])
        elif path == "/pause_generation":
            for stopped in self.running.values():
                stopped.set()
        elif path == "/continue_generation":
            self.ill = False
        elif path == "/model_info":
            known = {"model_path": "m", "architectures": [self.architecture], "weight_version": self.version}
            answer = json.dumps(known).encode()
        elif path == "/server_info":
            said = {"max_req_input_len": 4096, "enable_deterministic_inference": True, "model_path": self.started_from}
            answer = json.dumps(said).encode()
        elif path == "/update_weights_from_disk":
            self.folders.append(body["model_path"])
            if self.refuse_weights:
                writer.write(http(b'{"success": false, "message": "no such folder"}', status=400))
                return True
            answer = b'{"success": true, "message": "ok", "num_paused_requests": 0}'
        elif path == "/update_weight_version":
            self.version = body["new_version"]
            answer = b'{"success": true, "message": "ok"}'
        writer.write(http(answer))
        await writer.drain()
        return True

    async def _generate(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        sampling = asked["sampling_params"]
        if max(asked.get("token_ids_logprob", [0])) >= self.vocab:
            writer.write(http(b'{"error": {"message": "out-of-vocabulary token id"}}', status=400))
            return True
        if "token_ids_logprob" in asked:
            scale = 1.0 if self.original_logprobs else sampling.get("temperature", 1.0)
            pairs = [[-float(token + 1) / scale, token, None] for token in asked["token_ids_logprob"]]
            writer.write(http(json.dumps({"meta_info": {"output_token_ids_logprobs": [pairs]}}).encode()))
            return True
        rid = asked["rid"]
        number = len(self.rids)
        self.rids.append(rid)
        tokens = tokens_of(asked["input_ids"], sampling["sampling_seed"], sampling["max_new_tokens"])
        stopped = asyncio.Event()
        self.running[rid] = stopped
        made = 0
        try:
            while made < len(tokens) and not stopped.is_set():
                if self.token_s:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(stopped.wait(), self.token_s)
                made += not stopped.is_set()
            finish: dict[str, Any] = {"type": "length", "length": len(tokens)}
            if made < len(tokens):
                finish = {"type": "abort", "message": "Abort"}
            elif tokens[-1] == STOP:
                finish = {"type": "stop", "matched": STOP}
            reply = completion(asked, tokens[:made], finish, self.version)
            misdeed = self.script(number)
            self.deeds[misdeed] += 1
            if not misdeed:
                writer.write(http(json.dumps(reply).encode()))
                await writer.drain()
                return True
            await MISDEEDS[misdeed](writer, reply)
            return False
        finally:
            self.running.pop(rid, None)


async def main(version: str, token_s: float) -> None:
    async with HostileServer(version=version, token_s=token_s) as server:
        print(server.port, flush=True)
        await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
