"""A member of a weight group in a process of its own, as SGLang joins it: ``peer.py PORT_FILE BEHAVIOUR``.

The endpoints of ``sync.mode: distributed`` over HTTP; SGLang itself is tested in tests/sglang. ``BEHAVIOUR``: ``good``,
``dies`` (in its second bucket), ``refuses`` (its second bucket, with status 400), ``hangs`` (in its second bucket).
"""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web

from mdapo.sync.transport import FLATTENED


class Peer:
    def __init__(self, behaviour: str) -> None:
        self.behaviour, self.version, self.buckets = behaviour, "default", 0
        self.groups: dict[str, Any] = {}
        self.held: dict[str, torch.Tensor] = {}
        self.joined = 0

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version, "joined": self.joined, "groups": list(self.groups)})

    async def fine(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def name(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def values(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response(self.held[body["name"]].tolist()[: body["truncate_size"]])

    async def join(self, request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.to_thread(self._join, body)
        return web.json_response({"success": True})

    def _join(self, body: dict[str, Any]) -> None:
        name, world, rank = body["group_name"], body["world_size"], body["rank_offset"]
        timeout = timedelta(seconds=60)
        store = dist.TCPStore(body["master_address"], body["master_port"], world, is_master=False, timeout=timeout)
        helper = dist.distributed_c10d._new_process_group_helper
        self.groups[name], _ = helper(
            world, rank, [], dist.Backend(body["backend"]), dist.PrefixStore(name, store), group_name=name,
            timeout=timeout,
        )  # fmt: skip
        self.joined += 1

    async def leave(self, request: web.Request) -> web.Response:
        known = self.groups.pop((await request.json())["group_name"], None) is not None
        return web.json_response({"success": known}, status=200 if known else 400)

    async def receive(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["load_format"] == FLATTENED and body["flush_cache"] is False
        self.buckets += 1
        if self.buckets == 2 and self.behaviour == "dies":
            os._exit(1)
        if self.buckets == 2 and self.behaviour == "refuses":
            return web.json_response({"success": False, "message": "no"}, status=400)
        if self.buckets == 2 and self.behaviour == "hangs":
            await asyncio.sleep(600)
        try:
            await asyncio.to_thread(self._receive, body)
        except RuntimeError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        return web.json_response({"success": True})

    def _receive(self, body: dict[str, Any]) -> None:
        dtypes = [getattr(torch, dtype) for dtype in body["dtypes"]]
        sizes = [torch.Size(s).numel() * d.itemsize for s, d in zip(body["shapes"], dtypes, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        self.groups[body["group_name"]].broadcast(flat, 0).wait()
        for name, dtype, shape, part in zip(body["names"], dtypes, body["shapes"], flat.split(sizes), strict=True):
            self.held[name] = part.view(dtype).view(shape).clone()


async def serve(port_file: Path, behaviour: str) -> None:
    peer, app = Peer(behaviour), web.Application()
    for path, handler in {
        "/pause_generation": peer.fine, "/continue_generation": peer.fine, "/flush_cache": peer.fine,
        "/update_weight_version": peer.name, "/get_weights_by_name": peer.values,
        "/init_weights_update_group": peer.join, "/destroy_weights_update_group": peer.leave,
        "/update_weights_from_distributed": peer.receive,
    }.items():  # fmt: skip
        app.router.add_post(path, handler)
    app.router.add_get("/model_info", peer.info)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    ready = port_file.with_suffix(".partial")
    ready.write_text(str(site._server.sockets[0].getsockname()[1]))
    ready.rename(port_file)
    await asyncio.sleep(600)


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2]))
