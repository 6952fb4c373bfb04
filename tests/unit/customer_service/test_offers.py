"""Offers of several remedies, offers that are none, and plain ones: with a whole conversation around each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mdapo.environments.customer_service import CustomerService
from mdapo.rewards.dialogue import customer_service
from mdapo.rewards.dialogue_lexicon import DETAILS, REMEDIES
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
