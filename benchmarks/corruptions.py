"""Dialogues that are good, and the same ones spoilt in a known way: what coherence and relevance are validated on.

Two sources: `dialogues.jsonl`, written by hand for this (each with a reply that contradicts the others), and the
customer-service scenarios, played by a scripted agent against the real environment. A kind of corruption spoils half of
an agent's replies, rounded up, and leaves the user's words as they are; calls of tools are no replies.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mdapo.environments.customer_service import CustomerService
from mdapo.environments.tool_calls import calls_in
from mdapo.rewards.dialogue_lexicon import DETAILS, REMEDIES
from mdapo.types import Message, Prompt

FILE = Path(__file__).with_name("dialogues.jsonl")
SCENARIOS = (
    Path(__file__).resolve().parents[1] / "mdapo" / "environments" / "scenarios" / "customer_service_heldout.jsonl"
)
OFF_TOPIC = (
    "The Pacific is the largest ocean and covers a third of the planet.",
    "My favourite colour is green, because it reminds me of forests in spring.",
    "Napoleon was crowned in Paris in December 1804.",
    "To win at poker you must know when to fold.",
    "The new stadium holds sixty thousand football fans.",
    "Octopuses have three hearts and blue blood.",
    "Did you know that Saturn would float on water?",
    "The orchestra plays Mahler's second symphony on Sunday.",
    "I once read a novel about a lighthouse keeper and his parrot.",
    "Copper melts at a little over a thousand degrees.",
    "The president of the club resigned after the election.",
    "Fishing boats leave the harbour at four in the morning.",
    "Bitcoin rose by three percent against the yen.",
    "A haiku has seventeen syllables in three lines.",
    "The desert fox hears a beetle under the sand.",
    "Volcanoes on Iceland erupt every few years.",
)
APOLOGIES = (
    "I am sorry about the trouble with your {product}.",
    "I'm really sorry to hear that about your {product}.",
    "Please accept my apology for the {product}.",
    "We are sorry that this happened with your {product}.",
    "That should not happen, I apologise for the {product}.",
)
QUESTIONS = (
    "Could you please give me your {detail}?",
    "What is your {detail}?",
    "May I have your {detail}, please?",
    "To look into it, I need your {detail}.",
)
OFFERS = (
    "Thank you. We can offer you {remedy} for the {product}. Is that okay with you?",
    "Thanks, I found your case. For the {product} we offer {remedy}. Do you agree?",
    "Thank you for the {detail}. I can offer you {remedy}. Would that be all right?",
    "Thanks. As an apology we offer {remedy} for your {product}. Does that work for you?",
)


@dataclass(frozen=True)
class Dialogue:
    """``opening``: messages before the agent's first turn. ``contradiction``: which reply, and what it says instead."""

    name: str
    source: str  # "written" or "service"
    messages: tuple[Message, ...]
    opening: int
    contradiction: tuple[int, str] | None = None

    @property
    def replies(self) -> list[int]:
        """Where the agent says something, rather than call a tool."""
        found = [i for i, m in enumerate(self.messages) if m.role == "assistant" and i >= self.opening]
        return [i for i in found if not calls_in(self.messages[i].content)]

    def saying(self, texts: Mapping[int, str]) -> Dialogue:
        """With other words at these places."""
        changed = (replace(m, content=texts.get(i, m.content)) for i, m in enumerate(self.messages))
        return replace(self, messages=tuple(changed))


def good_dialogues() -> list[Dialogue]:
    """182: 62 written, and 120 scenarios played."""
    return [*written(), *played()]


def written() -> list[Dialogue]:
    found = []
    for line in FILE.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        messages = tuple(Message(role, text) for role, text in row["messages"])
        opening = next(i for i, m in enumerate(messages) if m.role == "assistant")
        dialogue = Dialogue(row["id"], "written", messages, opening)
        all_turns = [i for i, m in enumerate(messages) if m.role == "assistant"]
        spoilt = row["contradiction"]
        at = dialogue.replies.index(all_turns[spoilt["reply"]])
        found.append(replace(dialogue, contradiction=(at, spoilt["text"])))
    return found


def played() -> list[Dialogue]:
    """Every held-out scenario, by an agent that apologises, asks and offers in varied words."""
    rows = [json.loads(line) for line in SCENARIOS.read_text(encoding="utf-8").splitlines()]
    return [_play(row, number) for number, row in enumerate(rows)]


def _play(row: Mapping[str, Any], number: int) -> Dialogue:
    draw, facts = random.Random(number), row["reward_model"]["ground_truth"]
    words = {
        "product": row["extra_info"]["product"],
        "detail": draw.choice(DETAILS[facts["detail"]].names),
        "remedy": draw.choice(REMEDIES[facts["remedy"]].names),
    }
    prompt = Prompt(
        str(number), number, tuple(Message(m["role"], m["content"]) for m in row["prompt"]), ground_truth=facts
    )
    customer, messages = CustomerService(prompt, seed=number), list(prompt.messages)
    if draw.random() < 0.5:
        script = [draw.choice(APOLOGIES), draw.choice(QUESTIONS), draw.choice(OFFERS)]
    else:
        script = [f"{draw.choice(APOLOGIES)} {draw.choice(QUESTIONS)}", draw.choice(OFFERS)]
    for template in script:
        messages.append(Message("assistant", template.format(**words)))
        said = customer.observe(messages)
        messages += said.messages
        if said.end is not None:
            break
    return Dialogue(row["extra_info"]["id"], "service", tuple(messages), len(prompt.messages))


