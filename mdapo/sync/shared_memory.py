"""``sync.mode: tensor``: buckets in shared memory, for servers on the same machine.

SGLang's own endpoint for this, ``/update_weights_from_tensor``, takes pickles, in which whoever reaches the port can
send a program; none crosses a socket here. Instead a bucket is built, as a safetensors file, in memory that has no name
in any file system (memfd); the server maps it through ``/proc`` and copies it into its weights: its
``/update_weights_from_disk`` takes a folder with some of the weights as well as one with all. The kernel takes the
memory back when the last process that maps it ends, however it ends.
"""

from __future__ import annotations

import mmap
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from mdapo.errors import cannot_use
from mdapo.rollout.sglang_guard import locked_folder
from mdapo.sync.buckets import Bucket
from mdapo.sync.safetensors_file import header
from mdapo.sync.servers import Fleet, Server, ordered
from mdapo.sync.transport import UPDATE_FROM_DISK

HEADER_ROOM = 1 << 20  # bytes before the data: the header is known only when a bucket is full


class SharedMemory:
    """A file without a name, mapped here: ``HEADER_ROOM`` bytes, then the data."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("mdapo-weights", os.MFD_CLOEXEC)
        self._mapped: mmap.mmap | None = None
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def take(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of the file's data, mapped; the file is just as long. Void: what an earlier call returned.

        ``OSError``: no memory left.
        """
        size = HEADER_ROOM + nbytes
        if self._mapped is None or len(self._mapped) != size:
            self._mapped = None  # unmapped when the last tensor on it is gone
            os.ftruncate(self._descriptor, size)
            self._mapped = mmap.mmap(self._descriptor, size)
        else:
            os.ftruncate(self._descriptor, size)  # the bucket before may have been shorter
        return torch.frombuffer(self._mapped, dtype=torch.uint8)[HEADER_ROOM:]

    def seal(self, bucket: Bucket) -> None:
        """Make the file that of exactly this bucket, whose data is in it."""
        assert self._mapped is not None, "take comes first"
        text = header(bucket.pieces, room=HEADER_ROOM)
        self._mapped[:HEADER_ROOM] = text
        os.ftruncate(self._descriptor, HEADER_ROOM + bucket.nbytes)

    def close(self) -> None:
        self._mapped = None
        os.close(self._descriptor)


class TensorTransport:
    """One bucket in shared memory at a time; every server copies it before the next is made."""

    def __init__(self, *, timeout_s: float) -> None:
        self.bytes_sent = 0
        self._timeout_s = timeout_s
        self._memory: SharedMemory | None = None
        self._folder: Path | None = None
        self._lock = -1

    def take(self, nbytes: int) -> Tensor:
        assert self._memory is not None, "begin comes first"
        return self._memory.take(nbytes)

    async def begin(self, fleet: Fleet, version: int) -> None:
        """``StorageError``, ``UserError``: no temporary folder can be made."""
        await self.abandon()
        try:
            # Readable by this user only; what it holds is a link, not the weights.
            folder, self._lock = locked_folder("mdapo-sync-")
            self._folder = Path(folder)
            self._memory = SharedMemory()
            (self._folder / "model.safetensors").symlink_to(self._memory.path)
        except OSError as error:
            await self.abandon()
            raise cannot_use("shared memory for a weight sync", error) from error

    async def send(self, fleet: Fleet, bucket: Bucket) -> None:
        assert self._memory is not None and self._folder is not None, "begin comes first"
        self._memory.seal(bucket)
        request = {"model_path": str(self._folder), "load_format": "safetensors", "flush_cache": False}

        async def load(server: Server) -> None:
            await ordered(server, UPDATE_FROM_DISK, request, deadline_s=self._timeout_s)

        await fleet.each(load)
        self.bytes_sent += bucket.nbytes

    async def finish(self, fleet: Fleet, version: int) -> None:
        await self.abandon()

    async def abandon(self) -> None:
        if self._memory is not None:
            self._memory.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
        self._memory = self._folder = None

    async def close(self) -> None:
        await self.abandon()
