"""The collective pass on one rank: a second try for servers that only shared a failure, and a verdict for all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch.distributed as dist
from recording import weights
from torch import Tensor

from mdapo.errors import StorageError, UserError
from mdapo.rollout.engine import EngineError
from mdapo.rollout.event_loop import EventLoop
from mdapo.sync import weights as sync
from mdapo.sync.push import Outcome
from mdapo.sync.weights import sync_weights


class Streams:
    """An actor whose gathering must go on to its end, or the other ranks would wait."""

    def __init__(self) -> None:
        self.begun = self.ended = 0

    def export(self) -> Iterator[tuple[str, Tensor]]:
        self.begun += 1
        yield from weights()
        self.ended += 1


class Servers:
    """Engine and pusher in one: each call goes as ``plan`` says ("good", "again", "fails")."""

    def __init__(self, *plan: str) -> None:
        self.plan, self.last = list(plan), None

    async def update_weights(self, stream: Any, version: int) -> None:
        kind = self.plan.pop(0)
        next(stream)
        again = frozenset({"u"} if kind == "again" else ())
        self.last = Outcome(version, (), {}, again, 0, 0.0)
        if kind != "good":
            raise EngineError("no server took the weights")


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("plan", "passes", "fails"),
    [(("good",), 1, False), (("again", "good"), 2, False), (("again", "again"), 2, True), (("fails",), 1, True)],
)
def test_what_shared_a_failure_is_tried_once_more(group: None, plan: tuple[str, ...], passes: int, fails: bool) -> None:
    actor, servers = Streams(), Servers(*plan)
    with closing(EventLoop()) as loop:
        if fails:
            with pytest.raises(EngineError, match="no server took the weights"):
                sync_weights(actor, servers, version=1, loop=loop, pusher=servers)
        else:
            sync_weights(actor, servers, version=1, loop=loop, pusher=servers)
    assert (actor.begun, actor.ended) == (passes, passes)
    assert servers.plan == []


@pytest.mark.parametrize("error", [StorageError("the disk is full"), UserError("no such folder")])
def test_what_people_can_mend_is_heard_by_every_rank(group: None, error: Exception) -> None:
    """As a rank that has no engine hears it: by the word that rank 0 sends, not by an exception of its own."""

    class Fails(Servers):
        async def update_weights(self, stream: Any, version: int) -> None:
            next(stream)
            raise error

    actor, said = Streams(), []
    with closing(EventLoop()) as loop, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync, "broadcast_bytes", lambda payload, group: said.append(payload) or payload)
        with pytest.raises(type(error), match=str(error)):
            sync_weights(actor, Fails(), version=1, loop=loop)
        assert actor.ended == 1
        patch.setattr(sync, "broadcast_bytes", lambda payload, group: said[0])
        with pytest.raises(type(error), match=str(error)):
            sync_weights(actor, None, version=1, loop=None)
    assert actor.ended == 2


def test_an_error_of_ours_still_lets_the_other_ranks_finish_their_part(group: None) -> None:
    class Broken(Servers):
        async def update_weights(self, stream: Any, version: int) -> None:
            next(stream)
            raise ZeroDivisionError

    actor = Streams()
    with closing(EventLoop()) as loop, pytest.raises(ZeroDivisionError):
        sync_weights(actor, Broken(), version=1, loop=loop)
    assert actor.ended == 1
