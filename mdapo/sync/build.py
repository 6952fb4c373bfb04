"""The way of the weights that a configuration asks for."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import torch

from mdapo.errors import UserError
from mdapo.sync.disk import DiskTransport
from mdapo.sync.distributed import DistributedTransport
from mdapo.sync.memory import Apart, Colocated
from mdapo.sync.push import Pusher
from mdapo.sync.shared_memory import TensorTransport
from mdapo.sync.transport import Transport

if TYPE_CHECKING:
    from mdapo.config.model_facts import ModelFacts
    from mdapo.config.schema import Config
    from mdapo.device import Device, Kind

BACKENDS: dict[Kind, str] = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
FOLDER = "weights"


def build_pusher(
    config: Config,
    model: ModelFacts,
    *,
    device: Device,
    servers_on: Kind,
    urls: Sequence[str],
    ranks: int,
    colocated: bool,
) -> Pusher:
    """For rank 0, whose device is ``device``, and servers of ``ranks`` devices each, of kind ``servers_on``.

    ``colocated``: they share the trainer's devices, and give their memory back in between. ``UserError``: no way to
    reach the servers.
    """
    timeout_s = config.sync.timeout_s
    transport: Transport
    mode = chosen_mode(config, urls)
    if mode == "tensor":
        transport = TensorTransport(timeout_s=timeout_s)
    elif mode == "disk":
        transport = DiskTransport(own_folder(config), timeout_s=timeout_s)
    else:
        alike = device.kind == servers_on  # NCCL and HCCL reach their own kind only; gloo goes over host memory
        transport = DistributedTransport(
            device=device.torch_device if alike else torch.device("cpu"),
            backend=BACKENDS[device.kind] if alike else "gloo",
            ranks=ranks,
            address=own_address(urls),
            timeout_s=timeout_s,
        )
    return Pusher(
        transport,
        model,
        bucket_bytes=config.sync.bucket_mb << 20,
        timeout_s=timeout_s,
        occupation=Colocated(timeout_s=timeout_s) if colocated and device.kind != "cpu" else Apart(),
        seed=config.run.seed,
    )


def own_folder(config: Config) -> Path:
    """Where ``sync.mode: disk`` writes: a folder that is this run's alone, whatever else lies in ``sync.dir``."""
    run = Path(config.run.dir, config.run.name).resolve()
    if config.sync.dir is None:
        return run / FOLDER
    return Path(config.sync.dir, f"{config.run.name}-{hashlib.sha256(os.fsencode(run)).hexdigest()[:8]}")


def chosen_mode(config: Config, urls: Sequence[str]) -> str:
    """``sync.mode``, or without one ``tensor`` for servers that are all on this machine, else ``distributed``."""
    return config.sync.mode or ("tensor" if _is_loopback(own_address(urls)) else "distributed")


def own_address(urls: Sequence[str]) -> str:
    """The address of this machine's that the servers reach: the loopback's where all of them are here."""
    found = [_towards(url) for url in urls]
    beyond = [address for address in found if not _is_loopback(address)]
    return (beyond or found)[0]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _towards(url: str) -> str:
    """The address from which this machine would speak to a server; nothing is sent."""
    parts = urlsplit(url)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"rollout.urls: {url}: no way there: {error.strerror or error}") from error
