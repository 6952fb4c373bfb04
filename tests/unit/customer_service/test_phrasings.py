"""Requests and offers in many words, and what only looks like them."""

from __future__ import annotations

import pytest

from mdapo.rewards.dialogue_reading import apology, asks_for, invites, offers, sentences

ASKS = [
    "Can you please provide me with the order number?",
    "Could you please share your full order number with me?",
    "Please let me know your order number.",
    "Just send us your name and order number.",
    "What's the order number of your kettle?",
    "May I ask for your order number?",
    "I will need the order number to look this up.",
    "To help you, I need your order number.",
    "Your order number, please?",
    "Can I get that order number?",
    "Would you mind telling me your order number?",
    "Do you happen to have your order number?",
    "In order to help, could you tell me what your order number is?",
    "Please reply with your order ID.",
    "I'd like to know your order number.",
    "We require your order number first.",
    "Could you give me your name and your order number?",
    "Could you please provide the kettle's order number?",
    "Please tell me what the order number is.",
    "Can you find your order number for me?",
    "I'd be happy to help, please provide your order number so I can look into it.",
    "First, please share the order number.",
    "May I kindly ask for your order number?",
    "Could we kindly ask for your order number?",
    "May I also ask for your order number?",
    "Please send over your order number.",
    "Could you send me over the order number?",
    "Could you pass me the order number?",
    "What would be your order number?",
    "Could you look for the order number?",
    "whats your order number?",
    "Order number, please?",
    "Order number?",
]
NOT_ASKS = [
    "Please confirm that your order number is indeed available.",
    "Please also provide that the issue is with the order ID.",
    "I have your order number.",
    "Please address the order number issue later.",
    "Your order number is important to us.",
    "I will send you an order number.",
    "We'll give you a new order number.",
    "You can find your order number in the email.",
    "The order number is on your receipt.",
    "I can confirm your order number.",
    "Ask for the order number.",
    "Please ask the customer for the order number.",
    "I ordered it, here is my order number.",
    "Please provide the customer's order number.",
    "Thanks for sending me your order number.",
    "We do not need your order number.",
    "No order number?",
    "Kindly ask for the order number.",
    "Order number.",
    "Look for the order number on the receipt.",
    "I will pass on the order number.",
]
OFFERS = [
    "We can offer you a full refund.",
    "I'll refund you right away.",
    "You will get your money back.",
    "Would you like a refund?",
    "How about a refund for the kettle?",
    "Your refund will be sent today.",
    "I have arranged a refund for you.",
    "Let me process a refund for you.",
    "We will return your money.",
    "Thanks, we are happy to refund the full price.",
    "Is a refund okay for you?",
    "Please confirm if you would like a refund.",
    "Don't worry, we will refund you.",
    "I can't undo this, but I can give you a refund.",
    "Here is my offer: you get a refund.",
    "May I offer you a refund?",
    "Our policy allows me to offer you a refund.",
    "As our policy says, we can offer you a refund.",
    "Under our policy you will get a refund.",
    "Our policy says that you can get a refund.",
    "In accordance with our policy, we would be delighted to issue a refund.",
    "Since you are waiting for it, I will give you a refund.",
    "As you asked for it, we can offer you a refund.",
]
NOT_OFFERS = [
    "We can't refund you.",
    "Unfortunately a refund is not possible, we will not refund it.",
    "I understand that you want a refund.",
    "You asked for a refund.",
    "Our policy allows a refund.",
    "Our policy for this is a refund.",
    "Our policy says that we cannot give you a refund.",
    "You asked, and I know, for a refund.",
    "You said that we will give you a refund.",
    "I will check whether a refund is possible.",
    "I would like a refund.",
    "I'd like to request a refund.",
    "Please provide the refund.",
    "Please confirm that you will be offering a refund.",
    "You can ask for a refund elsewhere.",
    "Let me know what type of refunds I can offer.",
    "Instead of a refund we wish you a nice day.",
    "No refund.",
    "Refund.",
]
INVITES = [
    "Is that okay?", "Would that work for you?", "Does this sound good?", "Shall I go ahead?", "Do you agree?",
    "Please let me know if that is fine.", "Would you like that?", "Can you confirm?", "Is it alright with you?",
    "I hope this is okay for you.", "How does that sound?", "Are you happy with that?", "Would you accept this?",
    "Please confirm.", "Please confirm if you agree.", "Please confirm that you agree.", "Could you confirm this?",
    "Shall I set that up?", "Shall I set it up for you?", "What do you think?", "What do you think about it?",
    "What would you say to that?",
]  # fmt: skip
NOT_INVITES = [
    "Thank you for your patience.", "Is there anything else?", "What is your order number?", "I'm happy to help.",
    "How can I help you?", "Have a nice day.", "We work hard for you.", "Can you tell me more?",
    "Please confirm that your order number is right.", "Please confirm your address.", "Please accept that it is late.",
    "What do you think happened?", "What do you say on the parcel?",
]  # fmt: skip


@pytest.mark.parametrize("text", ASKS)
def test_a_request_in_other_words_is_a_request(text: str) -> None:
    assert any(asks_for(sentence, "order_number") for sentence in sentences(text))


@pytest.mark.parametrize("text", NOT_ASKS)
def test_a_mention_of_the_detail_is_no_request(text: str) -> None:
    assert not any(asks_for(sentence, "order_number") for sentence in sentences(text))


@pytest.mark.parametrize("text", OFFERS)
def test_an_offer_in_other_words_is_an_offer(text: str) -> None:
    assert any(offers(sentence, "refund", right=True) for sentence in sentences(text))


@pytest.mark.parametrize("text", NOT_OFFERS)
def test_a_mention_of_the_remedy_is_no_offer(text: str) -> None:
    assert not any(offers(sentence, "refund", right=True) for sentence in sentences(text))


@pytest.mark.parametrize("text", INVITES)
def test_a_question_for_agreement_invites(text: str) -> None:
    assert any(invites(sentence) for sentence in sentences(text))


@pytest.mark.parametrize("text", NOT_INVITES)
def test_any_other_question_does_not_invite(text: str) -> None:
    assert not any(invites(sentence) for sentence in sentences(text))


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("Can you tell me your address?", "address"),
        ("When did you buy it?", "purchase_date"),
        ("Please let me know when you bought it.", "purchase_date"),
        ("Which email did you use?", "email"),
        ("I need to know which size you need.", "size"),
        ("Please send me a photo of the damage.", "photo"),
        ("Can you send us a clear picture?", "photo"),
        ("What is your ZIP code?", "postcode"),
    ],
)
def test_other_details_are_asked_for_in_their_own_ways(text: str, detail: str) -> None:
    assert any(asks_for(sentence, detail) for sentence in sentences(text))


def test_to_address_an_issue_asks_for_no_address() -> None:
    assert not asks_for("please address your issue.", "address")


def test_an_apology_may_start_with_sorry_alone() -> None:
    assert apology("sorry your tablet is late!", ["tablet"]) == 1.0
