"""Coherence and relevance: finite and in [0, 1] whatever is said, and lower for what is wrong in each known way."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.rewards import dialogue_faults as faults
from mdapo.rewards.calibration import PAIRS, Scale, calibrate
from mdapo.rewards.coherence import Quality, judge_all
from mdapo.rewards.embeddings import Cached, EmbeddingError, Lexical, open_embedder
from mdapo.types import Message

from .tiny_encoder import minilm

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
LEXICAL = Cached(Lexical(), size=50_000)
SCALE = calibrate(LEXICAL)
CALL = '<tool_call>{"name": "lookup", "arguments": {"id": 5}}</tool_call>'
GOOD = (
    ("system", "You help the customers of a shoe shop. Late parcels get a voucher."),
    ("user", "My parcel with the boots is five days late."),
    ("assistant", "I am sorry that your boots are late. What is the number of your parcel?"),
    ("user", "The number of the parcel is 5512."),
    ("assistant", "Thank you. Parcel 5512 is in Hamburg and will arrive tomorrow."),
    ("user", "Do I get a voucher because it is late?"),
    ("assistant", "Yes, for late parcels you get a voucher of ten euros."),
)


def judged(*talk: tuple[str, str], opening: int = 1) -> Quality:
    messages = [Message(role, content) for role, content in talk]  # type: ignore[arg-type]
    return judge_all([(messages, opening)], LEXICAL, SCALE)[0]


def with_reply(place: int, text: str) -> list[tuple[str, str]]:
    """``place`` counts replies."""
    talk = list(GOOD)
    talk[2 + 2 * place] = ("assistant", text)
    return talk


texts = st.one_of(
    st.text(max_size=60),
    st.sampled_from(["", " ", "\n\n", "?", CALL, "<think>x", "<tool_call>{", "漢字。", "\ud800", "1,2"]),
    st.sampled_from(["a" * 30_000, "no " * 3000]),
)
talks = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), texts), max_size=12)


@settings(max_examples=60, deadline=None)
@given(talk=talks, opening=st.integers(0, 14))
def test_every_dialogue_has_two_finite_shares(talk: list[tuple[str, str]], opening: int) -> None:
    found = judged(*talk, opening=opening)
    assert 0.0 <= found.coherence <= 1.0 and 0.0 <= found.relevance <= 1.0


@settings(max_examples=30, deadline=None)
@given(a=talks, b=talks)
def test_a_dialogues_measures_do_not_depend_on_its_neighbours(
    a: list[tuple[str, str]], b: list[tuple[str, str]]
) -> None:
    one, other = ([Message(role, content) for role, content in talk] for talk in (a, b))  # type: ignore[arg-type]
    assert judge_all([(one, 0), (other, 0)], LEXICAL, SCALE)[0] == judge_all([(one, 0)], LEXICAL, SCALE)[0]


@pytest.mark.parametrize(
    "talk", [[], [("system", "Be kind.")], [("user", "Hello?")], [("user", "5?"), ("assistant", CALL)]]
)
def test_an_agent_that_says_nothing_has_no_quality_at_all(talk: list[tuple[str, str]]) -> None:
    assert judged(*talk, opening=0) == Quality(0.0, 0.0)


def test_an_empty_turn_is_a_bad_reply() -> None:
    good, empty = judged(*GOOD), judged(*with_reply(1, ""))
    assert empty.relevance < good.relevance and empty.coherence < good.coherence
    assert judged(("user", "hello there"), ("assistant", "")) == Quality(0.0, 0.0)


def test_a_thousand_turns_are_judged() -> None:
    talk = [
        (role, f"{text} {i}") for i in range(500) for role, text in (("user", "what is"), ("assistant", "it is now"))
    ]
    assert 0.0 <= judged(*talk).coherence <= 1.0


def test_only_the_policys_turns_are_judged() -> None:
    """A colleague's turns in the prompt are what replies follow from, and what they must not repeat."""
    mine = judged(*GOOD, opening=4)
    cut = with_reply(0, GOOD[2][1].removesuffix("?") + " and")
    assert judged(*cut, opening=4).coherence > judged(*cut, opening=1).coherence
    again = judged(*with_reply(2, GOOD[2][1]), opening=4)
    assert again.coherence < mine.coherence


def test_a_reply_after_a_tools_answer_is_judged_by_that_too() -> None:
    asked, told = ("user", "Where is it?"), ("assistant", "The blue suitcase stands in Oslo, in hall seven.")
    tool = ("tool", "blue suitcase: Oslo, hall seven")
    with_tool = judged(asked, ("assistant", CALL), tool, told)
    assert with_tool.relevance > judged(asked, told).relevance
    assert with_tool.relevance > judged(asked, ("assistant", CALL), ("tool", "red tent: Bergen"), told).relevance


