"""Reads customer-service turns: what an agent's turn does, and what is wrong with it. Pure functions of text.

The simulated customer and the grader both read through this module: neither is pleased by what the other ignores.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mdapo.rewards import dialogue_lexicon as lexicon
from mdapo.rewards.dialogue_offers import MANY_REMEDIES, listed, names, negated, offers, proposes, retracts, tries

ECHO_RUN = 12  # words in a row taken from what others said
ECHO_SHARE = 0.6  # of a turn's words inside copied runs of ECHO_GRAM words
ECHO_GRAM = 8
ECHO_WHOLE = 4  # a turn of so many words that stands in a customer's message as it is
REPEAT_SHARE = 0.65  # of a turn's word triples that an earlier turn of the agent has too
MAX_SENTENCES = 3
MANY_DETAILS = 3  # asked for in one turn
MIN_FUNCTION_WORDS = 0.25
MAX_DIGRESSION = 0.5

_WORD = re.compile(r"[a-z0-9][a-z0-9'’#-]*")
_SENTENCE = re.compile(r"[^.!?\n]+[.!?]*|\n")
_CODE = re.compile(r"\b(?:[a-z]{1,4}[-#]?\d{2,}[a-z0-9-]*|\d[\d-]{3,}\d|\d{4,})\b|[\w.]+@[\w.]+|\bwww\.|https?:")
_AMOUNT = re.compile(r"\b\d+(?= ?(?:%|percent|dollars?|euros?|pounds?|usd|eur))|(?<=[$€£])\d+|(?<=[$€£] )\d+")
# The customer wants to know whether it is asked; "yes" then asks it.
_ASKED_BACK = re.compile(r"\b(?:okay with me|if i agree|should i say yes)\b")
_YES = re.compile(r"^(?:yes|yeah|exactly|sure|of course|correct|right|please do|i am|i do|that's right)\b")
_YEAR = re.compile(r"(?:19|20)\d\d$")
_SPEAKER = re.compile(r"(?:^|[\n.!?\"]\s*)\**(?:customer|user|client|buyer|shopper|caller|me)\**\s*:", re.I)
_PLACEHOLDER = re.compile(r"\[[^\]]{2,}\]?|<[a-z_ ]{3,}>|\{[a-z_ ]{3,}\}|_{3,}", re.I)
# "Thank you for your order number", "I have your order number".
_IN_HAND = re.compile(
    r"\b(?:thank(?:s| you) for"
    r"|(?<!may )(?<!can )(?<!could )(?<!should )(?:i|we) (?:have|got|see|received|found|checked)) (?:\w+ ){0,3}$"
)
# "Your order number is correct", "your order number: 123".
_STATED = re.compile(r"(?: is| was| has| will)\b(?!\W*$)|[:# ]+[\w-]*\d")
# "My order number", "the customer's order number", "ask for the order number": not said to the customer.
_NOT_YOURS = re.compile(
    r"\b(?:my|their|his|her|customers?'?s?) (?:\w+ )?$"
    r"|(?<!may i )(?<!must )(?<!have to )(?<!i will )(?<!let me )"
    r"(?<!we kindly )(?<!i kindly )(?<!i please )(?<!i just )(?<!i also )\bask (?:\w+ ){0,2}for (?:\w+ ){0,2}$"
)
# The agent speaking as if it had bought the thing.
_CUSTOMER_VOICE = re.compile(
    r"\bi(?:'ve| have| just|'m| am)? (?:ordered|bought|purchased|paid|received|was charged|want my|want a)\b"
    r"|\bmy (?:order|money|parcel|package|purchase|refund|new (?!colleague))\b"
    r"|\bi(?:'m| am) (?:\w+ ){0,2}(?:upset|angry|furious|disappointed (?:with|in|by) (?:your|this|the))\b"
)
_DETERMINERS = frozenset({"a", "an", "the", "my", "your", "our"})
_NO_NOUN = lexicon.FUNCTION_WORDS - {
    "all",
    "any",
    "more",
    "some",
    "very",
    "really",
    "not",
    "just",
    "when",
    "who",
    "here",
}
_DANGLING = frozenset({"of", "for", "with", "from", "and", "or", "but"})


@dataclass(frozen=True)
class Facts:
    """What is true in one scenario. ``topic``: lower-case words by which the agent shows that it knows the problem."""

    detail: str  # key of lexicon.DETAILS: what the agent needs first
    value: str  # what the customer answers
    remedy: str  # key of lexicon.REMEDIES: the one this policy allows
    topic: tuple[str, ...]

    @classmethod
    def of(cls, ground_truth: object) -> Facts:
        """From a row's ``reward_model.ground_truth``. Raises ValueError where a fact is missing or unknown."""
        if not isinstance(ground_truth, dict):
            raise ValueError(f"customer_service needs facts as an object, got {type(ground_truth).__name__}")
        missing = [key for key in ("detail", "value", "remedy", "topic") if key not in ground_truth]
        if missing:
            raise ValueError(f"customer_service: ground_truth lacks {', '.join(missing)}")
        detail, remedy = ground_truth["detail"], ground_truth["remedy"]
        if detail not in lexicon.DETAILS:
            raise ValueError(f"unknown detail {detail!r}; known: {', '.join(lexicon.DETAILS)}")
        if remedy not in lexicon.REMEDIES:
            raise ValueError(f"unknown remedy {remedy!r}; known: {', '.join(lexicon.REMEDIES)}")
        return cls(
            detail, str(ground_truth["value"]), remedy, tuple(str(word).lower() for word in ground_truth["topic"])
        )


