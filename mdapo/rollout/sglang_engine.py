"""The engine over SGLang servers: turns routed to where their prefixes are, asked again elsewhere when a server fails.

What reaches an episode was made by one server, in one answer, by weights of ``version``, and has passed every check of
``sglang_replies.py``. What was begun is ended: a turn whose caller has gone is aborted at its server.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp

from mdapo.errors import UserError
from mdapo.rollout.engine import Completion, EngineError, Request
from mdapo.rollout.health import HealthLimits
from mdapo.rollout.sglang_check import ask
from mdapo.rollout.sglang_client import Client, ServerInfo
from mdapo.rollout.sglang_openings import Openings
from mdapo.rollout.sglang_replies import BadReply, NothingListens, Refused, Unavailable, WrongVersion
from mdapo.rollout.sglang_routing import Routes
from mdapo.rollout.sglang_servers import Address, Fleet, Flight, Release, Restart, Resync, Server, Sync
from mdapo.rollout.sglang_timing import Timing

if TYPE_CHECKING:
    import torch

    from mdapo.config.model_facts import ModelFacts

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Call:
    """One turn that somebody waits for."""

    request: Request
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    tried: list[str] = field(default_factory=list)
    cause: str = "no server serves"  # why it has no answer yet


class SGLangEngine:
    """``Engine`` over the servers at ``addresses``; made and used in one running event loop.

    ``session`` (``open_session()``) is closed with the engine. ``sync`` brings weights; with ``resync`` a server that
    was started again serves in the middle of a step, else after the next update. Without ``restart`` a dead server
    comes back only by answering. ``max_running`` turns are open at one server at a time. With ``router`` (SGLang's own)
    turns go there and weights and aborts to the servers behind it, at ``addresses``: one place to ask, without routes
    of ours. ``share_prompts``: a group's prompt is computed once, by a request of its own, before its turns are asked.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        session: aiohttp.ClientSession,
        vocab_size: int,
        sync: Sync,
        resync: Resync | None = None,
        restart: Restart | None = None,
        router: Address | None = None,
        max_running: int = 64,
        share_prompts: bool = True,
        timing: Timing | None = None,
        limits: HealthLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        notify: Callable[[str], object] = log.warning,
    ) -> None:
        self.timing, self.clock, self.rng = timing or Timing(), clock, rng or random.Random(0)
        self.session, self.sync = session, sync
        self.fleet = Fleet(
            addresses,
            lambda a: Client(a.url, a.key, session=session, vocab_size=vocab_size, max_in_flight=max_running),
            router=router,
            timing=self.timing,
            limits=limits or HealthLimits(),
            restart=restart,
            resync=resync,
            clock=clock,
            rng=self.rng,
            notify=notify,
        )
        self.routes = Routes(max_running)
        self.openings = Openings(self, on=share_prompts)
        self.infos: list[ServerInfo] = []
        self._calls: set[_Call] = set()
        self._sweeps: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._down_since: float | None = None
        self._closed = False

    # ---- the protocol ----------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self.fleet.version

    @property
    def lost(self) -> str:
        down_s = 0.0 if self._down_since is None else self.clock() - self._down_since
        if self.fleet.serving or (self.fleet.hope and down_s < self.timing.down_s):
            return ""
        return f"no server can answer: {self.fleet.causes()}"

    @property
    def description(self) -> str:
        """One line for the start of a run; what ``check`` has learnt is in it."""
        urls = ", ".join(server.url for server in self.fleet.servers)
        if not self.infos:
            return f"SGLang: {urls}"
        seeds = (
            "honoured" if all(i.deterministic for i in self.infos) else "ignored (no --enable-deterministic-inference)"
        )
        return f"SGLang: {urls}; seeds {seeds}; contexts of {min(i.max_context for i in self.infos)} tokens"

    async def generate(self, request: Request) -> Completion:
        """One turn. ``EngineError`` when ``turn_s`` or the attempts are used up, a server refuses the request, or no
        server serves and none is to be expected."""
        if self._closed:
            raise EngineError("the engine is closed")
        self._calls.add(call := _Call(request))
        self.fleet.watch()
        try:
            async with asyncio.timeout(self.timing.turn_s):
                return await self._answer(call)
        except TimeoutError:
            raise EngineError(f"{request.session}: no answer within {self.timing.turn_s:g} s: {call.cause}") from None
        finally:
            self._calls.discard(call)
            if not self._calls:
                self.fleet.unwatch()

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Bring all servers new weights; one that does not take them serves nothing until it has. ``EngineError`` when
        none takes them, or turns still run."""
        await self._idle()
        self.openings.clear()
        await self.fleet.update(self.sync, weights, version)
        self._down_since = None

    async def give_back(self, release: Release) -> None:
        """The servers' devices are the actor's until the next ``update_weights``. ``EngineError``: turns still run."""
        await self._idle()
        self.openings.clear()
        await self.fleet.give_back(release)

    async def _idle(self) -> None:
        await asyncio.gather(*self._sweeps)  # of turns whose callers have gone
        flights = self._flights(None)
        if self._calls or flights:
            raise EngineError(f"{max(len(self._calls), len(flights))} requests still run on the old weights")

    async def abort(self, session: str | None = None) -> None:
        """End the turns of one dialogue, or all, at their servers, with what they have; it returns when none of them
        runs any more, or its connection was cut after ``abort_s``. All: caches are dropped too."""
        for call in self._calls:
            if session in (None, call.request.session):
                call.aborted.set()
        await asyncio.gather(*(self._end(flight) for flight in self._flights(session)))
        if session is None:
            self.openings.clear()
            await asyncio.gather(*self._sweeps)
            await asyncio.gather(*(server.drop_caches(self.timing) for server in self.fleet.serving))

    async def release(self, session: str) -> None:
        self.openings.forget(self.routes.release(session))

    async def close(self) -> None:
        self._closed = True
        await self.abort()
        await self.fleet.close()
        await self.session.close()

    # ---- beyond it -------------------------------------------------------------------------------------------------

    async def check(self, *, max_context: int, model: ModelFacts | None = None) -> None:
        """Before a run: each server is there, takes our key, has ``model`` (as far as it can be seen from here), its
        vocabulary, contexts of ``max_context`` tokens and the log-probs that we train on. ``UserError`` with all that
        is wrong."""
        probe_s, turn_s = self.timing.probe_s, self.timing.attempt_s
        found = await asyncio.gather(
            *(
                ask(client, max_context=max_context, model=model, probe_s=probe_s, turn_s=turn_s)
                for server in self.fleet.servers
                for client in server.control
            )
        )
        self.infos = [info for info, _ in found if info is not None]
        if problems := [problem for _, some in found for problem in some]:
            raise UserError(problems)

    def metrics(self) -> dict[str, float]:
        """Since the last call: turns, retries, failures, restarts, prompt tokens from cache; and what is open now."""
        counts, self._counts = self._counts, Counter()
        found = {
            f"engine/{name}": float(counts[name]) for name in ("turns", "retries", "failures", "aborts", "cut_off")
        }
        found["engine/in_flight"] = float(len(self._flights(None)))
        found["engine/restarts"] = float(sum(s.health.restarts for s in self.fleet.servers))  # of the whole run
        found["engine/serving"] = float(len(self.fleet.serving))
        if counts["prompt_tokens"]:
            found["engine/cached_share"] = counts["cached_tokens"] / counts["prompt_tokens"]
        return found

    @property
    def clients(self) -> list[Client]:
        """Of each server that serves; behind a router, of its workers."""
        return [client for server in self.fleet.serving for client in server.control]

    async def ask(self, client: Client, request: Request) -> Completion:
        """One turn of just that server, asked once. ``EngineError``: no good answer within an attempt's deadline."""
        return await self._asked(client, request, uuid.uuid4().hex)

    def _asked(self, client: Client, request: Request, rid: str) -> Coroutine[None, None, Completion]:
        params, version, deadline_s = request.params, self.version, self.timing.attempt_s
        return client.generate(request.ids, params, rid=rid, seed=request.seed, version=version, deadline_s=deadline_s)

    # ---- one turn --------------------------------------------------------------------------------------------------

    async def _answer(self, call: _Call) -> Completion:
        """Attempts, until one comes to something."""
        request = call.request
        for attempt in range(self.timing.attempts):
            if attempt:
                self._counts["retries"] += 1
                await self._pause(call, self._backoff(attempt))
            server = None if call.aborted.is_set() else await self._server(call)
            if server is None:
                return self._nothing()
            completion = await self._attempt(call, server)
            if completion is not None:
                self._counts["turns"] += 1
                return completion
            if call.aborted.is_set():
                return self._nothing()
            self._counts["failures"] += 1
            call.tried.append(server.url)
        raise EngineError(f"{request.session}: given up after {self.timing.attempts} attempts: {call.cause}")

    def _nothing(self) -> Completion:
        """Aborted before there was a token."""
        return Completion((), (), "abort", self.version)

    def _backoff(self, attempt: int) -> float:
        return min(self.timing.backoff_max_s, self.timing.backoff_s * 2.0 ** (attempt - 1)) * (
            0.5 + 0.5 * self.rng.random()
        )

    async def _pause(self, call: _Call, seconds: float, *, until: Awaitable[object] | None = None) -> None:
        """Wait, at most so long; an abort ends it, and so does ``until``."""
        waits = [asyncio.ensure_future(wait) for wait in (call.aborted.wait(), *([until] if until else []))]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _server(self, call: _Call) -> Server | None:
        """Where to ask: not where it failed already, if there is another. Waits for one to serve; None when aborted."""
        while True:
            if serving := self.fleet.serving:
                self._down_since = None
                fresh = [s for s in serving if s.url not in call.tried] or serving
                by_url = {server.url: server for server in fresh}
                load = {server.url: len(server.flights) for server in fresh}
                request = call.request
                home = by_url[self.routes.pick(request.session, request.group, usable=list(by_url), load=load)]
                opened = await self.openings.once(request, home)
                if call.aborted.is_set():
                    return None
                if not opened and home.url not in call.tried:
                    call.tried.append(home.url)
                elif home.health.serves(self.version):  # it has not died over the group's prompt
                    return home
                continue
            if self._down_since is None:
                self._down_since = self.clock()
            left = self._down_since + self.timing.down_s - self.clock()
            if left <= 0 or not self.fleet.hope:
                raise EngineError(f"{call.request.session}: no server can answer: {self.fleet.causes()}")
            call.cause = f"no server serves: {self.fleet.causes()}"
            await self._pause(call, left, until=self.fleet.changed.wait())
            if call.aborted.is_set():
                return None

    async def _attempt(self, call: _Call, server: Server) -> Completion | None:
        """Ask one server. None where another may be asked; what it did is on its account then."""
        began, health = self.clock(), server.health
        flight = self.take_off(call.request, server)
        try:
            completion = await self._land(flight)
        except Refused:
            raise
        except WrongVersion as error:
            health.missed(str(error))
            call.cause = str(error)
        except NothingListens as error:
            health.died(str(error))
            call.cause = str(error)
        except (Unavailable, BadReply) as error:
            if not flight.why:  # else it is known already
                health.failed(str(error), began=began)
            call.cause = str(error)
            if isinstance(error, Unavailable) and not flight.why:
                self.sweep(flight)
        else:
            health.worked(began=began)
            if completion.finish != "abort" or call.aborted.is_set():
                return completion
            call.cause = f"{server.url}: aborted, and not by us"
        return None

    def take_off(self, request: Request, server: Server) -> Flight:
        rid = uuid.uuid4().hex  # of one length: SGLang aborts what begins with what it is given
        work = self._asked(server.client, request, rid)
        flight = Flight(rid, request.session, server, len(request.ids), asyncio.create_task(work))
        server.flights.add(flight)
        flight.task.add_done_callback(lambda _: self._landed(flight))
        return flight

    def _landed(self, flight: Flight) -> None:
        flight.server.flights.discard(flight)
        if not flight.task.cancelled() and flight.task.exception() is None:  # heard, also where the caller has gone
            self._counts["prompt_tokens"] += flight.prompt_tokens
            self._counts["cached_tokens"] += flight.task.result().cached_tokens

    async def _land(self, flight: Flight) -> Completion:
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if flight.task.cancelled() and flight.why and own is not None and not own.cancelling():
                raise Unavailable(flight.why) from None
            self.give_up(flight)  # the caller has gone, not the request
            raise

    # ---- ends ------------------------------------------------------------------------------------------------------

    def _flights(self, session: str | None) -> list[Flight]:
        return [f for server in self.fleet.servers for f in server.flights if session in (None, f.session)]

    def give_up(self, flight: Flight) -> None:
        self._spawn(self._end(flight))

    async def _end(self, flight: Flight) -> None:
        """Abort a request until it has ended, then cut it off. Once for all who want it."""
        if flight.ending is None:
            self._counts["aborts"] += 1
            flight.ending = asyncio.create_task(self._abort_until_done(flight))
        await asyncio.shield(flight.ending)

    async def _abort_until_done(self, flight: Flight) -> None:
        client, why = flight.server.client, f"no end within {self.timing.abort_s:g} s of its abort"
        try:
            async with asyncio.timeout(self.timing.abort_s):
                while not flight.task.done() and flight.rid in client.sent:
                    await self._tell_abort(flight)
                    await asyncio.wait([flight.task], timeout=self.timing.abort_again_s)
        except TimeoutError:
            pass
        except EngineError as error:
            why = f"its abort failed: {error}"
        if flight.task.done():
            return
        if flight.rid in client.sent:  # else it never left
            self._counts["cut_off"] += 1
            log.warning("%s: request of %s cut off: %s", flight.server.url, flight.session, why)
        flight.cut(why)
        await asyncio.wait([flight.task])

    async def _tell_abort(self, flight: Flight) -> None:
        told = (client.abort(flight.rid, deadline_s=self.timing.abort_s) for client in flight.server.control)
        await asyncio.gather(*told)

    def sweep(self, flight: Flight) -> None:
        """A server that was too slow, or whose connection broke, may still be at it."""
        if not flight.server.health.answers:
            return

        async def tell() -> None:
            try:
                await self._tell_abort(flight)
            except EngineError as error:
                log.warning("%s: the abort of a lost request failed: %s", flight.server.url, error)

        self._spawn(tell())

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._sweeps.add(task)
        task.add_done_callback(self._sweeps.discard)