def test_thoughts_and_calls_are_not_heard() -> None:
    thought = with_reply(1, f"<think>Napoleon was crowned in Paris, and</think>{GOOD[4][1]}{CALL}")
    assert judged(*thought) == judged(*GOOD)


def test_the_users_own_words_are_no_answer() -> None:
    parrot = judged(*with_reply(2, GOOD[5][1]))
    assert parrot.relevance < judged(*GOOD).relevance


WORSE = {
    "off topic": (with_reply(1, "Octopuses have three hearts and blue blood."), "relevance"),
    "broken off": (with_reply(1, "Thank you. Parcel 5512 is in the"), "coherence"),
    "said again": (with_reply(1, GOOD[2][1]), "coherence"),
    "stuck": (with_reply(1, "Parcel 5512 is in Hamburg. Parcel 5512 is in Hamburg. " * 3), "coherence"),
    "denied": (with_reply(2, "No, you get no voucher for late parcels. Parcel 5512 is not in Hamburg."), "coherence"),
    "in another order": ([*GOOD[:2], GOOD[6], GOOD[3], GOOD[2], GOOD[5], GOOD[4]], "coherence"),
}  # fmt: skip


@pytest.mark.parametrize("name", WORSE)
def test_each_fault_costs_where_it_should(name: str) -> None:
    talk, measure = WORSE[name]
    assert getattr(judged(*talk), measure) < 0.85 * getattr(judged(*GOOD), measure)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("That is settled.", 0.0), ("Which one?", 0.0), ("It costs 52.50", 0.0), ("Done ✅", 0.0), ("好的。", 0.0),
        ("Yes", 0.0), ("- one\n- two apples", 0.0), ("f(x)", 0.0), ("I can offer you a", 1.0), ("Thank you,", 1.0),
        ("We will send it tomorrow to your house number", 0.8),
    ],
)  # fmt: skip
def test_breaking_off(text: str, share: float) -> None:
    assert faults.breaks_off(text) == share


def test_denials() -> None:
    said = ["Late parcels are covered by our insurance and you get the money back."]
    assert faults.contradicts("Late parcels are not covered by our insurance.", said) > 0.8
    assert faults.contradicts("Late parcels are covered by our insurance.", said) == 0.0
    assert faults.contradicts("The weather is not nice in Oslo.", said) == 0.0
    assert faults.contradicts("Are late parcels not covered by our insurance?", said) == 0.0
    assert faults.contradicts("The shop opens early on Sundays. The shop opens late on Sundays.", []) > 0.3


def test_short_courtesies_may_be_said_again() -> None:
    courtesy, question = "You are welcome!", "What is the number of your order, please?"
    assert faults.repeats_earlier(courtesy, [courtesy]) == 0.0
    assert faults.repeats_earlier(question, [question]) == 1.0


def test_the_scale_uses_the_whole_range_of_every_embedder() -> None:
    assert SCALE.unrelated < 0.1 < SCALE.related
    np.testing.assert_array_equal(
        Scale(0.7, 0.9)(np.array([0.1, 0.7, 0.8, 0.9, 1.0])), [0.0, 0.0, pytest.approx(0.5), 1.0, 1.0]
    )


class Blind:
    description = "blind"

    def embed(self, texts: list[str]) -> np.ndarray:
        return np.ones((len(texts), 4), np.float32)


def test_an_embedder_that_tells_nothing_apart_is_refused() -> None:
    with pytest.raises(EmbeddingError, match="no more like their message"):
        calibrate(Cached(Blind(), size=9))


@pytest.fixture
def bench() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("bench_quality")
    sys.path.remove(str(BENCHMARKS))


def test_the_scale_is_not_made_of_the_dialogues_it_is_tested_on(bench: ModuleType) -> None:
    said = {m.content for d in bench.good_dialogues() for m in d.messages}
    assert said.isdisjoint(text for pair in PAIRS for text in pair)


@pytest.mark.model
def test_spoilt_dialogues_of_the_held_out_half_are_told_from_good_ones(bench: ModuleType) -> None:
    """A slice of what `benchmarks/bench_quality.py` measures, with a margin for its size."""
    own = [d for d in bench.good_dialogues() if bench.half_of(d) == "report" and d.source == "written"][:10]
    embedder = Cached(open_embedder(str(minilm())), size=2000)
    scale, short = calibrate(embedder), []
    good = bench.values(bench.judged(own, embedder, scale))
    for kind, measure in bench.MEANT.items():
        bad = bench.values(bench.judged([b for _, b in bench.spoilt(kind, own)], embedder, scale))
        if (area := bench.auc(good[measure], bad[measure])) < (0.7 if kind == "contradicting" else 0.8):
            short.append((kind, measure, area))
    assert not short
