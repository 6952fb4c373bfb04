"""New weights from the actor to the engine: every Hugging Face tensor once, streamed, under a version number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mdapo.rollout.engine import Engine

if TYPE_CHECKING:
    import torch

    from mdapo.megatron.actor import Actor
    from mdapo.rollout.event_loop import EventLoop


def sync_weights(actor: Actor, engine: Engine | None, *, version: int, loop: EventLoop | None) -> None:
    """Collective over all ranks: each takes part in gathering the shards, rank 0 (which has the engine) sends them on.

    The engine answers with ``version`` from the moment this returns. At most one gathered tensor is alive at a time.
    """
    weights: Iterator[tuple[str, torch.Tensor]] = actor.export()
    if engine is None:
        for _ in weights:
            pass
        return
    assert loop is not None
    loop.run(engine.update_weights(weights, version))
