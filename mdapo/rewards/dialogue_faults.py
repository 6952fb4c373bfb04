"""Faults of an agent's replies that can be read off their words: repetition, contradiction, breaking off.

Each is a share in [0, 1], 0 where nothing is wrong. Plain heuristics, made for English and harmless elsewhere: a
contradiction is two statements about the same words of which one denies what the other says, and no more is claimed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

WINDOW = 16  # earlier replies that one is compared with
MAX_WORDS = 2000  # of a reply that are read
MAX_SENTENCES = 64
GRAM = 3  # words of the runs whose return is repetition
LEAST_WORDS = 6  # of a reply or sentence below which saying it again is courtesy, not repetition
LEAST_STEMS = 5  # as many as a statement counts with that has fewer
ABOUT_THE_SAME = (0.2, 0.75)  # shares of words in common: from where on a denial is suspected, and certain
STEM = 6  # letters by which words of one family are known
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)?")
_SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n+|(?<=[。！？])|, (?=but |not |while |whereas )")
_ENDS = re.compile(r"[.!?…:。！？؟।»”\"'’)\]}>`*|~%\d]$|[^\w\s,;–—-]$")
_BREAKS = re.compile(
    r"[,;–—-]$|\b(?:and|or|but|the|a|an|of|to|in|on|at|for|with|from|by|is|are|was|were|will|can|could|should|would|if|that|which|your|our|my|its|their|than|as)$",
    re.IGNORECASE,
)
_WORDS_DENIALS = """
    no not never none nobody nothing neither nor without cannot can't won't don't doesn't didn't isn't aren't
    wasn't weren't shouldn't wouldn't couldn't needn't mustn't hasn't haven't hardly rarely
"""
_DENIALS = frozenset(_WORDS_DENIALS.split())
_WORDS_FILLERS = """
    a an the this that these those it its i you we he she they me my your our his her their of to in on at for
    with from by as and or but if so than then too also very just only even there here is are was were be been
    being am do does did done has have had will would can could shall should may might must let get gets one
    ones about into over yes please thank thanks well okay ok what which who when where how why much many any
    some all each
"""
_FILLERS = frozenset(_WORDS_FILLERS.split())
_OPPOSITES = (
    "always never", "more less", "most least", "better worse", "best worst", "cheaper dearer", "safe dangerous",
    "safer riskier", "enough short", "early late", "earlier later", "fast slow", "faster slower", "easy hard",
    "open closed", "before after", "same different", "first last", "increase decrease", "raise lower",
    "higher lower", "high low", "large small", "larger smaller", "long short", "longer shorter", "lighter heavier",
    "allowed forbidden", "possible impossible", "covered uncovered", "included excluded",
    "hot cold", "warm cold", "dry wet", "full empty", "with without", "right wrong", "true false",
    "good bad", "gives takes", "useful useless", "sharp blurred",
)  # fmt: skip
_OPPOSITE: dict[str, frozenset[str]] = {}
for _pair in _OPPOSITES:
    _a, _b = _pair.split()
    _OPPOSITE[_a] = _OPPOSITE.get(_a, frozenset()) | {_b}
    _OPPOSITE[_b] = _OPPOSITE.get(_b, frozenset()) | {_a}


def breaks_off(text: str) -> float:
    """Whether a reply stops in mid-sentence: 1 after a comma or a word that cannot end one, ``0.8`` where a sentence of
    some length has no end, 0 where it has one. Lists, code, calls and numbers end as they like."""
    said = text.rstrip()
    if not said:
        return 0.0
    if _BREAKS.search(said):
        return 1.0
    if _ENDS.search(said) or len(_words(said)) < 2:
        return 0.0
    last = said.rpartition("\n")[2]
    if last != said and re.match(r"\s*(?:[-*•]|\d+[.)])\s", last):  # the last item of a list
        return 0.0
    return 0.8


def repeats_itself(text: str) -> float:
    """Share of a reply's runs of `GRAM` words that came before in it, beyond a tenth, which any text has."""
    grams = _grams(text)
    total = sum(grams.values())
    if total < LEAST_WORDS:
        return 0.0
    return _beyond(1.0 - len(grams) / total, 0.1, 0.5)


def repeats_earlier(text: str, earlier: Sequence[str]) -> float:
    """How much of a reply one of the last `WINDOW` replies had said already, in runs of words, beyond a third."""
    grams = _grams(text)
    if sum(grams.values()) < LEAST_WORDS - GRAM + 1:
        return 0.0
    most = max((len(grams.keys() & _grams(other).keys()) / len(grams) for other in earlier[-WINDOW:]), default=0.0)
    return _beyond(most, 0.34, 0.8)


def contradicts(text: str, earlier: Sequence[str]) -> float:
    """The clearest denial, in a reply, of something that it or one of the last `WINDOW` replies states."""
    own = _statements(text)
    others = [statement for other in earlier[-WINDOW:] for statement in _statements(other)]
    pairs = [(own[i], other) for i in range(len(own)) for other in (*others, *own[:i])]
    return max((_conflict(a, b) for a, b in pairs), default=0.0)


@dataclass(frozen=True)
class _Statement:
    stems: frozenset[str]
    words: frozenset[str]
    numbers: frozenset[str]
    denies: bool


@lru_cache(maxsize=4096)
def _statements(text: str) -> tuple[_Statement, ...]:
    """The sentences that are no questions."""
    found = []
    for sentence in _SENTENCE.split(text)[:MAX_SENTENCES]:
        words = _words(sentence)
        if not words or sentence.rstrip().endswith(("?", "？")):
            continue
        content = [w for w in words if w not in _FILLERS and w not in _DENIALS]
        found.append(
            _Statement(
                frozenset(map(_stem, (w for w in content if not w.isdigit()))),
                frozenset(words),
                frozenset(w for w in words if w.isdigit()),
                any(w in _DENIALS or w.endswith("n't") for w in words),
            )
        )
    return tuple(found)


def _conflict(a: _Statement, b: _Statement) -> float:
    """How much two statements are about the same, where one denies the other; else 0."""
    shared = a.stems & b.stems
    if len(shared) < 2:
        return 0.0
    opposed = any(_OPPOSITE.get(word, frozenset()) & b.words for word in a.words)
    if (a.denies != b.denies) == opposed:
        return 0.0
    return _beyond(len(shared) / max(min(len(a.stems), len(b.stems)), LEAST_STEMS), *ABOUT_THE_SAME)


def _beyond(share: float, low: float, high: float) -> float:
    """0 up to ``low``, 1 from ``high`` on."""
    return min(max((share - low) / (high - low), 0.0), 1.0)


def _stem(word: str) -> str:
    for ending in ("ing", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word[: -len(ending)]
            break
    return word[:STEM]


@lru_cache(maxsize=4096)
def _grams(text: str) -> Counter[tuple[str, ...]]:
    words = _words(text)
    return Counter(tuple(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1))


def _words(text: str) -> list[str]:
    return [m.group().replace("’", "'") for m in _WORD.finditer(text.lower())][:MAX_WORDS]