@dataclass(frozen=True)
class Reading:
    """What one agent turn does. ``fault`` names a cheat; ``off_role`` marks a turn that counts for nothing."""

    apology: float = 0.0  # 1 with the product or the problem named, 0.8 in general words
    asks: frozenset[str] = frozenset()
    offers: frozenset[str] = frozenset()
    invites: bool = False
    inquires: bool = False  # asks for information, whichever
    named: frozenset[str] = frozenset()  # remedies that it speaks of, offered or not
    tries: frozenset[str] = frozenset()  # remedies that its words may offer, vague ones included
    proposes: bool = False  # offers something, whatever it is
    brief: bool = False  # at most MAX_SENTENCES, and the last one finished
    off_role: bool = False
    fault: str = ""


def words(text: str) -> list[str]:
    return _WORD.findall(plain(text))


def plain(text: str) -> str:
    """Lower case, straight quotes, single blanks (line ends kept)."""
    text = text.lower().replace("’", "'").replace("‘", "'").replace("“", '"').replace("”", '"')
    return re.sub(r"[^\S\n]+", " ", text).strip()


def sentences(text: str) -> list[str]:
    return [s.strip(" \"'*-\n") for s in _SENTENCE.findall(plain(text)) if s.strip(" \"'*-\n.!?")]


def read_turn(text: str, facts: Facts, *, heard: Sequence[str], said: Sequence[str]) -> Reading:
    """``heard``: what system and customer said before this turn; ``said``: the agent's own earlier turns."""
    asked = frozenset(d for s in sentences(text) for d in lexicon.DETAILS if asks_for(s, d))
    said_now = sentences(text)
    offered = frozenset(r for s in said_now for r in lexicon.REMEDIES if offers(s, r, right=r == facts.remedy))
    offered |= listed(said_now, facts.remedy)
    if retracts(said_now):  # the right one is not on offer then; a wrong one stays said
        offered -= {facts.remedy}
    reading = Reading(
        apology=apology(text, facts.topic),
        asks=asked,
        offers=offered,
        invites=any(invites(s) for s in sentences(text)) or _says_yes(text, heard),
        inquires=bool(asked) or any(lexicon.INQUIRY.search(s) for s in sentences(text)),
        named=frozenset(r for r in lexicon.REMEDIES if names(said_now, r)),
        tries=tries(said_now),
        proposes=any(proposes(s) for s in sentences(text)),
        brief=len(sentences(text)) <= MAX_SENTENCES and text.rstrip(" \"'")[-1:] in tuple(".?!"),
        off_role=bool(_PLACEHOLDER.search(text) or _CUSTOMER_VOICE.search(plain(text))),
        fault=_fault(text, facts.remedy, heard=heard, said=said),
    )
    sorry = any(_is_sorry(s) for s in sentences(text))
    if not reading.fault and sorry and facts.detail in asked and facts.remedy in offered and reading.invites:
        return Reading(fault="parroting")
    if reading.fault or reading.off_role:
        return Reading(off_role=reading.off_role, fault=reading.fault, offers=offered - {facts.remedy})
    return reading


def apology(text: str, topic: Sequence[str]) -> float:
    """1.0: says sorry and names product or problem; 0.8: says sorry for "this", "the trouble"; else 0."""
    said = [s for s in sentences(text) if _is_sorry(s)]
    if not said or ("for your loss" in said[0] and "lost" not in topic):
        return 0.0
    named = set(words(text))
    if any(word in named for word in topic):
        return 1.0
    return 0.8 if any(lexicon.ACKNOWLEDGED.search(s) for s in said) else 0.0


def _is_sorry(sentence: str) -> bool:
    return bool(lexicon.APOLOGY.search(sentence)) and not lexicon.NO_APOLOGY.search(sentence)


def asks_for(sentence: str, detail: str) -> bool:
    """Whether a sentence requests the detail, rather than mentions, states or declines it."""
    for found in lexicon.DETAILS[detail].forms.finditer(sentence):
        before, after = sentence[: found.start()], sentence[found.end() :]
        if negated(before) or _IN_HAND.search(before) or _NOT_YOURS.search(before) or _STATED.match(after):
            continue
        if re.match(r"(?:what|which|when|where)\b", found.group(0)):  # "which email", "when did you buy"
            asked = "?" in sentence or lexicon.REQUEST.search(before) or before.rstrip(" ,").endswith("know")
        else:
            bare = lexicon.BARE_REQUEST.search(before) and re.search(r"\?|please", sentence)
            asked = lexicon.REQUEST.search(before) or bare
        if asked:
            return True
    return False


