"""New weights from the actor to the engine: every Hugging Face tensor once, streamed, under a version number."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from mdapo.errors import StorageError, UserError
from mdapo.megatron.layout import broadcast_bytes
from mdapo.rollout.engine import Engine, EngineError

if TYPE_CHECKING:
    import torch.distributed as dist

    from mdapo.megatron.actor import Actor
    from mdapo.rollout.event_loop import EventLoop
    from mdapo.sync.push import Pusher

TRIES = 2
# What rank 0 may meet, and every rank must raise with it: none waits for a word that never comes.
SHARED: dict[str, type[Exception]] = {kind.__name__: kind for kind in (EngineError, StorageError, UserError)}


def sync_weights(
    actor: Actor,
    engine: Engine | None,
    *,
    version: int,
    loop: EventLoop | None,
    pusher: Pusher | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Collective over all ranks: each takes part in gathering the shards, rank 0 (which has the engine) sends them on.

    The engine answers with ``version`` from the moment this returns. At most one gathered tensor is alive at a time.
    With a ``pusher`` (rank 0, servers) a server that lost its weights through another one's failure is given them once
    more. On every rank, ``EngineError``: the engine has no weights to answer with; ``StorageError``, ``UserError``: the
    disk or the shared memory on their way failed. ``group``: all ranks, with a deadline that lets them wait for rank
    0's last calls.
    """
    kind = why = ""
    for attempt in range(TRIES):
        kind, why = _once(actor, engine, version, loop)
        again = pusher is not None and pusher.last is not None and bool(pusher.last.again) and attempt + 1 < TRIES
        said = json.dumps([kind, why, again], allow_nan=False).encode() if engine is not None else None
        kind, why, again = json.loads(broadcast_bytes(said, group=group))
        if not again:
            break
    if kind:
        raise SHARED[kind](why)


def _once(actor: Actor, engine: Engine | None, version: int, loop: EventLoop | None) -> tuple[str, str]:
    """One pass over the weights; the kind of error it ended with, and why. Whatever happens on rank 0, the gathering
    goes on to its end, in this thread, which has the device and the collectives."""
    weights = actor.export()
    try:
        if engine is not None:
            assert loop is not None
            loop.feed(weights, lambda given: engine.update_weights(given, version))
    except tuple(SHARED.values()) as error:
        kind = next(name for name, kind in SHARED.items() if isinstance(error, kind))
        return kind, str(error)
    finally:
        for _ in weights:
            pass
    return "", ""