def shuffled(dialogue: Dialogue, draw: random.Random, others: Sequence[Dialogue]) -> Dialogue | None:
    """Every reply stands where another one stood."""
    places = dialogue.replies
    texts = [dialogue.messages[i].content for i in places]
    order = list(range(len(places)))
    while any(a == b for a, b in enumerate(order)):
        draw.shuffle(order)
    return dialogue.saying({place: texts[k] for place, k in zip(places, order, strict=True)})


def swapped(dialogue: Dialogue, draw: random.Random, others: Sequence[Dialogue]) -> Dialogue:
    """Replies at the same place of other dialogues; of the written ones, since replies of two service dialogues may
    both fit."""
    strangers = [d for d in others if d.source == "written"]
    return dialogue.saying({i: _others_reply(dialogue, i, draw, strangers) for i in _half(dialogue, draw)})


def swapped_near(dialogue: Dialogue, draw: random.Random, others: Sequence[Dialogue]) -> Dialogue:
    """Replies at the same place of dialogues of the same source: of service dialogues with another product, remedy or
    detail, some of which fit here too."""
    near = [d for d in others if d.source == dialogue.source]
    return dialogue.saying({i: _others_reply(dialogue, i, draw, near) for i in _half(dialogue, draw)})


def swapped_one(dialogue: Dialogue, draw: random.Random, others: Sequence[Dialogue]) -> Dialogue:
    """One reply only."""
    place, strangers = draw.choice(dialogue.replies), [d for d in others if d.source == "written"]
    return dialogue.saying({place: _others_reply(dialogue, place, draw, strangers)})


def _others_reply(dialogue: Dialogue, place: int, draw: random.Random, others: Sequence[Dialogue]) -> str:
    """The reply of another dialogue, at the same place if it is as long."""
    other = draw.choice([d for d in others if d.name != dialogue.name])
    at = min(dialogue.replies.index(place), len(other.replies) - 1)
    return other.messages[other.replies[at]].content


def repeated(dialogue: Dialogue, draw: random.Random, others: Sequence[Dialogue]) -> Dialogue:
    """Later replies say again what an earlier one said."""
    places = dialogue.replies
    count = max(1, len(places) // 2)
    later = sorted(draw.sample(range(1, len(places)), min(count, len(places) - 1)))
    return dialogue.saying({places[k]: dialogue.messages[places[draw.randrange(k)]].content for k in later})


def stuttered(dialogue: Dialogue, draw: random.Random, others: Sequence[Dialogue]) -> Dialogue:
    """Replies whose last sentence comes three times more."""

    def again(text: str) -> str:
        last = text.rstrip().rpartition(". ")[2]
        return " ".join([text, *[last] * 3])

    return dialogue.saying({i: again(dialogue.messages[i].content) for i in _half(dialogue, draw)})


def truncated(dialogue: Dialogue, draw: random.Random, others: Sequence[Dialogue]) -> Dialogue:
    """Replies that break off in the middle of a sentence, after 30 to 70 percent of their words."""

    def cut(text: str) -> str:
        words = text.split()
        kept = words[: max(1, round(len(words) * draw.uniform(0.3, 0.7)))]
        while len(kept) > 1 and kept[-1][-1] in ".!?:":
            kept.pop()
        return " ".join(kept)

    return dialogue.saying({i: cut(dialogue.messages[i].content) for i in _half(dialogue, draw)})


def off_topic(dialogue: Dialogue, draw: random.Random, others: Sequence[Dialogue]) -> Dialogue:
    """Replies about something else."""
    return dialogue.saying({i: draw.choice(OFF_TOPIC) for i in _half(dialogue, draw)})


def contradicting(dialogue: Dialogue, draw: random.Random, others: Sequence[Dialogue]) -> Dialogue | None:
    """The next reply (of the last one, itself) goes on to deny what a reply said; None where no denial was written."""
    if dialogue.contradiction is None:
        return None
    at, text = dialogue.contradiction
    place = dialogue.replies[min(at + 1, len(dialogue.replies) - 1)]
    return dialogue.saying({place: f"{dialogue.messages[place].content} {text}"})


def denying(dialogue: Dialogue, draw: random.Random, others: Sequence[Dialogue]) -> Dialogue | None:
    """The denial in the stead of the reply: what it contradicts is at most hinted at elsewhere."""
    if dialogue.contradiction is None:
        return None
    at, text = dialogue.contradiction
    return dialogue.saying({dialogue.replies[at]: text})


def _half(dialogue: Dialogue, draw: random.Random) -> list[int]:
    places = dialogue.replies
    return draw.sample(places, -(-len(places) // 2))


Corruption = Callable[[Dialogue, random.Random, Sequence[Dialogue]], Dialogue | None]
KINDS: Mapping[str, Corruption] = {
    "shuffled": shuffled,
    "swapped": swapped,
    "swapped_near": swapped_near,
    "swapped_one": swapped_one,
    "repeated": repeated,
    "stuttered": stuttered,
    "truncated": truncated,
    "off_topic": off_topic,
    "contradicting": contradicting,
    "denying": denying,
}
