"""The servers of an engine: who serves, who is watched, started again, and brought the newest weights."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mdapo.config.paths import key_in
from mdapo.config.schema import Config
from mdapo.errors import UserError, shortened
from mdapo.rollout.engine import Completion, EngineError
from mdapo.rollout.health import Health, HealthLimits, State
from mdapo.rollout.sglang_client import Client
from mdapo.rollout.sglang_replies import NothingListens, Refused
from mdapo.rollout.sglang_timing import Timing

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
FLUSH_TRIES = 10


@dataclass(frozen=True)
class Address:
    """Where a server is, and the key that it asks for ("" for none)."""

    url: str
    key: str = field(default="", repr=False)


def _tell_broken(watcher: asyncio.Task[None]) -> None:
    """A server that nobody watches any more is still judged by its work."""
    if not watcher.cancelled() and (error := watcher.exception()) is not None:
        log.error("watching a server ended with an error", exc_info=error)


def external(config: Config) -> tuple[list[Address], Address | None]:
    """The servers of ``rollout.urls``, and the router before them. ``UserError``: a key file that cannot be used."""
    rollout, key = config.rollout, ""
    if rollout.key_file is not None:
        key, why = key_in(rollout.key_file)
        if why:
            raise UserError(f"rollout.key_file={rollout.key_file}: {why}")
    router = None if rollout.router is None else Address(rollout.router, key)
    return [Address(url, key) for url in rollout.urls], router


# Stop what is left of the server, start it again, and say where it is once it answers.
Restart = Callable[[Address], Awaitable[Address]]
# Bring all servers all weights, each tensor once, as a version; the answer says which failed (by URL), and why.
Sync = Callable[[Sequence[Client], "Iterable[tuple[str, torch.Tensor]]", int], Awaitable[Mapping[str, str]]]
# Let servers give the memory of their weights back; the answer says which did not (by URL), and why.
Release = Callable[[Sequence[Client]], Awaitable[Mapping[str, str]]]
# Bring one server, which has just started, the weights of the newest version, without the trainer.
Resync = Callable[[Client, int], Awaitable[None]]


@dataclass(eq=False)
class Flight:
    """One request at one server. ``why``: why it was cut off."""

    rid: str
    session: str
    server: Server
    prompt_tokens: int
    task: asyncio.Task[Completion]
    why: str = ""
    ending: asyncio.Task[None] | None = None

    def cut(self, why: str) -> None:
        """Close the connection, upon which SGLang gives the request up within seconds."""
        self.why = self.why or why
        self.task.cancel()


@dataclass(eq=False)
class Server:
    """One place to ask for tokens: a server, or a router with ``workers`` behind it, which are one server then."""

    address: Address
    client: Client
    health: Health
    workers: tuple[Client, ...] = ()
    flights: set[Flight] = field(default_factory=set)
    watcher: asyncio.Task[None] | None = None
    revival: asyncio.Task[None] | None = None
    poke: asyncio.Event = field(default_factory=asyncio.Event)  # look at it now

    @property
    def url(self) -> str:
        return self.address.url

    @property
    def control(self) -> tuple[Client, ...]:
        """Who takes weights, and whom an abort must reach: a router passes neither on."""
        return self.workers or (self.client,)

    async def drop_caches(self, timing: Timing) -> None:
        """A scheduler with a batch in hand refuses at first; one with requests of others goes on refusing."""
        await asyncio.gather(*(self._drop_cache(client, timing) for client in self.control))

    async def _drop_cache(self, client: Client, timing: Timing) -> None:
        for tries_left in reversed(range(FLUSH_TRIES)):
            try:
                return await client.flush_cache(deadline_s=timing.probe_s)
            except Refused as error:
                if not tries_left:
                    log.warning("%s: its cache was not dropped, it has requests of others: %s", client.url, error)
            except EngineError as error:
                return self.health.failed(str(error), began=self.health.clock())
            await asyncio.sleep(timing.flush_again_s)
        return None


class Fleet:
    """All servers and their states. ``notify`` hears a line for each change of a state."""

    def __init__(
        self,
        addresses: Sequence[Address],
        make_client: Callable[[Address], Client],
        *,
        router: Address | None = None,
        timing: Timing,
        limits: HealthLimits,
        restart: Restart | None,
        resync: Resync | None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random,
        notify: Callable[[str], object],
    ) -> None:
        self.make_client, self.timing, self.restart, self.resync = make_client, timing, restart, resync
        self.clock, self.rng, self.notify = clock, rng, notify
        self.version = 0
        self.changed = asyncio.Event()  # set, and replaced, at each change of a state
        self._weights = asyncio.Lock()
        self.servers: list[Server] = []
        assert router is None or restart is None, "who starts servers again needs no router before them"
        for address in addresses if router is None else [router]:
            health = Health(can_restart=restart is not None, limits=limits, clock=clock)
            workers = () if router is None else tuple(map(make_client, addresses))
            server = Server(address, make_client(address), health, workers)
            health.notify = lambda old, new, why, server=server: self._heard(server, old, new, why)
            self.servers.append(server)

    def _heard(self, server: Server, old: State, new: State, why: str) -> None:
        if not self._weights.locked():  # while weights are brought, only what goes wrong is news
            self.notify(f"{server.url}: {old} -> {new}: {shortened(why)}")
        if new in (State.DEAD, State.RETIRED):
            for flight in list(server.flights):
                flight.cut(f"{server.url}: {new}: {why}")
            server.poke.set()
        self.changed.set()
        self.changed = asyncio.Event()

    # ---- who serves ------------------------------------------------------------------------------------------------

    @property
    def serving(self) -> list[Server]:
        """The healthy servers that have the newest weights; where there are none, the suspects that have them."""
        found = [server for server in self.servers if server.health.serves(self.version)]
        return [server for server in found if server.health.state is State.HEALTHY] or found

    @property
    def hope(self) -> bool:
        """Whether a server may yet serve without the trainer's help."""
        return self.resync is not None and any(s.health.state is not State.RETIRED for s in self.servers)

    def causes(self) -> str:
        """Each server's state and why, for an error."""
        return "; ".join(f"{s.url} is {s.health.state} ({shortened(s.health.cause)})" for s in self.servers)

    # ---- watching --------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Ask each server after its health from now on. Only while somebody waits for tokens: the event loop stands
        still while the actor trains, and a question asked before would seem to have had no answer."""
        for server in self.servers:
            if server.watcher is None or server.watcher.done():
                server.watcher = asyncio.create_task(self._watch(server))
                server.watcher.add_done_callback(_tell_broken)

    def unwatch(self) -> None:
        """No more questions; a restart under way goes on."""
        for server in self.servers:
            if server.watcher is not None:
                server.watcher.cancel()
                server.watcher = None

    async def _watch(self, server: Server) -> None:
        while server.health.state is not State.RETIRED:
            due, every = server.health.restart_at, self.timing.probe_every_s
            wait = every * (0.8 + 0.4 * self.rng.random()) if due is None else max(0.0, due - self.clock())
            try:
                await asyncio.wait_for(server.poke.wait(), wait)
            except TimeoutError:
                await self._look(server)
            server.poke.clear()

    async def _look(self, server: Server) -> None:
        health, began = server.health, self.clock()
        if health.begin_restart():
            self._begin_revival(server)
        if server.revival is not None:
            await asyncio.shield(server.revival)
            return
        if health.restart_at is not None:
            return
        try:
            await self._probe(server)
        except NothingListens as error:
            health.died(str(error))
        except EngineError as error:
            health.silent(str(error), began=began)
        else:
            health.answered(began=began)
            await self._bring(server)

    async def _probe(self, server: Server) -> None:
        """Of a server that serves, whether it makes tokens; of others only whether they answer: a sync that failed left
        them paused, and the weights, which wake them, come after this. ``EngineError``: no answer."""
        if server.health.serves(self.version):
            await server.client.health(deadline_s=self.timing.probe_s)
        else:
            for client in server.control:
                await client.version(deadline_s=self.timing.probe_s)

    def _begin_revival(self, server: Server) -> None:
        server.revival = asyncio.create_task(self._revive(server))

    async def _revive(self, server: Server) -> None:
        assert self.restart is not None
        try:
            async with asyncio.timeout(self.timing.start_s):
                address = await self.restart(server.address)
            server.client = self.make_client(address)
            server.address = address
        except Exception as error:  # noqa: BLE001 - whatever it is, the server is not there; others may be
            server.health.start_failed(f"its restart failed: {str(error) or type(error).__name__}")
        else:
            server.health.started()
            await self._bring(server)
        finally:
            server.revival = None

    async def _bring(self, server: Server) -> None:
        """The newest weights to a stale server, where that can be done without the trainer."""
        if self.resync is None or server.health.state is not State.STALE:
            return
        async with self._weights:
            began, version = self.clock(), self.version
            if server.health.state is not State.STALE:
                return
            try:
                await asyncio.gather(*(self.resync(client, version) for client in server.control))
                await self._verify(server, version)
            except (EngineError, OSError) as error:
                self._did_not_take(server, version, error, began)
            else:
                server.health.synced(version)
                self.notify(f"{server.url}: {State.STALE} -> {server.health.state}: {server.health.cause}")

    # ---- weights ---------------------------------------------------------------------------------------------------

    async def update(self, sync: Sync, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Bring all servers new weights. From its start on all are stale, and each serves again when it says that it
        has ``version``. ``EngineError`` when none has."""
        await self._roll_call()
        async with self._weights:
            takers = [server for server in self.servers if server.health.answers]
            for server in self.servers:
                server.health.missed(f"an update to version {version} began and was not finished")
            if not takers:
                raise EngineError(f"no server is there to take the weights: {self.causes()}")
            began = self.clock()
            failed = await sync([client for server in takers for client in server.control], weights, version)
            self.version = version
            await asyncio.gather(*(self._confirm(server, version, failed, began) for server in takers))
        if not self.serving:
            raise EngineError(f"no server took the weights of version {version}: {self.causes()}")

    async def give_back(self, release: Release) -> None:
        """From now on no server has weights, until the next update; one that keeps its memory is told, and suspect. A
        restart is waited for: that server would take its memory while the actor has it."""
        await asyncio.gather(*(asyncio.shield(s.revival) for s in self.servers if s.revival is not None))
        async with self._weights:
            givers, began = [server for server in self.servers if server.health.answers], self.clock()
            for server in givers:
                server.health.missed("it gave its memory back while the actor trains")
            failed = await release([client for server in givers for client in server.control])
            for server in givers:
                if reasons := [failed[client.url] for client in server.control if client.url in failed]:
                    why = f"it did not give its memory back: {'; '.join(reasons)}"
                    server.health.failed(why, began=began)
                    self.notify(f"{server.url}: {server.health.state}: {shortened(why)}")

    async def _confirm(self, server: Server, version: int, failed: Mapping[str, str], began: float) -> None:
        try:
            if reasons := [failed[client.url] for client in server.control if client.url in failed]:
                raise EngineError("; ".join(reasons))
            await self._verify(server, version)
        except EngineError as error:
            self._did_not_take(server, version, error, began)
        else:
            server.health.synced(version)

    def _did_not_take(self, server: Server, version: int, error: Exception, began: float) -> None:
        why = f"it did not take version {version}: {error}"
        server.health.missed(why)
        server.health.failed(why, began=began)
        self.notify(f"{server.url}: {server.health.state}: {shortened(why)}")

    async def _verify(self, server: Server, version: int) -> None:
        for client in server.control:
            found = await client.version(deadline_s=self.timing.probe_s)
            if found != str(version):
                raise EngineError(f"{client.url}: it says that it has version {shortened(repr(found), limit=40)}")

    async def _roll_call(self) -> None:
        """Find out who is there, without a token; start again who is not. A restart is waited for where the server
        could not catch up later, or nobody else is there; the budget of restarts ends this."""
        while True:
            await asyncio.gather(*map(self._reach, self.servers))
            pending = [server.revival for server in self.servers if server.revival is not None]
            if self.resync is None or not any(server.health.answers for server in self.servers):
                await asyncio.gather(*map(asyncio.shield, pending))
            if not pending or any(server.health.answers for server in self.servers):
                return

    async def _reach(self, server: Server) -> None:
        health = server.health
        if health.state in (State.RETIRED, State.RESTARTING):
            return
        if health.restart_at is None:
            await self._call(server)
        if (due := health.restart_at) is not None:
            await asyncio.sleep(max(0.0, due - self.clock()))
            if health.begin_restart():
                self._begin_revival(server)

    async def _call(self, server: Server) -> None:
        """Until it answers, or is dead by what it leaves unanswered in a row."""
        health = server.health
        while True:
            began = self.clock()
            try:
                for client in server.control:
                    await client.version(deadline_s=self.timing.probe_s)
                return health.answered(began=began)
            except NothingListens as error:
                health.died(str(error))
            except EngineError as error:
                health.silent(str(error), began=began)
            if not health.answers:
                return None
            await asyncio.sleep(self.timing.backoff_s)

    async def close(self) -> None:
        """End what runs in the background."""
        self.unwatch()
        pending = [server.revival for server in self.servers if server.revival is not None]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
