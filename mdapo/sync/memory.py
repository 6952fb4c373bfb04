"""Servers on the trainer's own devices give their memory back while it trains, and take it again in the right order.

After the rollout: pause, flush, release all. For the sync: weights first, so that there is something to write into,
while the KV cache still leaves its memory to the buckets; the KV cache last, when the buckets are gone.
"""

from __future__ import annotations

from typing import Final, Protocol

from mdapo.sync.servers import Fleet, Server, still

WEIGHTS: Final = "weights"
KV_CACHE: Final = "kv_cache"
CUDA_GRAPH: Final = "cuda_graph"


class Occupation(Protocol):
    """What happens to the servers' memory around a sync. Servers that fail are lost from the fleet.

    ``shared``: servers and actor take turns on the same devices.
    """

    shared: bool

    async def give_back(self, fleet: Fleet) -> None:
        """The rollout is over, training begins. Requests of the servers end or wait."""
        ...

    async def weights_only(self, fleet: Fleet) -> None:
        """Before a sync; the servers are held still."""
        ...

    async def all_of_it(self, fleet: Fleet) -> None:
        """After it."""
        ...


class Apart:
    """Servers with devices of their own keep their memory."""

    shared = False

    async def give_back(self, fleet: Fleet) -> None: ...

    async def weights_only(self, fleet: Fleet) -> None: ...

    async def all_of_it(self, fleet: Fleet) -> None: ...


class Colocated:
    """Servers that share the trainer's devices; they must be started with ``enable_memory_saver``."""

    shared = True

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._away: dict[str, set[str]] = {}  # by URL: what each server has given back

    async def give_back(self, fleet: Fleet) -> None:
        async def release(server: Server) -> None:
            await still(server, deadline_s=self._timeout_s)
            tags = [KV_CACHE, WEIGHTS, CUDA_GRAPH]
            await server.post("/release_memory_occupation", {"tags": tags}, deadline_s=self._timeout_s)
            self._away[server.url] = set(tags)

        await fleet.each(release)

    async def weights_only(self, fleet: Fleet) -> None:
        await fleet.each(lambda server: self._resume(server, fleet, (WEIGHTS,)))

    async def all_of_it(self, fleet: Fleet) -> None:
        await fleet.each(lambda server: self._resume(server, fleet, (KV_CACHE, CUDA_GRAPH)))

    async def _resume(self, server: Server, fleet: Fleet, tags: tuple[str, ...]) -> None:
        """Of ``tags`` those that are away: to take back what is not ends a server. One that was restarted has all."""
        if server.url in fleet.renewed:
            self._away.pop(server.url, None)
        away = self._away.get(server.url, set())
        back = [tag for tag in tags if tag in away]
        if back:
            await server.post("/resume_memory_occupation", {"tags": back}, deadline_s=self._timeout_s)
            away -= set(back)
