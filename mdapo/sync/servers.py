"""What a weight sync needs of a server, and the servers of one sync: those it still reaches and those it lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from mdapo.errors import shortened
from mdapo.rollout.engine import EngineError

T = TypeVar("T")


FLUSH_EVERY_S = 0.05


class Info(Protocol):
    """What a server says of itself."""

    @property
    def version(self) -> str:
        """Of its weights; "default" from a server that never got any."""
        ...


class Server(Protocol):
    """One SGLang server (``rollout.sglang_client.Client`` is one). Every call ends within ``deadline_s`` seconds;
    ``EngineError``: no usable answer came."""

    @property
    def url(self) -> str: ...

    async def post(self, path: str, body: Any, *, deadline_s: float) -> Any:
        """The JSON value of an answer with status 200; any other status is an ``EngineError`` with its message."""
        ...

    async def flush_cache(self, *, deadline_s: float) -> None:
        """Forget every cached prefix; ``EngineError`` while requests run."""
        ...

    async def info(self, *, deadline_s: float) -> Info: ...


@dataclass
class Fleet:
    """The servers of one sync. A server that fails once is left out from then on, and is in ``failed``.

    ``unhurt`` are those of them that failed only with another one (a broadcast that lost a member): worth a second try.
    ``renewed`` were started, or got weights from somebody else, since they were last given some.
    """

    left: list[Server]
    failed: dict[str, str] = field(default_factory=dict)
    unhurt: set[str] = field(default_factory=set)
    renewed: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, servers: Iterable[Server]) -> Fleet:
        return cls(list(servers))

    def lose(self, server: Server, reason: str, *, unhurt: bool = False) -> None:
        """Leave it out; the first reason stands."""
        self.left = [other for other in self.left if other is not server]
        self.failed.setdefault(server.url, shortened(reason, limit=500))
        if unhurt:
            self.unhurt.add(server.url)

    async def each(self, call: Callable[[Server], Awaitable[T]]) -> list[tuple[Server, T]]:
        """``call`` on all that are left, together; one whose call raises ``EngineError`` is lost."""
        servers = list(self.left)
        answers = await asyncio.gather(*(call(server) for server in servers), return_exceptions=True)
        good: list[tuple[Server, T]] = []
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, EngineError):
                self.lose(server, str(answer))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                good.append((server, answer))
        return good


async def ordered(server: Server, path: str, body: Mapping[str, Any], *, deadline_s: float) -> None:
    """POST to an endpoint that answers ``{"success": ..., "message": ...}``.

    ``EngineError``: it said no, or something else altogether.
    """
    answer = await server.post(path, body, deadline_s=deadline_s)
    if not isinstance(answer, Mapping) or answer.get("success") is not True:
        message = answer.get("message") if isinstance(answer, Mapping) else answer
        raise EngineError(f"{server.url}: {path} answered {shortened(str(message))!r}")


async def still(server: Server, *, deadline_s: float) -> None:
    """End what runs, let nothing new begin, and forget what is cached.

    The cache is flushed by itself and not as part of an update or a release: a scheduler that still has a batch in hand
    refuses the first, and ends its process in the others.
    """
    await server.post("/pause_generation", {"mode": "abort"}, deadline_s=deadline_s)
    end = time.monotonic() + deadline_s
    while True:
        try:
            return await server.flush_cache(deadline_s=deadline_s)
        except EngineError:
            if time.monotonic() > end:
                raise
        await asyncio.sleep(FLUSH_EVERY_S)
