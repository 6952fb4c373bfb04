"""What is believed of a server's reply: each field that is not as it must be is found on its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.rollout.engine import Completion, EngineError, SamplingParams
from mdapo.rollout.sglang_replies import Asked, BadReply, Refused, WrongVersion, parse_json, read_completion

PARAMS = SamplingParams(4, stop_ids=(1, 9))
ASKED = Asked("r1", 5, PARAMS, version=3, vocab_size=10)
GOOD: dict[str, Any] = {
    "text": "a b",
    "output_ids": [4, 0, 1],
    "meta_info": {
        "id": "r1",
        "finish_reason": {"type": "stop", "matched": 1},
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "cached_tokens": 2,
        "weight_version": "3",
        "weight_versions": [{"version": "3", "start": 0, "end": 3}],
        "output_token_logprobs": [[-0.5, 4, None], [0.0, 0, None], [-2, 1, "x"]],
    },
}


def reply(*, ids: Any = None, without: str = "", **meta: Any) -> dict[str, Any]:
    """The good reply with other ids (their log-probs with them) and other fields."""
    made = copy.deepcopy(GOOD)
    if ids is not None:
        made["output_ids"] = ids
        made["meta_info"] |= {
            "output_token_logprobs": [[-1.0, t, None] for t in ids],
            "completion_tokens": len(ids),
            "weight_versions": [{"version": "3", "start": 0, "end": len(ids)}],
        }
    made["meta_info"] |= meta
    made["meta_info"].pop(without, None)
    return made


def test_a_good_reply_is_read_whole() -> None:
    assert read_completion(GOOD, ASKED) == Completion((4, 0, 1), (-0.5, 0.0, -2.0), "stop", 3, 2)
    assert read_completion(reply(without="weight_versions"), ASKED).version == 3  # SGLang before 0.5.10 has none
    cut = reply(ids=[4, 4, 4, 4], finish_reason={"type": "length", "length": 4})
    assert read_completion(cut, ASKED).finish == "length"


def test_an_aborted_reply_has_what_there_was() -> None:
    """From a run: a request aborted in the queue has neither prompt_tokens nor cached_tokens; one whose last token was
    a stop token when the abort came keeps it."""
    aborted = {"type": "abort", "message": "Abort in waiting queue"}
    queued = reply(ids=[], finish_reason=aborted, without="prompt_tokens")
    queued["meta_info"].pop("cached_tokens")
    assert read_completion(queued, ASKED) == Completion((), (), "abort", 3, 0)
    assert read_completion(reply(ids=[4, 1], finish_reason=aborted), ASKED).ids == (4, 1)


BAD = {
    "a list": [],
    "null": None,
    "no meta_info": {"output_ids": [1]},
    "another id": reply(id="r2"),
    "too many ids": reply(ids=[4, 4, 4, 4, 1]),
    "id = vocabulary": reply(ids=[10, 1]),
    "negative id": reply(ids=[-1, 1]),
    "float id": reply(ids=[4.0, 1]),
    "bool id": reply(ids=[4, True]),
    "logps short": reply(output_token_logprobs=[[-0.5, 4, None], [-1.0, 0, None]]),
    "logps of others": reply(output_token_logprobs=[[-0.5, 4, None], [-1.0, 0, None], [-1.0, 9, None]]),
    "logps bare": reply(output_token_logprobs=[-0.5, -1.0, -1.0]),
    "logp missing": reply(without="output_token_logprobs"),
    "logp null": reply(output_token_logprobs=[[None, 4, None], [-1.0, 0, None], [-1.0, 1, None]]),
    "logp nan": reply(output_token_logprobs=[[float("nan"), 4, None], [-1.0, 0, None], [-1.0, 1, None]]),
    "logp inf": reply(output_token_logprobs=[[float("-inf"), 4, None], [-1.0, 0, None], [-1.0, 1, None]]),
    "logp positive": reply(output_token_logprobs=[[0.1, 4, None], [-1.0, 0, None], [-1.0, 1, None]]),
    "logp text": reply(output_token_logprobs=[["-1", 4, None], [-1.0, 0, None], [-1.0, 1, None]]),
    "versions not a list": reply(weight_versions={"version": "3"}),
    "versions with a gap": reply(weight_versions=[{"version": "3", "start": 1, "end": 3}]),
    "versions too short": reply(weight_versions=[{"version": "3", "start": 0, "end": 2}]),
    "no finish": reply(finish_reason=None),
    "odd finish": reply(finish_reason={"type": "tired"}),
    "stop without the token": reply(finish_reason={"type": "stop", "matched": 9}),
    "stop at a text": reply(finish_reason={"type": "stop", "matched": "NaN happened"}),
    "stop without tokens": reply(ids=[], finish_reason={"type": "stop", "matched": 1}),
    "on after a stop token": reply(ids=[9, 4, 1]),
    "length after a stop token": reply(ids=[4, 4, 4, 1], finish_reason={"type": "length", "length": 4}),
    "completion_tokens": reply(completion_tokens=2),
    "prompt cut": reply(prompt_tokens=4),
    "prompt unknown": reply(without="prompt_tokens"),
    "cached negative": reply(cached_tokens=-1),
    "cached more than asked": reply(cached_tokens=6),
    "cached unknown": reply(without="cached_tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_reply_is_refused(name: str) -> None:
    with pytest.raises(BadReply) as caught:
        read_completion(BAD[name], ASKED)
    assert not isinstance(caught.value, WrongVersion)


@pytest.mark.parametrize(
    "meta",
    [
        {"weight_version": "2"},
        {"weight_version": 3},
        {"weight_version": "default"},
        {
            "weight_versions": [
                {"version": "2", "start": 0, "end": 1},
                {"version": "3", "start": 1, "end": 3},
            ]
        },
    ],
)
def test_tokens_of_other_weights_are_their_own_error(meta: dict[str, Any]) -> None:
    with pytest.raises(WrongVersion, match="expected 3"):
        read_completion(reply(**meta), ASKED)


def test_a_turn_cut_by_the_server_names_the_remedy() -> None:
    with pytest.raises(Refused, match=r"3 of 4 tokens.*--context-length"):
        read_completion(reply(ids=[4, 4, 4], finish_reason={"type": "length", "length": 3}), ASKED)


def test_stop_tokens_are_tokens_where_they_are_ignored() -> None:
    asked = Asked("r1", 5, SamplingParams(4, stop_ids=(1,), ignore_eos=True), version=3, vocab_size=10)
    went_on = reply(ids=[1, 4, 1, 1], finish_reason={"type": "length", "length": 4})
    assert read_completion(went_on, asked).ids == (1, 4, 1, 1)
    with pytest.raises(BadReply, match="to be ignored"):
        read_completion(GOOD, asked)


@pytest.mark.parametrize(
    "text", ["", "<html>", "NaN", "[Infinity]", '{"a": 1', "[" * 100_000, "1" * 5000, "\xff"], ids=lambda t: t[:8]
)
def test_only_json_is_json(text: str) -> None:
    with pytest.raises(BadReply):
        parse_json(text.encode("latin-1"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-12, 12) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*GOOD, *GOOD["meta_info"]]), inner),
    max_leaves=8,
)


@settings(deadline=None)
@given(field=st.sampled_from([*GOOD, *GOOD["meta_info"]]), value=JSON)
def test_whatever_a_field_holds_the_reply_is_read_or_refused(field: str, value: Any) -> None:
    """Never another exception, and what is read keeps every promise."""
    made = copy.deepcopy(GOOD)
    (made if field in made else made["meta_info"])[field] = value
    try:
        found = read_completion(made, ASKED)
    except EngineError:
        return
    assert len(found.ids) == len(found.logps) <= PARAMS.max_new_tokens
    assert all(0 <= token < 10 for token in found.ids)
    assert all(-1e308 <= logp <= 1e-3 for logp in found.logps)
    assert found.version == 3
