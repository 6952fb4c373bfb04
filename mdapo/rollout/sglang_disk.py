"""New weights by way of a file system that trainer and servers share: the plainest of the ways, and one that lets a
server that was started again catch up without the trainer."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from mdapo.errors import cannot_use
from mdapo.rollout.engine import EngineError
from mdapo.rollout.sglang_client import WEIGHTS_S, Client

if TYPE_CHECKING:
    import torch

FILE_BYTES = 512 << 20


class DiskWeights:
    """Writes each version as safetensors to a folder of its own, private to this user, and keeps the newest.

    ``parent``: where the servers see the same path; default: the system's temporary folder, for servers on this
    machine.
    """

    def __init__(self, parent: str | Path | None = None, *, file_bytes: int = FILE_BYTES) -> None:
        try:
            self.root = Path(tempfile.mkdtemp(prefix="mdapo-weights-", dir=parent))
        except OSError as error:
            raise cannot_use(f"a folder for weights in {parent or tempfile.gettempdir()}", error) from error
        self.file_bytes = file_bytes

    async def send(
        self, clients: Sequence[Client], weights: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> Mapping[str, str]:
        """``Sync`` of the engine. ``StorageError`` or ``UserError`` when the weights cannot be written."""
        folder = self.folder(version)
        partial = self.root / f"{folder.name}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)  # of an update that was interrupted
            partial.mkdir()
            for i, part in enumerate(_parts(weights, self.file_bytes)):
                save_file(part, partial / f"model-{i:05d}.safetensors", metadata={"format": "pt"})
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)  # under its name it is whole
        except OSError as error:
            raise cannot_use(f"weights in {partial}", error) from error
        found = await asyncio.gather(*(self._told(client, version) for client in clients))
        for other in self.root.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        return {client.url: why for client, why in zip(clients, found, strict=True) if why}

    async def again(self, client: Client, version: int) -> None:
        """``Resync`` of the engine: ``EngineError`` when the server does not take them, or they are not here."""
        folder = self.folder(version)
        if not folder.is_dir():
            raise EngineError(f"the weights of version {version} have not been written yet")
        await client.update_from_disk(folder, version, deadline_s=WEIGHTS_S)
        await client.resume()  # whoever paused it did not end what it began

    def folder(self, version: int) -> Path:
        return self.root / f"version-{version}"

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    async def _told(self, client: Client, version: int) -> str:
        try:
            await self.again(client, version)
        except EngineError as error:
            return str(error)
        return ""


def _parts(weights: Iterable[tuple[str, torch.Tensor]], most: int) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors in portions of at most ``most`` bytes (one tensor may be more). Each is copied: the sender may use
    its buffer again."""
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        if part and size + tensor.nbytes > most:
            yield part
            part, size = {}, 0
        part[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    if part:
        yield part