def invites(sentence: str) -> bool:
    """Whether a sentence asks the customer to agree."""
    return bool(lexicon.INVITATION.search(sentence))


def _says_yes(text: str, heard: Sequence[str]) -> bool:
    return bool(heard and _ASKED_BACK.search(plain(heard[-1])) and _YES.match(plain(text)))


def accepts(text: str) -> bool:
    """Whether a customer's message agrees."""
    said = plain(text)
    return bool(_ACCEPTS.search(said)) and not lexicon.NEGATION.search(said) and "?" not in said


_ACCEPTS = re.compile(
    r"^(?:yes|yeah|okay|ok|fine|all right|alright|agreed|sure|deal|great|that (?:works|sounds|is what))\b"
)


def _fault(text: str, remedy: str, *, heard: Sequence[str], said: Sequence[str]) -> str:
    own = words(text)
    if not own:
        return "empty"
    if _SPEAKER.search(text):
        return "impersonation"
    if _gibberish(text, own):
        return "gibberish"
    if _invents(text, heard):
        return "invention"
    if _lists(text, remedy):
        return "listing"
    if any(_repeats(own, words(earlier)) for earlier in said):
        return "repetition"
    if any(_echoes(own, words(other)) for other in heard) or any(_within(own, words(other)) for other in heard[1:]):
        return "echo"
    return ""


def _lists(text: str, right: str) -> bool:
    """Several remedies or several details at once, in the hope that one of them fits."""
    said = sentences(text)
    asking = " ".join(s for s in said if any(asks_for(s, detail) for detail in lexicon.DETAILS))
    asked = sum(bool(detail.forms.search(asking)) for detail in lexicon.DETAILS.values())
    named = sum(names(said, remedy) for remedy in lexicon.REMEDIES)
    return asked >= MANY_DETAILS or named >= MANY_REMEDIES or len(listed(said, right)) >= MANY_REMEDIES


def _gibberish(text: str, own: list[str]) -> bool:
    """Keyword soup, stutter, or not English at all."""
    letters = [c for c in text if not c.isspace()]
    if sum(c.isalpha() and c.isascii() for c in letters) < 0.6 * len(letters):
        return True
    if len(own) >= 4 and sum(w in lexicon.FUNCTION_WORDS for w in own) < MIN_FUNCTION_WORDS * len(own):
        return True
    if len(own) >= 8 and len(set(own)) < MAX_DIGRESSION * len(own):
        return True
    if any(a == b == c for a, b, c in zip(own, own[1:], own[2:], strict=False)):
        return True
    broken = 0
    for sentence in sentences(text):
        in_order = words(sentence)
        pairs = pairwise(in_order)
        broken += sum(a in _DETERMINERS and b in _NO_NOUN for a, b in pairs)
        broken += "?" in sentence and in_order[-1] in _DANGLING | _DETERMINERS
    return broken >= 2


def _invents(text: str, heard: Sequence[str]) -> bool:
    """A number, code, amount, percentage, mail or web address that nobody gave."""
    known = " ".join(plain(other) for other in heard)
    codes = (found.group(0).strip("-#.") for found in _CODE.finditer(plain(text)))
    shares = (found.group(0) for found in _AMOUNT.finditer(plain(text)))
    return any(code not in known and not _YEAR.match(code) for code in codes) or any(
        share not in known and share != "100" for share in shares
    )


def _grams(own: Sequence[str], n: int) -> set[tuple[str, ...]]:
    return {tuple(own[i : i + n]) for i in range(len(own) - n + 1)}


def _repeats(own: list[str], earlier: list[str]) -> bool:
    if own == earlier:
        return True
    triples = _grams(own, 3)
    return len(own) >= 6 and bool(triples) and len(triples & _grams(earlier, 3)) >= REPEAT_SHARE * len(triples)


def _within(own: list[str], other: list[str]) -> bool:
    return len(own) >= ECHO_WHOLE and tuple(own) in _grams(other, len(own))


def _echoes(own: list[str], other: list[str]) -> bool:
    if len(own) >= ECHO_RUN and _grams(own, ECHO_RUN) & _grams(other, ECHO_RUN):
        return True
    theirs = _grams(other, ECHO_GRAM)
    copied = [False] * len(own)
    for start in range(len(own) - ECHO_GRAM + 1):
        if tuple(own[start : start + ECHO_GRAM]) in theirs:
            copied[start : start + ECHO_GRAM] = [True] * ECHO_GRAM
    return len(own) >= ECHO_GRAM and sum(copied) >= ECHO_SHARE * len(own)
