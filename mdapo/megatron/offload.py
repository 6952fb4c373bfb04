"""``actor.offload``: gradients, and the optimizer's masters and moments, leave the device while the engine works on it.

The weights stay: a sync reads them, and so does ``sync.check`` after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

What = Literal["none", "gradients", "optimizer"]
AWAY = torch.device("cpu")
MOMENTS = {"exp_avg", "exp_avg_sq"}  # AdamW's


class Offload:
    """What an actor's ``chunks`` (DDP-wrapped) and ``optimizer`` have on ``home``; there at first."""

    def __init__(self, chunks: Sequence[Any], optimizer: Any, *, home: torch.device, what: What) -> None:
        self.chunks, self.optimizer, self.home, self.what = chunks, optimizer, home, what
        self.is_away = False

    def leave(self) -> None:
        """Gradients are freed: the next backward begins with zeros. What else goes is kept in the host's memory."""
        if self.what == "none" or self.is_away:
            return
        self.is_away = True
        for buffer in self._buffers():
            buffer.offload_to_cpu(move_params=False, move_grads=True)
        if self.what == "optimizer":
            self._move(AWAY)
        _give_back_cached(self.home)

    def back(self) -> None:
        """All is where it was, the gradients zero."""
        if not self.is_away:
            return
        self.is_away = False
        for buffer in self._buffers():
            buffer.reload_from_cpu(move_params=False, move_grads=True)
        if self.what == "optimizer":
            self._move(self.home)

    def _buffers(self) -> Iterator[Any]:
        for chunk in self.chunks:
            yield from chunk.buffers
            yield from chunk.expert_parallel_buffers

    def _move(self, to: torch.device) -> None:
        weights = {parameter.untyped_storage().data_ptr() for chunk in self.chunks for parameter in chunk.parameters()}
        for part in self.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                for master in group["params"]:
                    # Of a float32 model it is a view of the weight itself, which stays.
                    if master.untyped_storage().data_ptr() not in weights:
                        master.data = moved(master.data, to)
            for entry in part.optimizer.state.values():
                for name in entry.keys() & MOMENTS:
                    entry[name] = moved(entry[name], to)


def moved(tensor: Tensor, to: torch.device) -> Tensor:
    return tensor.to(to)


def _give_back_cached(device: torch.device) -> None:
    """To the device's other processes: torch keeps what is freed."""
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()
