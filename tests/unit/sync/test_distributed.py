"""Broadcasts to servers in processes of their own, over gloo: what arrives, and what a member that fails does to the
others. The members join as SGLang does; SGLang itself is in tests/sglang."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recording import MODEL, NBYTES, SHAPES, weights

sys.path.insert(0, str(Path(__file__).parents[2] / "sglang"))

import aiohttp
from plain_client import PlainClient

from mdapo.sync.distributed import DistributedTransport
from mdapo.sync.push import Pusher

ROOT = Path(__file__).parents[3]


class Peers:
    """Server processes by name, and the transport to them in an event loop that lives through a test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, {}
        self.runner = asyncio.Runner()
        self.session = self.runner.run(self._session())
        self.pusher = self.new_pusher(timeout_s=30.0)

    async def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession()

    def new_pusher(self, *, timeout_s: float) -> Pusher:
        transport = DistributedTransport(
            device=torch.device("cpu"), backend="gloo", ranks=1, address="127.0.0.1", timeout_s=timeout_s
        )
        return Pusher(transport, MODEL, bucket_bytes=1280, timeout_s=timeout_s)

    def start(self, name: str, behaviour: str) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        port = self.folder / name
        port.unlink(missing_ok=True)
        command = [sys.executable, str(Path(__file__).with_name("peer.py")), str(port), behaviour]
        self.processes[name] = subprocess.Popen(command, env=env)

    def client(self, name: str) -> PlainClient:
        end = time.monotonic() + 300.0
        while not (self.folder / name).exists():
            assert self.processes[name].poll() is None and time.monotonic() < end
            time.sleep(0.05)
        return PlainClient(f"http://127.0.0.1:{(self.folder / name).read_text()}", "", self.session)

    def push(self, servers: list[PlainClient], version: int) -> Any:
        return self.runner.run(self.pusher.push(servers, weights(version), version))

    def told(self, server: PlainClient) -> dict[str, Any]:
        return self.runner.run(server._call("GET", "/model_info", None, 5.0))

    def close(self) -> None:
        self.runner.run(self.pusher.close())
        self.runner.run(self.session.close())
        self.runner.close()
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    made = not dist.is_initialized()
    if made:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = Peers(tmp_path)
    try:
        yield found
    finally:
        found.close()
        if made:
            dist.destroy_process_group()


def test_all_servers_get_all_weights_from_one_broadcast_in_a_group_that_is_kept(peers: Peers) -> None:
    for name in ("a", "b"):
        peers.start(name, "good")
    servers = [peers.client(name) for name in ("a", "b")]
    for version in (1, 2):
        outcome = peers.push(servers, version)
        assert (outcome.synced, outcome.failed) == (tuple(server.url for server in servers), {})
        assert outcome.bytes_sent == NBYTES
    for server in servers:
        told = peers.told(server)
        assert (told["weight_version"], told["joined"]) == ("2", 1)
    listening = [line.split()[3] for line in _listeners(os.getpid())]
    assert listening and all(address.startswith(("127.0.0.1:", "[::1]:")) for address in listening)


@pytest.mark.parametrize("behaviour", ["dies", "refuses"])
def test_a_member_that_fails_is_lost_and_the_others_are_worth_a_second_try(peers: Peers, behaviour: str) -> None:
    peers.start("good", "good")
    peers.start("bad", behaviour)
    good, bad = peers.client("good"), peers.client("bad")
    outcome = peers.push([good, bad], 1)
    assert outcome.synced == () and outcome.failed.keys() == {good.url, bad.url}
    assert good.url in outcome.again
    assert peers.told(good)["weight_version"] == "half-1"
    outcome = peers.push([good, bad] if behaviour == "dies" else [good], 1)
    assert outcome.synced == (good.url,)
    told = peers.told(good)
    assert (told["weight_version"], told["joined"]) == ("1", 2)


def test_a_member_that_hangs_holds_rank_0_no_longer_than_its_deadline(peers: Peers) -> None:
    peers.start("hangs", "hangs")
    server = peers.client("hangs")
    peers.pusher = peers.new_pusher(timeout_s=3.0)
    began = time.monotonic()
    outcome = peers.push([server], 1)
    assert outcome.synced == () and list(outcome.failed) == [server.url]
    assert time.monotonic() - began < 60.0


def test_a_server_that_was_restarted_gets_a_group_anew(peers: Peers) -> None:
    peers.start("a", "good")
    server = peers.client("a")
    assert peers.push([server], 1).synced
    peers.processes["a"].kill()
    peers.processes["a"].wait()
    assert list(peers.push([server], 2).failed) == [server.url]
    peers.start("a", "good")
    again = peers.client("a")
    assert peers.push([again], 3).synced == (again.url,)
    assert len(SHAPES) == 11 and peers.told(again)["joined"] == 1


def _listeners(pid: int) -> list[str]:
    found = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if f"pid={pid}," in line]
