"""The protocol of the three ways by which buckets reach servers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from mdapo.sync.buckets import Bucket
from mdapo.sync.servers import Fleet

FLATTENED = "flattened_bucket"
UPDATE_FROM_DISK = "/update_weights_from_disk"


class Transport(Protocol):
    """All servers of the fleet get each bucket together: they are one engine group, and each byte is sent once to it.

    In one sync: ``begin``, then ``send`` for each bucket, made in ``take``'s memory, then ``finish``; or ``abandon``
    wherever it ended early. A server that fails is lost from the fleet, and the others go on.
    """

    bytes_sent: int  # since it was made

    def take(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] for the next bucket; void what was taken before."""
        ...

    async def begin(self, fleet: Fleet, version: int) -> None: ...

    async def send(self, fleet: Fleet, bucket: Bucket) -> None:
        """When this returns the servers that are left have the bucket in their weights, or (disk) will in finish."""
        ...

    async def finish(self, fleet: Fleet, version: int) -> None:
        """All weights are in the servers that are left; the buffer is given back."""
        ...

    async def abandon(self) -> None:
        """Give back the buffer and whatever was half made."""
        ...

    async def close(self) -> None:
        """The run is over: leave no group, file or memory behind."""
        ...
