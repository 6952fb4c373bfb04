"""``sync.mode: distributed``: buckets broadcast over NCCL, HCCL or (on CPUs) gloo, in one group of rank 0 and all
servers.

The group is made once and kept. It is made anew when its servers are others than before, one was restarted, or a
broadcast failed: a group that lost a member is of no use to the rest.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mdapo.errors import shortened
from mdapo.rollout.engine import EngineError
from mdapo.sync.buckets import Bucket, PlainBuffer
from mdapo.sync.servers import Fleet, Server, ordered
from mdapo.sync.transport import FLATTENED

GRACE_S = 5.0  # for the members of a broken group to say what they saw, once it is taken down


class Group:
    """Rank 0's end of one process group with servers, each of which has one rank for each of its tensor-parallel parts.

    Its store listens on ``address`` alone.
    """

    def __init__(self, members: Sequence[Server], *, world: int, address: str, timeout_s: float) -> None:
        self.name = f"mdapo-{uuid.uuid4().hex}"  # never used twice: a server may keep the remains of an earlier one
        self.members, self.world = tuple(members), world
        self._address, self._timeout = address, timedelta(seconds=timeout_s)
        self._listener = socket.create_server((address, 0), family=_family(address))
        self.port: int = self._listener.getsockname()[1]
        self._store: dist.TCPStore | None = dist.TCPStore(
            address, self.port, world, is_master=True, timeout=self._timeout, wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )  # fmt: skip
        self._group: Any = None

    def join(self, backend: str) -> None:
        """Blocks until every member has joined. ``RuntimeError``: one has not within the deadline."""
        assert self._store is not None, "it was left"
        c10d: Any = dist.distributed_c10d  # its private parts: what the server joins with; the default group stays
        store = dist.PrefixStore(self.name, self._store)
        with _gloo_listens_on(self._address):
            self._group, _ = c10d._new_process_group_helper(
                self.world, 0, [], dist.Backend(backend), store, group_name=self.name, timeout=self._timeout
            )
        c10d._world.pg_group_ranks[self._group] = {i: i for i in range(self.world)}  # to be let go of

    def broadcast(self, data_U: Tensor) -> None:
        """Blocks until sent. ``RuntimeError``: the deadline has passed, or a member is gone."""
        work = self._group.broadcast(data_U, 0, self._timeout)
        if not work.wait(self._timeout):
            raise RuntimeError("the broadcast did not end within its deadline")
        if data_U.device.type != "cpu":
            getattr(torch, data_U.device.type).synchronize()

    def leave(self) -> None:
        """Close the connections, also those that a broadcast waits on; the members notice."""
        if self._group is not None:
            self._group.abort()
            dist.destroy_process_group(self._group)
        self._group = self._store = None


class DistributedTransport:
    """Broadcasts from rank 0; ``ranks``: the tensor-parallel ranks of each server; ``address``: rank 0's own, one that
    the servers reach."""

    def __init__(self, *, device: torch.device, backend: str, ranks: int, address: str, timeout_s: float) -> None:
        self.bytes_sent = 0
        self._backend, self._ranks, self._address, self._timeout_s = backend, ranks, address, timeout_s
        self._buffer = PlainBuffer(device)
        self._group: Group | None = None

    def take(self, nbytes: int) -> Tensor:
        return self._buffer.take(nbytes)

    async def begin(self, fleet: Fleet, version: int) -> None:
        """Make the group if there is none of just these servers; servers that do not join are lost."""
        members = self._group.members if self._group is not None else ()
        same = [id(server) for server in members] == [id(server) for server in fleet.left]
        if members and same and not fleet.renewed:
            return
        await self._leave(tell=fleet.left)
        if not fleet.left:
            return
        group = Group(
            fleet.left, world=1 + self._ranks * len(fleet.left), address=self._address, timeout_s=self._timeout_s
        )
        offsets = {server.url: 1 + self._ranks * i for i, server in enumerate(fleet.left)}

        async def join(server: Server) -> None:
            request = {
                "master_address": self._address,
                "master_port": group.port,
                "rank_offset": offsets[server.url],
                "world_size": group.world,
                "group_name": group.name,
                "backend": self._backend,
            }
            await ordered(server, "/init_weights_update_group", request, deadline_s=self._timeout_s)

        self._group = group
        await self._together(fleet, join, asyncio.to_thread(group.join, self._backend))

    async def send(self, fleet: Fleet, bucket: Bucket) -> None:
        if self._group is None or not fleet.left:
            return
        group = self._group
        request = {
            "names": [piece.name for piece in bucket.pieces],
            "dtypes": [str(piece.dtype).removeprefix("torch.") for piece in bucket.pieces],
            "shapes": [list(piece.shape) for piece in bucket.pieces],
            "group_name": group.name,
            "load_format": FLATTENED,
            "flush_cache": False,
        }

        async def receive(server: Server) -> None:
            await ordered(server, "/update_weights_from_distributed", request, deadline_s=self._timeout_s)

        await self._together(fleet, receive, asyncio.to_thread(group.broadcast, bucket.data_U))
        self.bytes_sent += bucket.nbytes

    async def _together(
        self, fleet: Fleet, call: Callable[[Server], Coroutine[Any, Any, None]], own: Coroutine[Any, Any, None]
    ) -> None:
        """``call`` on all servers while rank 0 does its own part. When one fails the group is taken down, and all are
        lost: what the others have of this bucket is not known."""
        calls = {asyncio.ensure_future(call(server)): server for server in fleet.left}
        everyone: set[asyncio.Future[None]] = {asyncio.ensure_future(own), *calls}
        done, waiting = await asyncio.wait(
            everyone, timeout=self._timeout_s + GRACE_S, return_when=asyncio.FIRST_EXCEPTION
        )
        failures = [error for future in done if (error := future.exception()) is not None]
        if not failures and not waiting:
            return
        culprits = {server: str(future.exception()) for future, server in calls.items()
                    if future in done and future.exception() is not None}  # fmt: skip
        await self._leave(tell=())
        if waiting:  # the members notice that the group is gone
            _, hanging = await asyncio.wait(waiting, timeout=GRACE_S)
            culprits |= {server: f"did not answer within {self._timeout_s:g} s" for future, server in calls.items()
                         if future in hanging}  # fmt: skip
            for future in hanging:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        for error in failures:
            if not isinstance(error, EngineError | RuntimeError):  # neither a server's nor a connection's
                raise error
        for server in list(fleet.left):
            if server in culprits:
                fleet.lose(server, culprits[server])
            else:
                cause = str(failures[0]) if failures else "no answer in time"
                fleet.lose(server, f"its broadcast was ended: {shortened(cause)}", unhurt=True)

    async def finish(self, fleet: Fleet, version: int) -> None:
        self._buffer.drop()

    async def abandon(self) -> None:
        """A server may be waiting for a bucket that never comes."""
        self._buffer.drop()
        await self._leave(tell=())

    async def close(self) -> None:
        members = self._group.members if self._group is not None else ()
        await self._leave(tell=members)

    async def _leave(self, tell: Sequence[Server]) -> None:
        """Take the group down, at the members in ``tell`` too as far as they answer."""
        group, self._group = self._group, None
        if group is None:
            return

        async def forget(server: Server) -> None:
            await server.post("/destroy_weights_update_group", {"group_name": group.name}, deadline_s=GRACE_S)

        known = [server for server in tell if any(server is member for member in group.members)]
        # A server that was restarted never heard of the group, one that died hears nothing: neither matters here.
        await asyncio.gather(*map(forget, known), return_exceptions=True)
        await asyncio.to_thread(group.leave)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET


@contextmanager
def _gloo_listens_on(address: str) -> Iterator[None]:
    """Gloo listens on the address of the host's name unless told an interface; for servers on this machine, that is
    the loopback's."""
    known = os.environ.get("GLOO_SOCKET_IFNAME")
    if known is None and ipaddress.ip_address(address).is_loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        if known is None:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
