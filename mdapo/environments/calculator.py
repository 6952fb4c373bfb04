"""Arithmetic in exact numbers, by a parser of its own: no ``eval``, and bounded whatever is asked.

sum     = product  { ("+" | "-") product }
product = sign     { ("*" | "/" | "//" | "%") sign }
sign    = { "+" | "-" } power
power   = atom [ ("^" | "**") sign ]          right to left, and -2^2 is -4
atom    = number | "(" sum ")"
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

MAX_TEXT = 400  # characters
MAX_DEPTH = 40  # parentheses, signs and powers inside each other
MAX_BITS = 2048  # of a numerator or a denominator: about 600 digits
MAX_EXPONENT = 2048
SHOWN_DIGITS = 12  # after the point of a number that has no end
MAX_SHOWN = 60  # digits of a whole number; longer ones are told as their length
_TOKEN = re.compile(r"\s*(?:(\d+(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)|(\*\*|//|[-+*/%^()]))")
_PLAIN = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "\u2013": "-", "\u22c5": "*", "\u00b7": "*"})


class CalculationError(ValueError):
    """Why there is no result, for the policy to read."""


def calculate(expression: str) -> str:
    """The value as text: a whole number, or a decimal with at most ``SHOWN_DIGITS`` digits after the point.

    ``CalculationError``: no such expression, division by zero, no exact power, or larger than the bounds above.
    """
    return shown(_Parser(_tokens(expression)).value())


def shown(value: Fraction) -> str:
    """``value`` for people, rounded where it has no end."""
    if value.denominator == 1:
        text = str(value.numerator)
        return text if len(text) <= MAX_SHOWN else f"{text[:20]}... ({len(text.lstrip('-'))} digits)"
    scaled = round(abs(value) * 10**SHOWN_DIGITS)
    whole, part = divmod(scaled, 10**SHOWN_DIGITS)
    if len(str(whole)) > MAX_SHOWN:
        return shown(Fraction(whole if value > 0 else -whole))
    if scaled == 0:
        return f"{float(value):.6g}"
    digits = f"{part:0{SHOWN_DIGITS}d}".rstrip("0")
    return f"{'-' if value < 0 else ''}{whole}{'.' if digits else ''}{digits}"


def _tokens(expression: str) -> list[str]:
    text = expression.translate(_PLAIN).strip()
    if len(text) > MAX_TEXT:
        raise CalculationError(f"the expression is longer than {MAX_TEXT} characters")
    found, at = [], 0
    while at < len(text):
        hit = _TOKEN.match(text, at)
        if hit is None:
            raise CalculationError(f"cannot read {text[at : at + 20].strip()!r}; use numbers, + - * / // % ^ and ( )")
        found.append(hit[1] or hit[2])
        at = hit.end()
    if not found:
        raise CalculationError("the expression is empty")
    return found


class _Parser:
    """Reads the tokens once, from the left."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._at, self._depth = tokens, 0, 0

    def value(self) -> Fraction:
        found = self._sum()
        if self._next is not None:
            raise CalculationError(f"did not expect {self._next!r}")
        return found

    @property
    def _next(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self, *wanted: str) -> str | None:
        token = self._next
        if token not in wanted:
            return None
        self._at += 1
        return token

    def _deeper(self, read: Callable[[], Fraction]) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise CalculationError(f"nested deeper than {MAX_DEPTH} levels")
        found = read()
        self._depth -= 1
        return found

    def _sum(self) -> Fraction:
        left = self._product()
        while (sign := self._take("+", "-")) is not None:
            right = self._product()
            left = _bounded(left + right if sign == "+" else left - right)
        return left

    def _product(self) -> Fraction:
        left = self._sign()
        while (sign := self._take("*", "/", "//", "%")) is not None:
            right = self._sign()
            if sign != "*" and right == 0:
                raise CalculationError("division by zero")
            left = _bounded(
                left * right
                if sign == "*"
                else left / right
                if sign == "/"
                else Fraction(left // right)
                if sign == "//"
                else left % right
            )
        return left

    def _sign(self) -> Fraction:
        if (sign := self._take("+", "-")) is not None:
            found = self._deeper(self._sign)
            return -found if sign == "-" else found
        return self._power()

    def _power(self) -> Fraction:
        base = self._atom()
        if self._take("^", "**") is None:
            return base
        exponent = self._deeper(self._sign)
        return _power(base, exponent)

    def _atom(self) -> Fraction:
        if self._take("(") is not None:
            found = self._deeper(self._sum)
            if self._take(")") is None:
                raise CalculationError("a parenthesis is not closed")
            return found
        token = self._next
        if token is None:
            raise CalculationError("the expression ends too early")
        if not (token[0].isdigit() or token[0] == "."):
            raise CalculationError(f"did not expect {token!r}")
        self._at += 1
        return _bounded(Fraction(token.replace(",", "").rstrip(".") or "0"))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """Bounded before it is computed: 9^9^9 has 369 million digits."""
    if exponent.denominator != 1:
        raise CalculationError("an exponent must be a whole number")
    power = exponent.numerator
    if base == 0 and power < 0:
        raise CalculationError("division by zero")
    size = max(abs(base.numerator), base.denominator).bit_length()
    if abs(power) > MAX_EXPONENT or (size > 1 and size * abs(power) > 2 * MAX_BITS):
        raise CalculationError("the result is too large")
    return _bounded(base**power)


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator).bit_length() > MAX_BITS:
        raise CalculationError("the result is too large")
    return value
