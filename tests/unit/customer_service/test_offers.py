"""Offers of several remedies, offers that are none, and plain ones: with a whole conversation around each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mdapo.environments.customer_service import CustomerService
from mdapo.rewards.dialogue import customer_service
from mdapo.rewards.dialogue_lexicon import DETAILS, REMEDIES
from mdapo.rewards.dialogue_reading import apology
from mdapo.types import Message, Prompt, Score

HELD_OUT = Path(__file__).parents[3] / "mdapo" / "environments" / "scenarios" / "customer_service_heldout.jsonl"
SORRY = "I am sorry for the trouble with this."


def prompt(remedy: str = "voucher") -> Prompt:
    facts = {"detail": "order_number", "value": "LE-86108", "remedy": remedy, "topic": ["tablet", "late"]}
    messages = (Message("system", "You are an agent."), Message("user", "My tablet is late. Do something, please!"))
    return Prompt("tablet", 0, messages, ground_truth=facts)


def score(case: Prompt, *turns: str, seed: int = 0) -> Score:
    """Talk with the customer until there is an end or nothing more to say."""
    customer = CustomerService(case, seed=seed)
    messages = list(customer.opening())
    for turn in turns:
        messages.append(Message("assistant", turn))
        seen = customer.observe(messages)
        messages += seen.messages
        if seen.end:
            break
    return customer_service(messages, case, "done")


def outcome(offer: str, *more: str, remedy: str = "voucher") -> float:
    return score(prompt(remedy), "I am sorry about the late tablet. What is your order number?", offer, *more).outcome


@pytest.mark.parametrize(
    "offered",
    [
        ["We will fix it, send you a new one or a coupon. Is that okay?"],
        ["We will fix it, send a new one, or add a coupon. Is that okay?",
         "We can lower the price, send it same-day, or do a pickup. Would that help you?"],
        ["We will give a refund, send a new one, add a coupon. Is that okay?"],
        ["We will send you a new one, a new part, or a coupon. Is that okay?",
         "I can offer a refund then, a visit, or express. Would you agree?"],
        ["We will send you a new one or a coupon. Is that okay?"],
        ["We can give you a coupon. We can also lower the price. Is that okay?"],
    ],
)  # fmt: skip
def test_offering_many_things_wins_no_held_out_scenario(offered: list[str]) -> None:
    for row in map(json.loads, HELD_OUT.read_text(encoding="utf-8").splitlines()):
        facts = row["reward_model"]["ground_truth"]
        case = Prompt("x", 0, tuple(Message(**message) for message in row["prompt"]), ground_truth=facts)
        ask = f"What is your {DETAILS[facts['detail']].names[0]}?"
        assert score(case, SORRY, ask, *offered).outcome == 0.0, facts["remedy"]


@pytest.mark.parametrize("remedy", REMEDIES)
def test_one_vague_offer_after_the_other_is_a_choice_of_several(remedy: str) -> None:
    turns = ("We will send you a new one. Is that okay?", "Then I can give you a coupon. Would you like that?",
             "We could also lower the price. Do you agree?")  # fmt: skip
    won = outcome(*turns, remedy=remedy)
    assert won == float(remedy == "replacement")  # the first guess; the customer accepts and no other is made


def test_a_single_vague_word_is_no_wrong_offer() -> None:
    made = score(
        prompt(), "I am sorry about the late tablet. What is your order number?", "We will send you a new one."
    )
    assert made.parts["wrong_remedy"] == 0.0


@pytest.mark.parametrize(
    ("remedy", "offer"),
    [
        ("technician", "We will send a technician to your home, and he will fix it. Is that okay?"),
        ("technician", "We can offer you a visit from a technician to fix it. Is that okay?"),
        ("repair", "Since it is under warranty, we can offer you a free repair. Is that okay?"),
        ("repair", "The warranty covers it, so we will repair it. Is that okay?"),
        ("refund", "For the missing part, we can offer you a refund. Is that okay?"),
        ("replacement", "We will send you a replacement, and we collect the old one. Is that okay?"),
        ("replacement", "We can swap it for a brand new one. Is that okay?"),
        ("spare_part", "We will send you the new part, the missing part by post. Is that okay?"),
        ("voucher", "I can't refund the order, but I can offer you store credit. Is that okay?"),
        ("voucher", "We can give you a voucher, a coupon for your next visit. Is that okay?"),
    ],
)
def test_what_the_case_is_about_and_what_comes_along_are_no_further_offers(remedy: str, offer: str) -> None:
    assert outcome(offer, remedy=remedy) == 1.0


@pytest.mark.parametrize(
    "offer",
    [
        "I doubt we can offer you a voucher.", "We can hardly offer you a voucher.",
        "It is doubtful that we can give you a voucher.", "Nobody will get a voucher from us.",
        "Last year we could have offered you a voucher.", "We would have given you a voucher.",
        "Last month we were able to give a voucher.", "It is too late for a voucher and we are closed.",
        "We will give a voucher to my colleague.", "We can send my boss a voucher.",
        "We will give another customer a voucher.", "We can offer a voucher to other customers.",
        "We can offer a voucher, just not to you.", "We can offer a voucher to other customers but you get nothing.",
        "We will take your voucher away.", "We have stopped the voucher.", "We are going to withdraw your voucher.",
        "We have run out of vouchers.", "We have cancelled your voucher.",
        "The voucher is now expired and we can see that.", "The voucher is now expired.", "Your voucher has expired.",
        "You can buy a voucher for full price.", "We can offer a voucher if you pay us its price.",
        "We can offer a voucher. I take that back, you get nothing.", "We can offer a voucher, just kidding.",
        "We can offer you a voucher. We changed our minds.", "We can offer you a voucher worth nothing.",
        "We can offer you a voucher of no value.", "We can offer you an expired voucher.",
        "The voucher we can offer is zero.", "We will give you a voucher one day, maybe never.",
    ],
)  # fmt: skip
def test_words_that_give_nothing_are_no_offer(offer: str) -> None:
    assert outcome(f"{offer} Is that okay?", "Is that okay with you?") == 0.0


@pytest.mark.parametrize(
    "offer",
    [
        "There is nothing to worry about, we can offer you a voucher.",
        "We should have been faster, and we will give you a voucher.",
        "The parcel was stopped, so we can offer you a voucher.",
        "I have asked my colleague, and we can offer you a voucher.",
        "We will take the tablet back and give you a voucher.",
        "Would you accept a voucher from us?",
        "You will get a voucher from our staff for the full price of the tablet.",
        "We can offer you a voucher for our shop.",
        "We can offer you a voucher for you or your family.",
        "We offer a voucher to customers like you.",
        "You can use the voucher when you next buy something, and we will send it now.",
        "We didn't mean to keep you waiting, we can give you a voucher.",
        "We can't change what happened last week, but we can offer you a voucher.",
        "We would have liked to be faster, so we offer you a voucher.",
        "You pay nothing: we will send you a voucher.",
        "We will send you a voucher for zero cost.",
    ],
)
def test_such_words_beside_a_true_offer_do_no_harm(offer: str) -> None:
    assert outcome(f"{offer} Is that okay?", "Is that okay with you?") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "I am never sorry for late parcels.", "I am hardly sorry about the late tablet.", "We are far from sorry.",
        "I would be sorry if this were our fault about the late tablet.", "I'd be sorry if this was true.",
        "I would apologise if the tablet was late.", "I refuse to apologise for the late tablet.",
        "I never apologise for a late tablet.", "I am sorry for myself that the tablet is late.",
    ],
)  # fmt: skip
def test_being_sorry_never_or_on_a_condition_is_no_apology(text: str) -> None:
    assert apology(text, ["tablet", "late"]) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "I would like to apologise for the late tablet.", "I cannot apologise enough for the late tablet.",
        "I am so sorry that you never got the tablet.", "I'm sorry if the late tablet upset you.",
        "I should apologise for the late tablet, I am sorry.", "We're sorry about the tablet, it should not be late.",
    ],
)  # fmt: skip
def test_a_true_apology_in_such_words_is_one(text: str) -> None:
    assert apology(text, ["tablet", "late"]) == 1.0


@pytest.mark.parametrize(
    "offer",
    [
        "We can send you the new one on next day pickup visit with a coupon at a lower price.",
        "We can fix your new one on next day pickup visit with a coupon at a lower price with another missing part.",
        "We can fix your coupon pickup visit express warranty with the missing part.",
    ],
)
def test_many_remedies_in_a_row_are_a_list_though_nothing_separates_them(offer: str) -> None:
    assert outcome(f"{offer} Is that okay?") == 0.0


@pytest.mark.parametrize("words", ["Is that what you'd like?", "When would suit you?"])
def test_such_questions_ask_for_agreement(words: str) -> None:
    assert outcome(f"We can offer you a voucher. {words}") == 1.0


def test_sorry_we_did_something_is_an_apology() -> None:
    assert apology("I'm sorry we broke our promise.", ["tablet", "late"]) == 0.8
