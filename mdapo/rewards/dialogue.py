"""The customer-service grader: sub-goals of a complaint, in order, and no credit for pretending.

A pure function of a scenario's facts and the messages. Sub-goals: apologise for the problem; ask for the missing detail
and get it; then offer the remedy that this policy allows, and no other; get the customer's agreement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mdapo.rewards.dialogue_reading import Facts, Reading, accepts, plain, read_turn
from mdapo.types import EndReason, Message, Prompt, Score

# Shaped value; what is left to 1.0 comes with success alone.
WEIGHTS: Mapping[str, float] = {"apology": 0.1, "detail": 0.25, "remedy": 0.4, "confirmation": 0.1}
MILESTONES = frozenset({"apologised_at", "asked_at", "offered_at"})
HELP = ("detail", "remedy", "confirmation")
UNSORRY = 0.4  # share of the other credit that is left without an apology: it must not pay to forget it
RAMBLING = 0.3  # share of it that is left when no turn was short and finished
STANDSTILL = 0.6  # share of it that is left when no turn moved the case on, as one that asks what it was told
MIXED_REMEDY = 0.4  # share of a right offer's credit that is left when a wrong one was made too
WRONG_REMEDY = 0.2  # for an offer at the right time, but of what the policy does not allow
NAMED_REMEDY = 0.25  # for naming the right remedy at the right time, in words that do not offer it
SOME_OFFER = 0.1  # for offering something at the right time, without a word of what
EARLY_REMEDY = 0.4  # for the right remedy, but before the detail is known
OTHER_DETAIL = 0.4  # share of the detail's credit for asking for another one
SOME_INQUIRY = 0.2  # for asking for information of no certain kind


@dataclass(frozen=True)
class Progress:
    """A conversation up to its last message. Turn numbers count agent turns from 0; None: not done."""

    turns: tuple[Reading, ...] = ()
    apology: float = 0.0
    apologised_at: int | None = None
    asked_at: int | None = None
    given: bool = False  # the customer told the detail
    offered_at: int | None = None  # the right remedy alone, after the detail
    early: bool = False  # the right remedy promised before the detail, without asking for it
    wrong: bool = False
    proposed: bool = False  # offered something after the detail, whatever it was
    named: bool = False  # the right remedy and no other, after the detail
    confirmed: bool = False
    moves: int = 0  # turns that reached something new, or asked for the agreement to a right offer

    @property
    def fault(self) -> str:
        """The first cheat, or nothing."""
        return next((turn.fault for turn in self.turns if turn.fault), "")

    @property
    def success(self) -> bool:
        in_order = (
            self.apologised_at is not None and self.offered_at is not None and self.apologised_at <= self.offered_at
        )
        return in_order and self.given and self.confirmed and not (self.wrong or self.early or self.fault)


def follow(facts: Facts, messages: Sequence[Message]) -> Progress:
    """Read a conversation from its start; ``messages`` may end anywhere."""
    heard: list[str] = []
    said: list[str] = []
    turns: list[Reading] = []
    done: dict[str, Any] = {}
    before = None
    for message in messages:
        answers, before = before == "assistant", message.role
        if message.role != "assistant":
            heard.append(message.content)
            if "asked_at" in done and plain(facts.value) in plain(message.content):
                done["given"] = True
            if answers and "offered_at" in done and _settles(turns[-1], facts) and accepts(message.content):
                done["confirmed"] = True
            continue
        turn = read_turn(message.content, facts, heard=heard, said=said)
        moved = _credit(turn, facts, done, at=len(turns))
        done["moves"] = done.get("moves", 0) + moved
        turns.append(turn)
        said.append(message.content)
    return Progress(turns=tuple(turns), **done)


def _settles(turn: Reading, facts: Facts) -> bool:
    """Whether a yes after this turn is a yes to the offer."""
    return turn.invites or facts.remedy in turn.offers


def _credit(turn: Reading, facts: Facts, done: dict[str, Any], *, at: int) -> bool:
    """Note in ``done`` what the turn reached; True when that is something new, or it asked for the agreement."""
    reached = len(done.keys() & MILESTONES)
    if turn.apology > done.get("apology", 0.0):
        done["apology"] = turn.apology
        done.setdefault("apologised_at", at)
    given = done.get("given", False)
    if facts.detail in turn.asks and not given:
        done.setdefault("asked_at", at)
    if given and turn.proposes and not turn.asks:
        done["proposed"] = True
    if given and turn.named == {facts.remedy}:
        done["named"] = True
    if turn.offers - {facts.remedy}:
        done["wrong"] = True
    elif facts.remedy in turn.offers:
        if given:
            done.setdefault("offered_at", at)
        elif facts.detail not in turn.asks:
            done["early"] = True
    asks_agreement = turn.invites and "offered_at" in done and not turn.offers - {facts.remedy}
    return len(done.keys() & MILESTONES) > reached or asks_agreement


def _detail_credit(progress: Progress) -> float:
    if progress.given:
        return 1.0
    if any(turn.asks for turn in progress.turns):
        return OTHER_DETAIL
    return SOME_INQUIRY * any(turn.inquires for turn in progress.turns)


def _remedy_credit(progress: Progress) -> float:
    if progress.offered_at is not None:
        return MIXED_REMEDY if progress.wrong else 1.0
    if progress.wrong:
        return max(WRONG_REMEDY * progress.given, NAMED_REMEDY * progress.named)
    return max(EARLY_REMEDY * progress.early, NAMED_REMEDY * progress.named, SOME_OFFER * progress.proposed)


def customer_service(messages: Sequence[Message], prompt: Prompt, end: EndReason) -> Score:
    """Shaped value in [0, 1] (1.0 exactly on success), raw outcome 0 or 1, and the parts.

    A cheat (empty, echo, repetition, listing, parroting, impersonation, gibberish, invention) makes both 0. Raises
    ValueError where ``prompt.ground_truth`` is not a scenario's facts. ``end`` is not looked at: the messages show it.
    """
    progress = follow(Facts.of(prompt.ground_truth), messages)
    cheated = bool(progress.fault) or not progress.turns
    parts = {
        "apology": progress.apology,
        "detail": _detail_credit(progress),
        "remedy": _remedy_credit(progress),
        "confirmation": float(progress.confirmed),
        "brief": sum(turn.brief for turn in progress.turns) / max(1, len(progress.turns)),
        "moves": progress.moves / max(1, len(progress.turns)),
    }
    # Without a question or an offer, being sorry leads nowhere and is worth nothing; with one, it is worth most.
    help_credit = sum(WEIGHTS[name] * parts[name] for name in HELP)
    sorry = WEIGHTS["apology"] * parts["apology"] * (help_credit > 0)
    kept = _between(UNSORRY, parts["apology"]) * _between(STANDSTILL, parts["moves"])
    shaped = _between(RAMBLING, parts["brief"]) * (kept * help_credit + sorry)
    value = 0.0 if cheated else 1.0 if progress.success else shaped
    flags = {"success": progress.success, "cheat": cheated}
    flags |= {"wrong_remedy": progress.wrong, "early_remedy": progress.early}
    parts |= {name: float(flag) for name, flag in flags.items()}
    return Score(value=value, outcome=float(progress.success and not cheated), parts=parts)


def _between(least: float, share: float) -> float:
    """``least`` at a share of 0, 1 at a share of 1."""
    return least + (1.0 - least) * share
