"""Slots: whose they are, what they hold, who must wait."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from mdapo.rollout.local_cache import WORTH_WAITING, SlotTable, common_prefix

LONG = list(range(100))


def filled(table: SlotTable, session: str, ids: Sequence[int]) -> int:
    """Place and compute."""
    placed = table.place(session, ids, keep=set(), coming=[])
    assert placed is not None
    table.ids(placed[0])[:] = list(ids)
    return placed[0]


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12), st.integers(0, 14))
def test_common_prefix_counts_what_a_loop_counts(a: list[int], b: list[int], most: int) -> None:
    count = 0
    while count < min(len(a), len(b), most) and a[count] == b[count]:
        count += 1
    assert common_prefix(a, b, most) == count


def test_a_new_session_takes_the_longest_prefix_from_whoever_has_it() -> None:
    table = SlotTable(4)
    filled(table, "a", LONG[:30])
    donor = filled(table, "b", LONG[:60])
    assert table.place("c", LONG, keep=set(), coming=[]) == (2, donor, 60)
    assert table.ids(2) == LONG[:60]


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    table = SlotTable(2)
    slot = filled(table, "a", LONG)
    assert table.place("a", LONG, keep=set(), coming=[]) == (slot, slot, 99)


def test_a_session_that_differs_keeps_what_is_common() -> None:
    table = SlotTable(2)
    slot = filled(table, "a", LONG)
    assert table.place("a", [*LONG[:40], 999, 998], keep=set(), coming=[]) == (slot, slot, 40)
    assert table.ids(slot) == LONG[:40]


def test_a_prompt_on_its_way_is_waited_for_only_when_it_spares_enough() -> None:
    table = SlotTable(4)
    filled(table, "a", LONG[:30])
    enough = LONG[: 30 + WORTH_WAITING]
    assert table.place("b", LONG, keep=set(), coming=[enough]) is None
    assert table.place("b", LONG, keep=set(), coming=[enough[:-1]]) is not None


def test_what_a_finished_session_computed_serves_others_until_its_slot_is_taken() -> None:
    table = SlotTable(2)
    first = filled(table, "a", LONG)
    table.drop("a")
    assert table.slot_of("a") is None
    assert table.place("b", LONG, keep=set(), coming=[]) == (first, first, 99)


def test_all_slots_needed_means_wait() -> None:
    table = SlotTable(1)
    filled(table, "a", LONG)
    assert table.place("b", [1, 2], keep={"a"}, coming=[]) is None
    assert table.place("b", [1, 2], keep=set(), coming=[]) is not None
    assert table.slot_of("a") is None


def test_a_moved_session_is_found_where_it_went() -> None:
    table = SlotTable(3)
    for name in "abc":
        filled(table, name, [ord(name)] * 5)
    table.drop("b")
    assert table.free_between(0, 2) == 1
    table.move(2, 1)
    assert (table.slot_of("c"), table.ids(1), table.ids(2)) == (1, [ord("c")] * 5, [])
    assert table.free_between(0, 1) is None
