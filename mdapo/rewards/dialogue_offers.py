"""What a customer-service agent's sentence offers, and whether a turn offers several things. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from mdapo.rewards import dialogue_lexicon as lexicon

_CLAUSE = re.compile(r"[,;:]| but | however | although | though | so | and (?=we|i|you)")
# "A refund is not possible".
_DENIED = re.compile(r" (?:(?:is|are|will|can|would|was)(?: be)?(?:n't| not\b)|won't|cannot)")


MANY_REMEDIES = 3  # in one turn are a list, however they are joined


class _Found(NamedTuple):
    """Words that offer a remedy: the sentence's number and their place in it."""

    sentence: int
    start: int
    end: int


def offers(sentence: str, remedy: str, *, right: bool) -> bool:
    """Whether a sentence offers the remedy. Vague forms count only for the right one."""
    return bool(_offered(sentence, remedy, vague=right))


def listed(said: Sequence[str], right: str) -> frozenset[str]:
    """Remedies that sentences offer side by side, in clear words or vague ones; empty for one remedy.

    Two stand side by side when something separates them ("a or b"); of ``MANY_REMEDIES`` in a row no more is asked ("a
    new one by express with a coupon at a lower price"). One that only goes along with another of them does not count,
    unless it is the ``right`` one: both are on offer.
    """
    found = _find(said)
    along = {other for remedy in found for other in lexicon.ACCOMPANIES.get(remedy, ())} - {right}
    counted = {remedy: found[remedy] for remedy in sorted(found.keys() - along)}
    apart = {remedy for pair in combinations(counted, 2) if _beside(said, found, *pair) for remedy in pair}
    row = _in_words_of_their_own(counted)
    return frozenset(apart | row if len(row) >= MANY_REMEDIES else apart)


def retracts(said: Sequence[str]) -> bool:
    """Whether a turn takes back what it offers."""
    return any(lexicon.RETRACTION.search(sentence) for sentence in said)


def tries(said: Sequence[str]) -> frozenset[str]:
    """Remedies that sentences may mean to offer."""
    return frozenset(_find(said))


def proposes(sentence: str) -> bool:
    """Whether a sentence offers something, whatever it is."""
    asks = re.search(r"\b(?:what|which|how|why)\b", sentence)
    return bool(lexicon.PROPOSAL.search(sentence)) and not asks and not negated(sentence)


def names(said: Sequence[str], remedy: str) -> bool:
    """Whether a turn names a remedy at all, unless only to decline it."""
    return any(
        not negated(_clause_before(sentence, found.start()))
        for sentence in said
        for found in lexicon.REMEDIES[remedy].strong.finditer(sentence)
    )


def negated(before: str) -> bool:
    """Whether the words before it turn it into its opposite ("why not" and "don't worry" do not)."""
    said = re.sub(
        r"\b(?:why not|why don't (?:we|i|you)|don't (?:worry|hesitate)|not only|no (?:problem|worries))\b", " ", before
    )
    return bool(lexicon.NEGATION.search(said))


def _offered(sentence: str, remedy: str, *, vague: bool) -> list[tuple[int, int]]:
    """Where a sentence offers a remedy: start and end of each form."""
    if not lexicon.OFFER.search(sentence):
        return []
    forms = lexicon.REMEDIES[remedy]
    clear = [match.span() for match in forms.strong.finditer(sentence)]
    hints = [match.span() for match in forms.weak.finditer(sentence)] if vague and forms.weak else []
    places = clear + [(start, end) for start, end in hints if not _aside(sentence, start, end)]
    return [(start, end) for start, end in places if _stands(sentence, start, end)]


def _stands(sentence: str, start: int, end: int) -> bool:
    """Whether what the sentence names between start and end is offered, rather than denied or reported."""
    before, after = sentence[:start], sentence[end:]
    own = max((m.start() for m in lexicon.OWN_WORDS.finditer(before)), default=0)
    clause = _clause_before(sentence, start)
    if negated(clause) or lexicon.NO_OFFER_BEFORE.search(clause) or lexicon.REPORTED.search(before[own:]):
        return False
    return not (_DENIED.match(after) or lexicon.NO_OFFER_AFTER.search(after))


def _aside(sentence: str, start: int, end: int) -> bool:
    return bool(lexicon.ASIDE_BEFORE.search(sentence[:start]) or lexicon.ASIDE_AFTER.match(sentence[end:]))


def _clause_before(sentence: str, start: int) -> str:
    return sentence[max((m.end() for m in _CLAUSE.finditer(sentence, 0, start)), default=0) : start]


def _find(said: Sequence[str]) -> dict[str, list[_Found]]:
    found: dict[str, list[_Found]] = {}
    for at, sentence in enumerate(said):
        for remedy in lexicon.REMEDIES:
            for span in _offered(sentence, remedy, vague=True):
                found.setdefault(remedy, []).append(_Found(at, *span))
    return found


def _in_words_of_their_own(found: dict[str, list[_Found]]) -> set[str]:
    """Remedies of which no two are the same words read twice ("send a new part")."""
    places = sorted(((place, remedy) for remedy in found for place in found[remedy]), key=lambda p: p[0][::2])
    chosen: set[str] = set()
    last = _Found(-1, 0, 0)
    for place, remedy in places:
        if remedy not in chosen and (place.sentence > last.sentence or place.start >= last.end):
            chosen.add(remedy)
            last = place
    return chosen


def _beside(said: Sequence[str], found: dict[str, list[_Found]], one: str, other: str) -> bool:
    """Whether two remedies are two offers: never in the same words, and in a row ("a or b") or in two sentences."""
    apart = False
    for a in found[one]:
        for b in found[other]:
            first, second = sorted((a, b))
            if first.sentence != second.sentence:
                apart = True
            elif second.start < first.end:
                return False
            else:
                apart |= bool(lexicon.BESIDE.search(said[first.sentence][first.end : second.start]))
    return apart
