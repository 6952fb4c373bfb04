"""``sync.mode: disk``: a folder of safetensors that the servers read; for servers that only share a file system.

One file for each bucket, the folder renamed into place when it is whole; the newest stays, so that a server started
later can have it too.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from mdapo.errors import cannot_use
from mdapo.sync.buckets import Bucket, PlainBuffer
from mdapo.sync.safetensors_file import header
from mdapo.sync.servers import Fleet, Server, ordered
from mdapo.sync.transport import UPDATE_FROM_DISK

PREFIX = "weights-"


class DiskTransport:
    """Folders ``weights-<version>`` in ``folder``, which is this run's alone (older ones go) and which all servers see
    under the same path."""

    def __init__(self, folder: Path, *, timeout_s: float) -> None:
        self.bytes_sent = 0
        self.newest: Path | None = None
        self.version = -1  # of the newest
        self._folder, self._timeout_s = folder.resolve(), timeout_s
        self._buffer = PlainBuffer(torch.device("cpu"))
        self._partial: Path | None = None
        self._files = 0

    def take(self, nbytes: int) -> Tensor:
        return self._buffer.take(nbytes)

    async def begin(self, fleet: Fleet, version: int) -> None:
        """``StorageError``, ``UserError``: the folder cannot be made."""
        self._partial, self._files = self._folder / f".{PREFIX}{version}.partial", 0
        try:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
        except OSError as error:
            raise cannot_use(str(self._partial), error) from error

    async def send(self, fleet: Fleet, bucket: Bucket) -> None:
        """``StorageError``: the disk is full or broken."""
        assert self._partial is not None, "begin comes first"
        self._files += 1
        await asyncio.to_thread(_write, self._partial / f"model-{self._files:05d}.safetensors", bucket)
        self.bytes_sent += bucket.nbytes

    async def finish(self, fleet: Fleet, version: int) -> None:
        assert self._partial is not None, "begin comes first"
        final = self._folder / f"{PREFIX}{version}"
        try:
            shutil.rmtree(final, ignore_errors=True)
            self._partial.rename(final)
        except OSError as error:
            raise cannot_use(str(final), error) from error
        self._partial, self.newest, self.version = None, final, version
        self._buffer.drop()
        await fleet.each(self.load)
        for older in self._folder.glob(f"{PREFIX}*"):
            if older != final:
                shutil.rmtree(older, ignore_errors=True)

    async def load(self, server: Server) -> None:
        """Let one server read the newest folder. ``EngineError``: it cannot; its weights may be half of each."""
        assert self.newest is not None, "nothing was written yet"
        request = {"model_path": str(self.newest), "load_format": "safetensors", "flush_cache": False}
        await ordered(server, UPDATE_FROM_DISK, request, deadline_s=self._timeout_s)

    async def abandon(self) -> None:
        self._buffer.drop()
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial = None

    async def close(self) -> None:
        """The newest folder stays: it is the user's disk, and the run may go on."""
        await self.abandon()


def _write(path: Path, bucket: Bucket) -> None:
    """No fsync: what a crash of the machine leaves behind is never read, a new run sends its own."""
    try:
        with open(path, "wb", buffering=0) as file:
            for rest in (memoryview(header(bucket.pieces)), bucket.data_U.numpy().data):
                while rest:
                    rest = rest[os.write(file.fileno(), rest) :]
    except OSError as error:
        raise cannot_use(str(path), error) from error
