"""One sync on rank 0: a stream of weights into all servers, held still meanwhile, and checked before they go on.

``Pusher.send`` and ``Pusher.again`` are what the SGLang engine calls ``sync`` and ``resync``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from torch import Tensor

from mdapo.config.model_facts import ModelFacts
from mdapo.rollout.engine import EngineError
from mdapo.sync.buckets import cut
from mdapo.sync.disk import DiskTransport
from mdapo.sync.memory import Apart, Occupation
from mdapo.sync.servers import Fleet, Server, ordered, still
from mdapo.sync.transport import Transport
from mdapo.sync.verify import Expected, check


@dataclass(frozen=True)
class Outcome:
    """Of one sync. ``failed``: why, by URL; such a server has no weights that anybody may use (it is *stale*).

    ``again``: the URLs among them that only shared another one's failure, for which a second sync is worth while.
    """

    version: int
    synced: tuple[str, ...]
    failed: Mapping[str, str]
    again: frozenset[str]
    bytes_sent: int
    seconds: float


class Pusher:
    """Brings the weights of ``model`` to servers through one transport; remembers at which version it left each.

    ``seed`` decides which values are read back. ``last`` is how the newest sync went.
    """

    def __init__(
        self,
        transport: Transport,
        model: ModelFacts,
        *,
        bucket_bytes: int,
        timeout_s: float,
        occupation: Occupation | None = None,
        seed: int = 0,
    ) -> None:
        self.transport = transport
        self.last: Outcome | None = None
        self.occupation: Occupation = occupation or Apart()
        self._shapes, self._architecture, self._seed = model.weight_shapes(), model.architecture, seed
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._left_at: dict[str, str] = {}
        self._expected = Expected(self._shapes, frozenset())  # of the newest whole weights

    async def send(
        self, servers: Sequence[Server], weights: Iterable[tuple[str, Tensor]], version: int
    ) -> Mapping[str, str]:
        """``push``; returns why each server that failed did, by URL."""
        self.last = await self.push(servers, weights, version)
        return self.last.failed

    async def again(self, server: Server, version: int) -> None:
        """Bring one server the weights that all have, without the actor. ``EngineError``: they are not kept anywhere
        (only ``sync.mode: disk`` keeps them), or it does not take them."""
        transport = self.transport
        if not isinstance(transport, DiskTransport):
            raise EngineError(f"{server.url}: a server that was restarted gets weights with the next sync")
        if transport.newest is None or transport.version != version:
            raise EngineError(f"{server.url}: the weights of version {version} are not on disk")
        fleet = Fleet.of([server])
        await self._hold(server, fleet, version)
        await transport.load(server)
        await self._release(server, self._expected, version)

    async def give_back(self, servers: Sequence[Server]) -> Mapping[str, str]:
        """The rollout is over and the actor takes the devices, if they are the same: the servers' memory goes until the
        next sync. Returns why each server that kept its memory did, by URL."""
        fleet = Fleet.of(servers)
        await self.occupation.give_back(fleet)
        return dict(fleet.failed)

    async def push(self, servers: Sequence[Server], weights: Iterable[tuple[str, Tensor]], version: int) -> Outcome:
        """Give all ``servers`` the weights, under ``version``.

        Running requests are ended (``finish == "abort"``) and new ones wait on the server. From the first byte on a
        server says that its version is ``half-<version>``, and nobody takes an answer for that of a known version,
        until all weights are there and checked. One that fails is left so, and paused; the others go on.

        ``StorageError``, ``UserError``: where the disk or the shared memory fails; all servers are stale then.
        """
        fleet, transport, began = Fleet.of(servers), self.transport, time.monotonic()
        expected = Expected.choose(self._shapes, architecture=self._architecture, seed=self._seed + version)
        sent_before = transport.bytes_sent
        await fleet.each(lambda server: self._hold(server, fleet, version))
        await self.occupation.weights_only(fleet)
        finished = False
        try:
            await transport.begin(fleet, version)
            with closing(cut(expected.watch(weights), bucket_bytes=self._bucket_bytes, take=transport.take)) as buckets:
                for bucket in buckets:
                    if not fleet.left:
                        break
                    await transport.send(fleet, bucket)
                    del bucket  # or its memory lives on while the next one is taken
            if fleet.left:
                await transport.finish(fleet, version)
                finished, self._expected = True, expected
        finally:
            if not finished:
                await transport.abandon()
        await self.occupation.all_of_it(fleet)
        await fleet.each(lambda server: self._release(server, expected, version))
        return Outcome(
            version=version,
            synced=tuple(server.url for server in fleet.left),
            failed=dict(fleet.failed),
            again=frozenset(fleet.unhurt),
            bytes_sent=transport.bytes_sent - sent_before,
            seconds=time.monotonic() - began,
        )

    async def _hold(self, server: Server, fleet: Fleet, version: int) -> None:
        """End what runs, take no more, forget what is cached, answer for no version."""
        deadline_s = self._timeout_s
        if (await server.info(deadline_s=deadline_s)).version != self._left_at.get(server.url):
            fleet.renewed.add(server.url)
        await still(server, deadline_s=deadline_s)
        await self._name(server, f"half-{version}")

    async def _release(self, server: Server, expected: Expected, version: int) -> None:
        """Name the version, look whether the weights are those that were sent, take requests again."""
        await self._name(server, str(version))
        try:
            await check(server, expected, version=version, deadline_s=self._timeout_s)
        except BaseException:
            await self._name(server, f"half-{version}")
            raise
        await server.post("/continue_generation", {}, deadline_s=self._timeout_s)

    async def _name(self, server: Server, mark: str) -> None:
        request = {"new_version": mark, "abort_all_requests": False}
        await ordered(server, "/update_weight_version", request, deadline_s=self._timeout_s)
        self._left_at[server.url] = mark

    async def close(self) -> None:
        await self.transport.close()
