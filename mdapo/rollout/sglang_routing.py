"""Which server a turn goes to: where its dialogue's and its group's prefixes are cached, as long as that is fair.

A group keeps to the server that rendezvous hashing gives it (Thaler, Ravishankar 1998: when a server goes, only its own
groups move), unless that one has more than ``BOUND`` times its share of the groups already (bounded loads: Mirrokni et
al. 2018, arXiv:1608.01350); then to the next in its own order. All its dialogues follow, except while the server is
full and another half empty. Nothing is drawn at random and no clock is read: equal histories route equally.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from mdapo.rollout.seeds import seed_of

BOUND = 1.25


class Routes:
    """Where groups and dialogues are at home. ``places`` is what each server takes at a time."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._group: dict[str, str] = {}  # group -> server
        self._session: dict[str, tuple[str, str]] = {}  # dialogue -> server, group
        self._dialogues: Counter[str] = Counter()  # of each group

    def pick(self, session: str, group: str, *, usable: Sequence[str], load: Mapping[str, int]) -> str:
        """A server of ``usable`` (not empty), which becomes the dialogue's home. ``load``: open requests of each."""
        found = self._home(session, group, usable)
        least = min(usable, key=lambda name: (load[name], -seed_of(group, name)))
        if load[found] >= self.places and load[least] <= self.places // 2:
            found = least
        if session not in self._session:
            self._dialogues[group] += 1
        self._session[session] = found, group
        return found

    def release(self, session: str) -> str:
        """The dialogue is over; with its last one a group is forgotten, whose name this returns then, else ""."""
        _, group = self._session.pop(session, ("", ""))
        if group:
            self._dialogues[group] -= 1
            if not self._dialogues[group]:
                del self._dialogues[group]
                self._group.pop(group, None)
                return group
        return ""

    def _home(self, session: str, group: str, usable: Sequence[str]) -> str:
        own = self._session.get(session, ("", ""))[0]
        if own in usable:
            return own
        if self._group.get(group) not in usable:
            self._group[group] = self._place(group, usable)
        return self._group[group]

    def _place(self, group: str, usable: Sequence[str]) -> str:
        held = Counter(server for other, server in self._group.items() if server in usable and other != group)
        most = math.ceil(BOUND * (held.total() + 1) / len(usable))
        in_order = sorted(usable, key=lambda name: seed_of(group, name), reverse=True)
        return next(name for name in in_order if held[name] < most)
