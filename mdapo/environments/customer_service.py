"""A scripted customer with a complaint. Reacts to what the agent said; deterministic under its seed; no I/O."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mdapo.environments.base import Observation
from mdapo.rewards.dialogue import Progress, follow
from mdapo.rewards.dialogue_lexicon import ACCEPTANCES, DETAILS, REMEDIES
from mdapo.rewards.dialogue_reading import Facts
from mdapo.types import EndReason, Message, Prompt

# By what the agent's last turn did. {detail} is the detail needed ("order number"), {value} what it is, {right}
# the remedy allowed, {wrong} one that was offered wrongly.
REPLIES: dict[str, tuple[str, ...]] = {
    "gives": (
        "It is {value}. What can you offer me?",
        "Here you go: {value}. What will you offer me?",
        "{value}. So what do you offer?",
        "Sure, {value}. Can you offer me {right}?",
    ),
    "wants_apology": (
        "Not even an apology? Say sorry first.",
        "You could say sorry before you ask me.",
        "Are you not even sorry? Then I tell you nothing.",
    ),
    "told_already": ("I told you: {value}. What can you offer me?", "As I said, {value}. So what do you offer?"),
    "why_that": (
        "Why would you need that? Do you not need my {detail}?",
        "I do not see how that helps. Which other details do you need?",
    ),
    "too_early": (
        "How? You know nothing about my case yet. Which details do you need?",
        "You have not even looked me up. Do you need my {detail}?",
    ),
    "wrong_early": (
        "I did not ask for {wrong}. Which details do you need?",
        "Not {wrong}. Do you need my {detail}?",
    ),
    "wrong": ("I do not want {wrong}. Your own policy says {right}.", "Not {wrong}. What do you really offer?"),
    "unsure": (
        "Do you want to know if that is okay with me?",
        "And are you asking me if I agree?",
        "Should I say yes to that, or is it settled anyway?",
    ),
    "soothed": (
        "Thanks. Which details do you need?",
        "All right. Do you need my {detail}?",
        "Good. What information do you need?",
        "Thank you. Your site says that you need my {detail}?",
    ),
    "what_now": (
        "And what can you offer me?",
        "What do you offer me, then?",
        "So what can you offer me?",
        "Will you offer me {right}?",
    ),
    "angry": (
        "That does not help me. Which details do you need?",
        "This is ridiculous. Do you need my {detail}?",
        "Nobody here even says sorry. What information do you need?",
        "I expected more. Do you want my {detail}?",
    ),
    "confused": ("I do not follow you. Can you help me?", "That makes no sense to me. Please help me."),
    "leaves": ("I give up. I will shop elsewhere.", "Forget it. I am done here.", "This leads nowhere. Goodbye."),
}


class CustomerService:
    """The customer of one scenario. ``patience``: fruitless agent turns after which the customer leaves.

    ``easy_share``: of customers who accept a right offer unasked; the others say yes only when the agent asks them.
    """

    def __init__(self, prompt: Prompt, *, seed: int, patience: int = 2, easy_share: float = 0.7) -> None:
        if patience < 1:
            raise ValueError(f"customer_service: patience must be at least 1, got {patience}")
        self._prompt = prompt
        self._facts = Facts.of(prompt.ground_truth)
        self._random = random.Random(seed)
        if not 0.0 <= easy_share <= 1.0:
            raise ValueError(f"customer_service: easy_share must lie in [0, 1], got {easy_share}")
        self._patience = patience
        self._easy = self._random.random() < easy_share
        self._fruitless = 0
        self._before = follow(self._facts, prompt.messages)  # a prompt may begin in the middle of a conversation

    def opening(self) -> tuple[Message, ...]:
        return self._prompt.messages

    def observe(self, messages: Sequence[Message]) -> Observation:
        now = follow(self._facts, messages)
        turn = now.turns[-1]
        offered_now = now.offered_at is not None and self._facts.remedy in turn.offers
        persuaded = turn.invites or (self._easy and offered_now)
        if now.offered_at is not None and persuaded and not turn.offers - {self._facts.remedy}:
            return self._say(self._random.choice(ACCEPTANCES), end="done")
        # A first wrong offer is something to talk about.
        advanced = _milestones(now) > _milestones(self._before) or (now.wrong and not self._before.wrong)
        self._before = now
        self._fruitless += not advanced
        if self._fruitless >= self._patience:
            return self._line("leaves", end="gave_up")
        return self._line(self._mood(now))

    def _mood(self, now: Progress) -> str:
        turn, remedy, detail = now.turns[-1], self._facts.remedy, self._facts.detail
        if turn.fault or turn.off_role:
            return "confused"
        if detail in turn.asks and now.given:
            return "told_already"
        if detail in turn.asks or (turn.apology and now.asked_at is not None and not now.given):
            return "gives" if now.apology else "wants_apology"
        if turn.offers - {remedy}:
            return "wrong" if now.given else "wrong_early"
        if now.offered_at is not None:
            return "unsure"
        if remedy in turn.offers:
            return "too_early"
        if turn.asks:
            return "why_that"
        if now.given:
            return "what_now"
        return "soothed" if turn.apology else "angry"

    def _line(self, mood: str, *, end: EndReason | None = None) -> Observation:
        wrong = sorted(self._before.turns[-1].offers - {self._facts.remedy})
        text = self._random.choice(REPLIES[mood]).format(
            detail=DETAILS[self._facts.detail].names[0],
            value=self._facts.value,
            right=REMEDIES[self._facts.remedy].names[0],
            wrong=REMEDIES[wrong[0]].names[0] if wrong else "",
        )
        return self._say(text, end=end)

    def _say(self, text: str, *, end: EndReason | None = None) -> Observation:
        return Observation((Message("user", text),), end)


def _milestones(progress: Progress) -> int:
    reached = (progress.apologised_at, progress.asked_at, progress.offered_at)
    return sum(at is not None for at in reached)
