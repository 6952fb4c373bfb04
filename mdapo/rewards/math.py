"""Final answers of word problems: found in free text, read as exact numbers, compared. Nothing is ever evaluated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from mdapo.types import EndReason, Message, Prompt, Score

_MAX_TEXT = 4000  # characters looked at, from the end: an answer stands at the end, and work stays bounded
_MAX_DIGITS = 40  # longer numbers are text
_MAX_EXPONENT = 30
# Dashes that stand for a minus sign, and spaces that are not breaking or thin.
_PLAIN = str.maketrans("\u2212\u2012\u2013\u2014\ufe63\uff0d\u00a0\u2009\u202f\u2007", "------    ")
_DROPPED = re.compile(
    r"\\[,;!:]|\\(?:left|right)\b|\\?\$|[€£¥]|\*\*|`|\\%|%|\\text\s*\{[^{}]*\}|\\(?:mathrm|mathbf)\b|[{}]"
)
_FRAC = re.compile(r"\\[dt]?frac\s*(?:\{\s*(-?\d{1,40})\s*\}\s*\{\s*(\d{1,40})\s*\}|(\d)\s*(\d))")
_UNSIGNED = (
    r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+|\s?(?:\\times|×|x)\s?10\^\(?[+-]?\d+\)?)?"
)
_NUMBER = re.compile(
    rf"(?<![\w.])[-+]?\s?(?:\d+\s+)?{_UNSIGNED}\s*/\s*\d+(?!\d|\.\d)|(?<![\w.])[-+]?\s?{_UNSIGNED}(?!\d|\.\d)"
)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_STATED = re.compile(r"(?:final\s+)?answer\s*(?:is|:|=)+\s*([^\n]+)", re.IGNORECASE)


def gsm8k(messages: Sequence[Message], prompt: Prompt, end: EndReason, *, strict: bool = False) -> Score:
    """1.0 when the last assistant message ends in the right number, else 0.0; outcome the same.

    ``strict``: the answer must be marked (``#### x`` or ``\\boxed{x}``); else the last number of the text will do.
    The part ``marked`` says whether it was. Raises ValueError where ``prompt.ground_truth`` is no text or number.
    """
    truth = prompt.ground_truth
    if isinstance(truth, bool) or not isinstance(truth, str | int | float):
        raise ValueError(f"ground_truth must be text or a number, is {type(truth).__name__}")
    last = next((m.content for m in reversed(messages) if m.role == "assistant"), "")
    marked = marked_answer(last)
    answer = marked if marked is not None or strict else extract_answer(last)
    correct = float(answer is not None and same_answer(answer, str(truth)))
    return Score(value=correct, outcome=correct, parts={"correct": correct, "marked": float(marked is not None)})


def extract_answer(text: str) -> str | None:
    """The marked answer, else what follows the last "answer is", else the last number; None where there is none."""
    marked = marked_answer(text)
    if marked is not None:
        return marked
    text = text[-_MAX_TEXT:]
    stated = _STATED.findall(text)
    if stated and (numbers := _numbers(stated[-1])):
        return numbers[0]
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def marked_answer(text: str) -> str | None:
    """What stands after the last ``####``, or in the last ``\\boxed{}``, whichever is later; None where neither is."""
    text = text[-_MAX_TEXT:]
    hashes = text.rfind("####")
    boxes = list(_BOXED.finditer(text))
    if boxes and boxes[-1].start() > hashes:
        return _braced(text, boxes[-1].end())
    if hashes < 0:
        return None
    line = text[hashes + 4 :].strip().split("\n")[0]
    numbers = _numbers(line.rpartition("=")[2])
    return numbers[0] if numbers else line.strip() or None


def same_answer(answer: str, truth: str) -> bool:
    """Equal as exact numbers (``1,000.0`` is ``1000``, ``3/4`` is ``0.75``); if neither is one, as lower-case text."""
    a, b = parse_number(answer), parse_number(truth)
    if a is not None and b is not None:
        return a == b
    return a is None and b is None and _tidy(answer).casefold() == _tidy(truth).casefold() != ""


def parse_number(text: str) -> Fraction | None:
    """The number that ``text`` is (with currency sign, per cent sign or unit); None if it is none, or huge."""
    tidy = _tidy(text)
    hit = _NUMBER.match(tidy)
    if hit is None or re.search(r"[\d=+*/^]", tidy[hit.end() :]):
        return None
    return _read(hit[0])


def _read(number: str) -> Fraction | None:
    number = re.sub(r"^([-+])\s", r"\1", number.replace(",", "").strip())
    if sum(c.isdigit() for c in number) > _MAX_DIGITS:
        return None
    if "/" in number:
        left, _, below = number.partition("/")
        whole, _, above = left.strip().rpartition(" ")
        numerator, denominator = _decimal(above), int(below)
        if numerator is None or denominator == 0:
            return None
        part = numerator / denominator
        if not whole:
            return part
        return Fraction(whole) - part if whole.startswith("-") else Fraction(whole) + part
    return _decimal(number)


def _decimal(number: str) -> Fraction | None:
    base, exponent = number, "0"
    if power := re.fullmatch(r"(.*?)(?:[eE]|\s?(?:\\times|×|x)\s?10\^\(?)([+-]?\d+)\)?", number):
        base, exponent = power[1], power[2]
    if abs(int(exponent)) > _MAX_EXPONENT:
        return None
    return Fraction(base) * Fraction(10) ** int(exponent)


def _numbers(text: str) -> list[str]:
    return [hit[0].strip() for hit in _NUMBER.finditer(_tidy(text))]


def _tidy(text: str) -> str:
    """ASCII signs, LaTeX fractions as ``a/b``, and no currency signs, per cent signs, spacing commands or braces."""
    text = text.translate(_PLAIN)
    text = _FRAC.sub(lambda f: f" {f[1] or f[3]}/{f[2] or f[4]}", text)
    text = _DROPPED.sub("", text)
    return re.sub(r"\s+", " ", text).strip().rstrip(".,;:!")


def _braced(text: str, start: int) -> str | None:
    """From ``start`` to the brace that closes the one before it."""
    depth = 1
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start:i].strip() or None
    return None
