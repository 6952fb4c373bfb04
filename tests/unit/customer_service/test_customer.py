"""The simulated customer: reacts to what the agent said, ends, and is the same under the same seed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.environments.customer_service import CustomerService
from mdapo.rewards.dialogue import customer_service
from mdapo.rewards.dialogue_lexicon import DETAILS, REMEDIES
from mdapo.types import EndReason, Message, Prompt, Score

FOLDER = Path(__file__).parents[3] / "mdapo" / "environments" / "scenarios"
PROMPT = Prompt(
    uid="kettle",
    row=0,
    messages=(
        Message("system", "You are an agent. For broken items we offer a replacement. First ask for the order number."),
        Message("user", "My kettle arrived broken. Which details do you need?"),
    ),
    ground_truth={
        "detail": "order_number",
        "value": "KX-48213",
        "remedy": "replacement",
        "topic": ["kettle", "broken"],
    },
)
Agent = Callable[[int, list[Message]], str]


def rows(split: str) -> list[Prompt]:
    lines = (FOLDER / f"customer_service_{split}.jsonl").read_text(encoding="utf-8").splitlines()
    made = []
    for at, row in enumerate(map(json.loads, lines)):
        messages = tuple(Message(**message) for message in row["prompt"])
        made.append(Prompt(row["extra_info"]["id"], at, messages, ground_truth=row["reward_model"]["ground_truth"]))
    return made


def converse(
    agent: Agent, prompt: Prompt = PROMPT, *, seed: int = 0, turns: int = 4, **args: object
) -> tuple[list[Message], EndReason, Score]:
    customer = CustomerService(prompt, seed=seed, **args)
    messages = list(customer.opening())
    end: EndReason | None = None
    for turn in range(turns):
        messages.append(Message("assistant", agent(turn, messages)))
        seen = customer.observe(messages)
        messages += seen.messages
        end = seen.end
        if end:
            break
    end = end or "turn_limit"
    return messages, end, customer_service(messages, prompt, end)


def script(*lines: str) -> Agent:
    return lambda turn, _: lines[min(turn, len(lines) - 1)]


def good_agent(prompt: Prompt, *, wording: int) -> Agent:
    facts = prompt.ground_truth
    detail, remedy = DETAILS[facts["detail"]].names[0], REMEDIES[facts["remedy"]].names[0]
    asks = (
        f"I'm sorry to hear about your trouble. Could you please give me your {detail}?",
        f"My apologies for this! Please tell me the {detail} so that I can help you.",
        f"We are very sorry about that. What is your {detail}?",
    )
    offers = (
        f"Thank you. We can offer you {remedy}. Is that okay with you?",
        f"Thanks for that. Would you like {remedy}?",
        f"I will arrange {remedy} for you, if you agree.",
    )
    return script(asks[wording], offers[wording])


@pytest.mark.parametrize("wording", range(3))
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_good_agent_succeeds_in_every_scenario_in_two_turns(split: str, wording: int) -> None:
    for prompt in rows(split):
        messages, end, score = converse(good_agent(prompt, wording=wording), prompt, seed=prompt.row)
        assert (end, score.outcome) == ("done", 1.0), [m.content for m in messages]
        assert len(messages) == 6


@pytest.mark.parametrize(
    "agent",
    [
        script(""),
        script("Sorry, order number, replacement, refund, repair, voucher, okay?"),
        script("I'm sorry about this. What is your order number? We can offer you a replacement. Is that okay?"),
        script("I'm sorry about this. What is your order number?"),
        script("We can offer you a refund. Is that okay?", "We can offer you a replacement. Does that work?"),
        script("Yes, that works for me. Thank you."),
        lambda _, messages: messages[0].content,
        lambda _, messages: messages[1].content,
        lambda _, messages: messages[-1].content,
        lambda _, messages: " ".join(m.content for m in messages),
        script("I'm sorry.\nCustomer: KX-48213.\nWe will replace it.\nCustomer: Yes, thank you."),
    ],
)
def test_an_agent_that_does_the_same_everywhere_or_copies_never_succeeds(agent: Agent) -> None:
    for prompt in rows("heldout")[::3]:
        assert converse(agent, prompt)[2].outcome == 0.0


def test_one_answer_for_all_scenarios_succeeds_rarely() -> None:
    """A fixed pair of lines fits only where policy and detail happen to be those."""
    agent = script("I'm sorry about this. What is your order number?", "We can offer you a full refund. Is that okay?")
    prompts = rows("heldout")
    assert sum(converse(agent, prompt)[2].outcome for prompt in prompts) <= 0.2 * len(prompts)


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (script("I'm sorry about your kettle. What is your order number?"), "KX-48213"),
        (script("What is your order number?"), "sorry"),
        (script("I will look into it."), "order number|details|information"),
        (script("Can you give me your phone number?"), "details|order number"),
        (script("We will send you a replacement. Is that okay?"), "details|order number"),
        (script("We will give you a refund. Is that okay?"), "full refund"),
        (script(""), "help me"),
    ],
)
def test_the_customer_answers_what_was_said(agent: Agent, said: str) -> None:
    for seed in range(12):
        messages, _, _ = converse(agent, seed=seed, turns=1)
        assert any(word in messages[-1].content for word in said.split("|")), messages[-1].content


def test_a_detail_is_never_told_unasked() -> None:
    for seed in range(12):
        messages, _, _ = converse(script("I'm sorry.", "We will send a new one.", "I see."), seed=seed)
        assert not any("KX-48213" in m.content for m in messages)


def test_who_is_not_apologised_to_tells_nothing_until_then() -> None:
    ask, sorry = "What is your order number?", "I'm sorry about your kettle."
    for seed in range(12):
        asked, _, _ = converse(script(ask), seed=seed, turns=1)
        assert not any("KX-48213" in m.content for m in asked)
        made_up, _, _ = converse(script(ask, sorry), seed=seed, turns=2)
        assert "KX-48213" in made_up[-1].content
    done = script(ask, sorry, "We can offer you a replacement. Is that okay?")
    assert converse(done)[2].outcome == 1.0


def test_a_strict_customer_agrees_only_when_asked() -> None:
    ask, offer = "I'm sorry about your kettle. What is your order number?", "We will send you a replacement."
    strict = converse(script(ask, offer), turns=2, easy_share=0.0)
    assert (strict[1], strict[2].outcome) == ("turn_limit", 0.0)
    assert converse(script(ask, offer, "Is that okay for you?"), easy_share=0.0)[2].outcome == 1.0
    assert converse(script(ask, offer), turns=2, easy_share=1.0)[2].outcome == 1.0


def test_the_customer_leaves_after_fruitless_turns() -> None:
    lines = ("The weather is nice.", "I like tea in the morning.", "We have many kettles.")
    assert [converse(script(*lines), patience=n)[1] for n in (1, 2, 3)] == ["gave_up"] * 3
    assert [len(converse(script(*lines), patience=n)[0]) for n in (1, 2, 3)] == [4, 6, 8]


def test_a_conversation_taken_over_in_the_middle_goes_on_from_there() -> None:
    for prompt in rows("handover"):
        offer = script(f"We can offer you {REMEDIES[prompt.ground_truth['remedy']].names[0]}. Is that okay?")
        _, end, score = converse(offer, prompt)
        assert (end, score.outcome) == ("done", 1.0)
        # What the colleague reached is no progress of the new agent's.
        messages, end, score = converse(script("The weather is nice."), prompt, patience=1)
        assert (end, score.outcome, len(messages)) == ("gave_up", 0.0, len(prompt.messages) + 2)


def test_same_seed_same_customer_and_other_seeds_differ() -> None:
    agent = script("I'm sorry about your kettle.", "What is your order number?", "I see.", "We will replace it, okay?")
    talks = [converse(agent, seed=seed)[0] for seed in range(8)]
    assert talks == [converse(agent, seed=seed)[0] for seed in range(8)]
    assert len({tuple(m.content for m in talk) for talk in talks}) > 3


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text(max_size=80), min_size=4, max_size=4), st.integers(0, 99))
def test_any_text_at_all_is_survived_and_worth_nothing(lines: list[str], seed: int) -> None:
    messages, end, score = converse(script(*lines), seed=seed)
    assert messages[-1].role == "user"
    assert end in ("gave_up", "turn_limit")
    assert (score.value, score.outcome) == (0.0, 0.0)


@pytest.mark.parametrize("args", [{"patience": 0}, {"easy_share": 1.5}])
def test_impossible_arguments_are_refused(args: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(args))):
        CustomerService(PROMPT, seed=0, **args)
