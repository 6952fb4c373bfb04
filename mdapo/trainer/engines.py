"""The engine that a configuration asks for, with the servers and the way of weights that it needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mdapo import device
from mdapo.config.model_facts import ModelFacts, require_facts
from mdapo.config.placement import colocated, server_group, sharing_problems
from mdapo.config.problems import require_none
from mdapo.config.schema import Config
from mdapo.device import Kind
from mdapo.rollout.engine import Engine
from mdapo.rollout.local_engine import LocalEngine
from mdapo.rollout.sglang_connect import connect
from mdapo.rollout.sglang_options import server_options
from mdapo.rollout.sglang_server import Server
from mdapo.rollout.sglang_servers import Address, external
from mdapo.sync.build import build_pusher
from mdapo.sync.push import Pusher

Say = Callable[[str], object]


@dataclass(frozen=True)
class OpenEngine:
    """``pusher``: how servers get their weights; ``servers``: those that this run owns."""

    engine: Engine
    pusher: Pusher | None = None
    servers: Sequence[Server] = ()

    async def close(self) -> None:
        try:
            await self.engine.close()
            if self.pusher is not None:
                await self.pusher.close()
        finally:
            await asyncio.gather(*(server.stop() for server in self.servers))


async def open_engine(config: Config, *, logs: Path, say: Say) -> OpenEngine:
    """Ready but for the weights: servers are started (their output goes to ``logs``) or found, and asked what they are.

    ``UserError``: the model's folder, a server that does not start, that is not there, or that serves something else.
    """
    if config.rollout.engine == "local":
        local = LocalEngine(
            config.model.path,
            dtype=config.rollout.dtype or config.model.dtype,
            max_running=config.rollout.max_running,
            max_context=config.model.max_context,
        )
        return OpenEngine(local)
    facts = require_facts(Path(config.model.path))
    require_none(sharing_problems(config, device.current().kind))  # where no group names a kind of device
    servers = [] if config.rollout.urls else _owned(config, logs)
    try:
        if servers:
            say(f"starting {len(servers)} SGLang server{'s' * (len(servers) > 1)}; output in {logs}")
            await _together([server.start(config.rollout.start_timeout_s) for server in servers])
        return await _connected(config, facts, servers, say)
    except BaseException:
        await asyncio.gather(*(server.stop() for server in servers))
        raise


def _owned(config: Config, logs: Path) -> list[Server]:
    here, visible = device.current().kind, visible_devices(servers_on(config))
    options = server_options(config, here=here, visible=visible)
    return [Server(one, log=logs / f"server-{number}.log") for number, one in enumerate(options)]


def visible_devices(kind: Kind) -> int:
    """How many of that kind this process sees; 0 for a CPU, which is not counted."""
    return 0 if kind == "cpu" else int(getattr(torch, kind).device_count())


def servers_on(config: Config) -> Kind:
    """The kind of device of the servers that this run starts."""
    group = server_group(config)
    return group.device if group is not None and group.device is not None else device.current().kind


async def _together(starts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """All of them, or the first one's error."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for start in starts:
                tasks.create_task(start)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _connected(config: Config, facts: ModelFacts, servers: Sequence[Server], say: Say) -> OpenEngine:
    addresses, router = [Address(server.url, server.key) for server in servers], None
    if not servers:
        addresses, router = external(config)

    owned = dict(zip(addresses, servers, strict=True)) if servers else {}

    async def restart(address: Address) -> Address:
        server = owned[address]  # by what its engine knows: each start, a failed one too, chooses another port and key
        await server.stop()
        await server.start(config.rollout.start_timeout_s)
        now = Address(server.url, server.key)
        owned[now] = owned.pop(address)
        return now

    pusher = build_pusher(
        config,
        facts,
        device=device.current(),
        servers_on=servers_on(config),
        urls=[address.url for address in addresses],
        ranks=config.rollout.tp,
        colocated=bool(servers) and colocated(config),
    )
    engine = await connect(
        config,
        facts,
        addresses,
        router=router,
        sync=pusher.send,
        resync=pusher.again if config.sync.mode == "disk" else None,  # no other mode keeps weights to bring later
        restart=restart if servers else None,
        notify=say,
    )
    return OpenEngine(engine, pusher, servers)
