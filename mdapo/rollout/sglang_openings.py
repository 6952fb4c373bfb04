"""A group's prompt is computed once at a server, before its dialogues ask there for their first turns.

SGLang shares what is in its cache when a request is scheduled. The samples of a group are asked for together, are
scheduled together, and would each compute the prompt.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Protocol

from mdapo.rollout.engine import Request
from mdapo.rollout.sglang_replies import NothingListens, Unavailable
from mdapo.rollout.sglang_servers import Flight, Server


class Requests(Protocol):
    """What is needed of the engine."""

    def take_off(self, request: Request, server: Server) -> Flight:
        """Send it."""
        ...

    def give_up(self, flight: Flight) -> None:
        """Nobody waits for it any more."""
        ...

    def sweep(self, flight: Flight) -> None:
        """It was lost, and the server may still be at it."""
        ...


class Openings:
    """Which groups' prompts are, or are about to be, in which servers' caches. Not ``on``: nothing is done."""

    def __init__(self, requests: Requests, *, on: bool) -> None:
        self.requests, self.on = requests, on
        self._begun: dict[tuple[str, str], Flight] = {}  # group, URL

    async def once(self, request: Request, server: Server) -> bool:
        """The first of a group to come to a server has it compute the prompt, by a request for one token that nobody
        reads; all wait for that. False: no whole answer came, perhaps for as long as an attempt lasts, and another
        server should be asked. Whatever else is wrong with this one shows in the turn itself."""
        if not self.on:
            return True
        key, own, began = (request.group, server.url), None, server.health.clock()
        if key not in self._begun:
            params = replace(request.params, max_new_tokens=1, ignore_eos=True, stop_ids=())
            own = self._begun[key] = self.requests.take_off(replace(request, params=params), server)
        opening = self._begun[key]
        try:
            await asyncio.wait([opening.task])
        except asyncio.CancelledError:
            if own is not None:  # the others go on without
                self.requests.give_up(own)
            raise
        error = None if opening.task.cancelled() else opening.task.exception()
        if opening.why or not isinstance(error, Unavailable) or isinstance(error, NothingListens):
            return True
        if own is not None:
            server.health.failed(str(error), began=began)
            self.requests.sweep(own)
        return False

    def forget(self, group: str) -> None:
        """It has no dialogue any more."""
        for key in [key for key in self._begun if key[0] == group]:
            del self._begun[key]

    def clear(self) -> None:
        """The caches were dropped."""
        self._begun.clear()
