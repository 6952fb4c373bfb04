"""Bytes and back: equal in every bit; damaged bytes are refused in one sentence; files appear whole or not at all."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load as load_arrays

from mdapo.data.shares import Share, pack_shares, rows_of
from mdapo.data.unfold import unfold
from mdapo.data.wire import dump_groups, dump_share, load_groups, load_groups_file, load_share, save_groups_file
from mdapo.errors import UserError
from mdapo.types import NO_SAMPLES, Episode, Group, Message, Prompt, Sample, Samples, Score, Turn

TEXT = "Grüße 你好 🙂 \x00\n\u2028 \ud83d"  # the last is half a character, as a cut-off generation leaves it
HALF_EXACT = 0.1 + 0.2


def a_group(seed: int, *, name: str = "p") -> Group:
    rng = np.random.default_rng(seed)
    messages = (Message("system", TEXT), Message("user", "hello"))
    prompt = Prompt(name, seed, messages, "gsm8k", {"answer": [1, None, HALF_EXACT]}, {"ünit": {"a": [True]}, "b": ""})
    scores = [
        Score(HALF_EXACT, 1.0, {"success": 1.0, "tone": math.nan, "-0": -0.0, "inf": -math.inf}),
        Score(0.0, 0.0, valid=False),
        None,
    ]
    episodes = []
    for i, score in enumerate(scores):
        turns = [
            Turn(
                "assistant",
                rng.integers(0, 2**31 - 1, n, dtype=np.int32),
                np.arange(n) != 2,
                logps(rng, n),
                4,
                "length",
            )
            for n in (3, 0, 5)[: i + 1]
        ]
        turns.append(Turn("tool", np.array([7, 8], np.int32), np.zeros(2, bool), np.full(2, np.nan, np.float32)))
        ids = rng.integers(0, 99, i, dtype=np.int32)
        episodes.append(
            Episode(prompt, i, ids, tuple(turns), (*messages, Message("assistant", TEXT)), "aborted", score)
        )
    return Group(prompt, tuple(episodes), version=seed - 1)


def logps(rng: np.random.Generator, n: int) -> np.ndarray:
    values = -rng.exponential(size=n).astype(np.float32)
    values[1:2] = np.nan
    values[2:3] = -np.inf
    return values


def assert_same_groups(a: list[Group], b: list[Group]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert (x.prompt, x.version, len(x.episodes)) == (y.prompt, y.version, len(y.episodes))
        for e, f in zip(x.episodes, y.episodes, strict=True):
            assert (e.prompt, e.index, e.messages, e.end, repr(e.score)) == (
                f.prompt,
                f.index,
                f.messages,
                f.end,
                repr(f.score),
            )
            assert_same_array(e.prompt_ids, f.prompt_ids)
            for t, u in zip(e.turns, f.turns, strict=True):
                assert (t.role, t.version, t.finish) == (u.role, u.version, u.finish)
                for field in ("ids", "mask", "logps"):
                    assert_same_array(getattr(t, field), getattr(u, field))


def assert_same_array(a: np.ndarray, b: np.ndarray) -> None:
    assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def test_groups_come_back_equal_in_every_bit() -> None:
    groups = [a_group(1), a_group(2, name="q")]
    assert_same_groups(groups, load_groups(dump_groups(groups)))
    assert dump_groups(load_groups(dump_groups(groups))) == dump_groups(groups)
    assert load_groups(dump_groups([])) == []


@settings(max_examples=40, deadline=None)
@given(
    text=st.text(st.characters(codec=None, exclude_categories=())),
    value=st.floats(),
    data=st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5),
)
def test_any_text_score_and_json_data_survive(text: str, value: float, data: object) -> None:
    prompt = Prompt("p", 0, (Message("user", text),), ground_truth=data, extra={"k": data})
    episode = Episode(prompt, 0, np.zeros(1, np.int32), (), prompt.messages, "done", Score(value, value, {text: value}))
    groups = [Group(prompt, (episode,), 0)]
    assert_same_groups(groups, load_groups(dump_groups(groups)))


def a_share(*lengths: int) -> Share:
    """Two mini-batches: the first with a micro-batch of every row but the last, the second with that."""
    rng = np.random.default_rng(sum(lengths))
    samples = [
        Sample(
            uid=str(i),
            group=i,
            ids=rng.integers(1, 99, n).astype(np.int32),
            response_mask=np.arange(n) > 0,
            rollout_logps=np.full(n, np.nan, np.float32),
            versions=np.zeros(n, np.int32),
            advantages=rng.normal(size=n).astype(np.float32),
            loss_weights=np.ones(n, np.float32),
        )
        for i, n in enumerate(lengths)
    ]
    last = len(lengths) - 1
    [share] = pack_shares(rows_of(Samples.of(samples)), [[[range(last), []], [[last]]]])
    return share


def test_shares_come_back_equal_in_every_bit() -> None:
    share = a_share(5, 3, 9, 2)
    back = load_share(dump_share(share))
    assert back.micro_batches == share.micro_batches == (2, 1)
    assert_same_array(back.cu_seqlens_N1, share.cu_seqlens_N1)
    assert_same_array(back.bounds_G1, share.bounds_G1)
    assert back.fields.keys() == share.fields.keys()
    for name, field in share.fields.items():
        assert_same_array(back.fields[name], field)


def test_a_share_is_plain_safetensors() -> None:
    share = a_share(5, 3)
    assert set(load_arrays(dump_share(share))) == {"micro_batches", "cu_seqlens", "bounds", *share.fields}


@pytest.mark.parametrize("plan", [[[]], [[[]]]])
def test_a_rank_may_have_nothing(plan: Any) -> None:
    [share] = pack_shares(rows_of(NO_SAMPLES), plan)
    back = load_share(dump_share(share))
    assert unfold(back) == plan[0]


@pytest.mark.parametrize("change", [
    {"cu_seqlens_N1": np.array([0, 9, 4, 17, 19, 21])}, {"bounds_G1": np.array([0, 1, 2])}, {"micro_batches": (1, 1)},
    {"micro_batches": (4, -1)}, {"cu_seqlens_N1": np.zeros(0, np.int64)},
], ids=str)  # fmt: skip
def test_a_share_that_does_not_add_up_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="not a share"):
        load_share(dump_share(replace(a_share(5, 3, 9, 2), **change)))


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 60, -1])
def test_cut_off_bytes_are_refused(cut: int) -> None:
    for data, load in ((dump_groups([a_group(1)]), load_groups), (dump_share(a_share(5, 3)), load_share)):
        with pytest.raises(UserError, match=r"^[^\n]+$"):
            load(data[:cut])


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_read_never_a_crash(position: int, byte: int) -> None:
    for data, load in ((dump_groups([a_group(1)]), load_groups), (dump_share(a_share(5, 3)), load_share)):
        damaged = bytearray(data)
        damaged[position % len(data)] = byte
        try:
            load(bytes(damaged))
        except UserError as error:
            assert len(error.problems) == 1


def test_each_loader_refuses_the_others_bytes() -> None:
    with pytest.raises(UserError, match="recorded groups"):
        load_groups(dump_share(a_share(5, 3)))
    with pytest.raises(UserError, match="share"):
        load_share(dump_groups([a_group(1)]))


def test_files_are_replaced_whole_and_errors_name_them(tmp_path: Path) -> None:
    path = tmp_path / "replay" / "step_000001.safetensors"
    save_groups_file(path, [a_group(1)])
    save_groups_file(path, [a_group(2)])
    assert_same_groups([a_group(2)], load_groups_file(path))
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    path.write_bytes(b"rubbish")
    with pytest.raises(UserError, match=path.name):
        load_groups_file(path)
    with pytest.raises(UserError, match=r"missing\.safetensors"):
        load_groups_file(tmp_path / "missing.safetensors")


def test_groups_recorded_twice_are_the_same_bytes() -> None:
    """Replay compares runs by file."""
    group = a_group(3)
    assert dump_groups([group]) == dump_groups([replace(group)])
