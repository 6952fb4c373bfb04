"""The stream: epochs, limits, and a cursor that follows what was trained."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.data.prompts import PromptStream, permutation
from mdapo.errors import UserError
from mdapo.types import Message, Prompt


def make(n: int) -> list[Prompt]:
    return [Prompt(uid=f"p{i}", row=i, messages=(Message("user", f"Number {i}?"),)) for i in range(n)]


def stream(n: int, *, seed: int = 0, shuffle: bool = True, epochs: int | None = None) -> PromptStream:
    return PromptStream(make(n), seed=seed, shuffle=shuffle, epochs=epochs)


def uids(prompts: list[Prompt]) -> list[str]:
    return [p.uid for p in prompts]


def test_asking_for_more_than_an_epoch_gives_exactly_as_many() -> None:
    """case 8: 3 prompts, 8 asked for: 8 come, and the cursor is at epoch 2, offset 2."""
    s = stream(3)
    dealt = uids(s.next(8))
    assert len(dealt) == 8
    assert (s.epoch, s.offset) == (2, 2)
    assert sorted(dealt[:3]) == sorted(dealt[3:6]) == ["p0", "p1", "p2"]


def test_empty_data_set_is_a_clear_error() -> None:
    """case 8, second half."""
    with pytest.raises(UserError, match="data set is empty"):
        stream(0)


def test_stream_with_a_limit_says_that_it_is_exhausted_and_gives_the_rest() -> None:
    """cases 2 and 3: the last prompts are still dealt out, and the end is announced, not met by surprise."""
    s = stream(3, epochs=2)
    assert len(s.next(4)) == 4 and not s.exhausted
    rest = s.next(4)
    assert len(rest) == 2 and s.exhausted
    assert s.next(1) == []
    s.put_back([rest[0].uid])
    assert not s.exhausted
    assert s.next(4) == [rest[0]]


def test_without_shuffle_the_order_is_that_of_the_files() -> None:
    assert uids(stream(3, shuffle=False).next(5)) == ["p0", "p1", "p2", "p0", "p1"]


def test_order_depends_on_seed_and_epoch_only() -> None:
    a, b, other = stream(20), stream(20), stream(20, seed=1)
    first = uids(a.next(20))
    assert first == uids(b.next(13)) + uids(b.next(7))
    assert first != uids(other.next(20))
    assert first != uids(a.next(20))


def test_permutation_is_pinned() -> None:
    """A resumed run on another machine must meet the same order."""
    assert sorted(permutation(100, seed=3, epoch=2).tolist()) == list(range(100))
    assert permutation(6, seed=0, epoch=0).tolist() == [3, 2, 1, 0, 4, 5]


def test_prompts_in_flight_at_a_save_come_again_first() -> None:
    """case 24."""
    s = stream(10)
    dealt = uids(s.next(6))
    s.commit([dealt[0], dealt[2]])
    saved = json.loads(json.dumps(s.state()))
    resumed = stream(10)
    resumed.restore(saved)
    assert uids(resumed.next(4)) == [dealt[i] for i in (1, 3, 4, 5)]
    assert uids(resumed.next(4)) == uids(s.next(4))


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(1, 9),
    seed=st.integers(0, 3),
    actions=st.lists(
        st.tuples(st.sampled_from(["next", "commit", "back", "save", "crash"]), st.integers(1, 6)), max_size=40
    ),
)
def test_each_prompt_is_trained_exactly_once_an_epoch_whatever_happens(
    n: int, seed: int, actions: list[tuple[str, int]]
) -> None:
    """case 24: any mix of dealing out, training, putting back, saving and crashing."""
    s = stream(n, seed=seed, epochs=3)
    flying: list[str] = []
    waiting = 0  # put back, not dealt out again
    trained: Counter[str] = Counter()
    saved, saved_trained = s.state(), Counter(trained)
    for action, k in actions:
        if action == "next":
            dealt = uids(s.next(k))
            flying += dealt
            waiting -= min(waiting, len(dealt))
        elif action == "commit":
            done, flying = flying[-k:], flying[:-k]
            s.commit(done)
            trained.update(done)
        elif action == "back":
            back, flying = flying[:k], flying[k:]
            s.put_back(back)
            waiting += len(back)
        elif action == "save":
            saved, saved_trained = json.loads(json.dumps(s.state())), Counter(trained)
        else:
            s, flying, trained = stream(n, seed=seed, epochs=3), [], Counter(saved_trained)
            s.restore(saved)
            waiting = len(saved["again"])
        assert len(s.state()["again"]) == len(flying) + waiting
    while flying or not s.exhausted:
        s.commit(flying)
        trained.update(flying)
        flying = uids(s.next(4))
    assert trained == Counter({f"p{i}": 3 for i in range(n)})


def test_groups_that_the_checkpoint_carries_do_not_come_again() -> None:
    s = stream(6)
    dealt = uids(s.next(4))
    saved = s.state()
    resumed = stream(6)
    resumed.restore(saved, held=dealt[1:3])
    assert uids(resumed.next(2)) == [dealt[0], dealt[3]]
    resumed.commit(dealt)
    assert resumed.state()["again"] == []


def test_same_prompt_in_flight_in_two_epochs_is_committed_once_for_each() -> None:
    s = stream(1)
    s.next(2)
    s.commit(["p0"])
    resumed = stream(1)
    resumed.restore(s.state())
    assert (resumed.next(1)[0].uid, resumed.epoch) == ("p0", 2)
    with pytest.raises(AssertionError, match="not outstanding"):
        resumed.commit(["p0", "p0"])


def test_resuming_with_other_data_or_seed_names_the_keys() -> None:
    saved = stream(4).state()
    with pytest.raises(UserError) as caught:
        stream(5, seed=1, shuffle=False).restore(saved)
    text = str(caught.value)
    assert all(key in text for key in ("run.seed", "data.shuffle", "data.train_files"))
