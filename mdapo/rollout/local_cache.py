"""Which dialogue sits in which KV-cache slot, and how much of a new request some slot has already computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

WORTH_WAITING = 16  # tokens that a prompt now being computed must spare before a request waits for it


@dataclass
class _Slot:
    session: str | None = None
    ids: list[int] = field(default_factory=list)  # tokens whose keys and values are in the cache
    used: int = 0  # tick of the last request


class SlotTable:
    """Slots by session, least recently used idle ones given away first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._slots = [_Slot() for _ in range(count)]
        self._by_session: dict[str, int] = {}
        self._tick = 0

    def ids(self, slot: int) -> list[int]:
        return self._slots[slot].ids

    def slot_of(self, session: str) -> int | None:
        return self._by_session.get(session)

    def place(
        self, session: str, ids: Sequence[int], *, keep: Set[str], coming: Iterable[Sequence[int]]
    ) -> tuple[int, int, int] | None:
        """``(slot, donor, cached)`` for a request: copy ``cached`` tokens from ``donor``, which may be the slot itself.

        None: wait, because all slots belong to sessions in ``keep`` or because one of the prompts ``coming`` will
        spare at least ``WORTH_WAITING`` tokens more than any slot does now. The last token is never counted as cached,
        for its logits are asked for.
        """
        most = len(ids) - 1
        own = self._by_session.get(session)
        donor, cached = own, 0
        if own is not None:
            cached = common_prefix(self._slots[own].ids, ids, most)
        for i, slot in enumerate(self._slots):
            if i != own and (shared := common_prefix(slot.ids, ids, most)) > cached + (own is not None) * WORTH_WAITING:
                donor, cached = i, shared
        if any(common_prefix(prompt, ids, most) >= cached + WORTH_WAITING for prompt in coming):
            return None
        slot = own if own is not None else self._free(keep)
        if slot is None:
            return None
        if own is None:
            self._take(slot, session)
        self._tick += 1
        entry = self._slots[slot]
        entry.used, entry.ids = self._tick, list(ids[:cached])
        return slot, slot if donor is None else donor, cached

    def _free(self, keep: Set[str]) -> int | None:
        best = None
        for i, slot in enumerate(self._slots):
            if slot.session is None:
                return i
            if slot.session not in keep and (best is None or slot.used < self._slots[best].used):
                best = i
        return best

    def _take(self, slot: int, session: str) -> None:
        old = self._slots[slot].session
        if old is not None:
            del self._by_session[old]
        self._slots[slot].session = session
        self._by_session[session] = slot

    def free_between(self, low: int, high: int) -> int | None:
        """The first slot above ``low`` and below ``high`` that belongs to nobody."""
        return next((i for i in range(low + 1, high) if self._slots[i].session is None), None)

    def move(self, source: int, target: int) -> None:
        session = self._slots[source].session
        assert session is not None and self._slots[target].session is None
        self._slots[target], self._slots[source] = self._slots[source], _Slot()
        self._by_session[session] = target

    def drop(self, session: str) -> None:
        """Forget a session. Its tokens stay readable as a donor until the slot is taken."""
        slot = self._by_session.pop(session, None)
        if slot is not None:
            self._slots[slot].session = None

    def clear(self) -> None:
        """Forget every session and every cached token."""
        self._slots = [_Slot() for _ in self._slots]
        self._by_session.clear()


def common_prefix(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """Length of the longest common prefix, at most ``most``."""
    low, high = 0, min(len(a), len(b), most)
    while low < high:  # comparing slices is far quicker than a loop over tokens
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
