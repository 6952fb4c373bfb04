"""Where turns go."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.rollout.sglang_routing import Routes

A_B = ("http://a:1", "http://b:1")
IDLE = dict.fromkeys([*A_B, "http://c:1"], 0)


def test_a_group_and_the_turns_of_its_dialogues_share_a_server() -> None:
    routes = Routes(64)
    for group in range(20):
        homes = {
            routes.pick(f"{group}/{i}", f"g{group}", usable=A_B, load=IDLE) for _turn in range(3) for i in range(8)
        }
        assert len(homes) == 1


@settings(deadline=None)
@given(groups=st.integers(1, 60), servers=st.integers(1, 7), salt=st.integers(0, 1000))
def test_no_server_has_more_than_its_share_and_a_quarter(groups: int, servers: int, salt: int) -> None:
    usable = [f"http://s{i}:{salt}" for i in range(servers)]
    routes = Routes(64)
    found = Counter(routes.pick(f"{g}/0", f"g{g}", usable=usable, load=Counter()) for g in range(groups))
    assert max(found.values()) <= -(-groups * 5 // (4 * servers))


def test_when_a_server_goes_only_its_groups_move_and_stay_where_they_went() -> None:
    routes = Routes(64)
    usable = [*A_B, "http://c:1"]
    before = {g: routes.pick(f"{g}/0", f"g{g}", usable=usable, load=IDLE) for g in range(30)}
    left = usable[:2]
    after = {g: routes.pick(f"{g}/0", f"g{g}", usable=left, load=IDLE) for g in range(30)}
    assert all(after[g] == before[g] for g in before if before[g] in left)
    assert set(after.values()) == set(left)
    again = {g: routes.pick(f"{g}/0", f"g{g}", usable=usable, load=IDLE) for g in range(30)}
    assert again == after  # their caches are there now


def test_a_full_server_spills_to_one_that_is_half_empty_and_the_dialogue_stays_there() -> None:
    routes = Routes(8)
    home = routes.pick("g/0", "g", usable=A_B, load=IDLE)
    (other,) = set(A_B) - {home}
    assert routes.pick("g/1", "g", usable=A_B, load={home: 8, other: 5}) == home
    assert routes.pick("g/2", "g", usable=A_B, load={home: 8, other: 4}) == other
    assert routes.pick("g/2", "g", usable=A_B, load=IDLE) == other  # its cache is there
    assert routes.pick("g/3", "g", usable=A_B, load=IDLE) == home


def test_routes_are_the_same_in_every_process() -> None:
    """Python's own hash is salted."""
    routes = Routes(8)
    found = [routes.pick(f"{g}/0", f"g{g}", usable=A_B, load=IDLE)[7] for g in range(12)]
    assert "".join(found) == "abbabaaababa"


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.booleans()), max_size=60))
def test_released_dialogues_leave_nothing_behind(events: list[tuple[int, int, bool]]) -> None:
    routes = Routes(8)
    for group, index, over in events:
        if over:
            routes.release(f"{group}/{index}")
        else:
            routes.pick(f"{group}/{index}", f"g{group}", usable=A_B, load=IDLE)
    for group in range(5):
        for index in range(4):
            routes.release(f"{group}/{index}")
    assert not routes._group
    assert not routes._session
    assert not routes._dialogues
