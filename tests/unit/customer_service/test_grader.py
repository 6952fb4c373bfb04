"""The customer-service grader on hand-written conversations, cheats included."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from mdapo.rewards.dialogue import WEIGHTS, customer_service, follow
from mdapo.rewards.dialogue_lexicon import ACCEPTANCES, DETAILS, REMEDIES
from mdapo.rewards.dialogue_reading import Facts, accepts, asks_for, offers, sentences
from mdapo.types import Message, Prompt

_spec = importlib.util.spec_from_file_location("transcripts", Path(__file__).with_name("transcripts.py"))
assert _spec is not None and _spec.loader is not None
transcripts = importlib.util.module_from_spec(_spec)
sys.modules["transcripts"] = transcripts
_spec.loader.exec_module(transcripts)


@pytest.mark.parametrize("case", transcripts.ALL, ids=lambda case: case.name)
def test_conversation_is_judged_as_a_person_would(case) -> None:
    score = customer_service(case.messages, case.prompt, "done")
    fault = follow(Facts.of(case.prompt.ground_truth), case.messages).fault
    assert (fault, score.outcome) == (case.fault, float(case.success))
    assert case.low - 1e-9 <= score.value <= case.high + 1e-9, score


def test_there_are_enough_conversations_of_each_sort() -> None:
    assert len(transcripts.ALL) >= 40
    assert min(map(len, (transcripts.GOOD, transcripts.PARTIAL, transcripts.CHEATS))) >= 15
    assert len({case.talk for case in transcripts.ALL}) == len(transcripts.ALL)


def test_value_is_one_only_on_success() -> None:
    assert sum(WEIGHTS.values()) < 1.0
    for case in transcripts.ALL:
        score = customer_service(case.messages, case.prompt, "done")
        assert (score.value == 1.0) == (score.outcome == 1.0)
        assert 0.0 <= score.value <= 1.0


def test_each_success_breaks_when_a_turn_of_the_agent_is_taken_out() -> None:
    for case in transcripts.GOOD:
        for at, message in enumerate(case.messages):
            if message.role == "assistant":
                shorter = [*case.messages[:at], *case.messages[at + 1 :]]
                assert customer_service(shorter, case.prompt, "done").outcome == 0.0, case.name


def test_each_success_breaks_when_said_all_at_once() -> None:
    for case in transcripts.GOOD:
        said = " ".join(m.content for m in case.messages if m.role == "assistant")
        talk = [*case.prompt.messages, Message("assistant", said), Message("user", ACCEPTANCES[0])]
        assert customer_service(talk, case.prompt, "done").outcome == 0.0, case.name


def test_each_success_fails_under_another_policy() -> None:
    """The remedy must be the one that this scenario allows: no conversation suits two policies."""
    for case in transcripts.GOOD:
        facts = dict(case.prompt.ground_truth)
        for remedy in REMEDIES:
            if remedy != facts["remedy"]:
                other = Prompt("o", 0, case.prompt.messages, ground_truth={**facts, "remedy": remedy})
                assert customer_service(case.messages, other, "done").outcome == 0.0, (case.name, remedy)


def test_no_conversation_without_agent_turns_scores() -> None:
    assert customer_service(transcripts.KETTLE.messages, transcripts.KETTLE, "gave_up").value == 0.0


def test_the_agents_own_yes_is_no_confirmation() -> None:
    talk = transcripts.GOOD[0].messages[:-1]
    assert customer_service(talk, transcripts.KETTLE, "done").outcome == 0.0
    assert (
        customer_service([*talk, Message("assistant", "Yes, that works for me.")], transcripts.KETTLE, "done").outcome
        == 0.0
    )


@pytest.mark.parametrize("detail", DETAILS)
def test_every_detail_can_be_asked_for_by_each_of_its_names(detail: str) -> None:
    for name in DETAILS[detail].names:
        for ask in ("Could you please give me your {}?", "What is the {}?", "I need your {} to help you.",
                    "Please send me the {}.", "May I have the {}, please?", "Can you tell me your {}"):  # fmt: skip
            assert asks_for(sentences(ask.format(name))[0], detail), ask.format(name)
        for other in ("Thank you for the {}.", "We don't need your {}.", "I have your {}."):
            assert not asks_for(sentences(other.format(name))[0], detail), other.format(name)


@pytest.mark.parametrize("remedy", REMEDIES)
def test_every_remedy_can_be_offered_by_each_of_its_names(remedy: str) -> None:
    for name in REMEDIES[remedy].names:
        for offer in ("We can offer you {}.", "I would like to offer you {}.", "You will get {}.", "Would you like {}?",
                      "How about {}?", "I'm happy to arrange {} for you."):  # fmt: skip
            sentence = sentences(offer.format(name))[0]
            assert offers(sentence, remedy, right=True), sentence
            assert not [r for r in REMEDIES if r != remedy and offers(sentence, r, right=False)], sentence
        for other in (
            "We cannot offer you {}.",
            "You asked for {}.",
            "We will not give you {}.",
            "I will check if {} is possible.",
        ):
            assert not offers(sentences(other.format(name))[0], remedy, right=True), other.format(name)


@pytest.mark.parametrize(
    "text", ["No, thank you.", "Yes? I do not think so.", "I do not want a refund.", "Is that okay?"]
)
def test_a_no_is_no_acceptance(text: str) -> None:
    assert not accepts(text)


def test_the_customers_acceptances_are_known_as_such() -> None:
    assert all(accepts(text) for text in ACCEPTANCES)


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        (None, "NoneType"),
        ({"detail": "email"}, "value, remedy, topic"),
        ({"detail": "shoe", "value": "1", "remedy": "refund", "topic": []}, "shoe"),
        ({"detail": "email", "value": "1", "remedy": "hug", "topic": []}, "hug"),
    ],
)
def test_facts_that_are_none_are_named(facts: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        customer_service([], Prompt("x", 0, (), ground_truth=facts), "done")
