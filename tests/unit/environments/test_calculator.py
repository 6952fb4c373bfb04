"""Exact, and bounded whatever is asked."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.environments.calculator import MAX_BITS, MAX_TEXT, CalculationError, calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("6 * 7", "42"),
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("10 - 4 - 3", "3"),
        ("7 / 2", "3.5"),
        ("1 / 3", "0.333333333333"),
        ("-1 / 8", "-0.125"),
        ("0.1 + 0.2", "0.3"),
        ("2 ^ 10", "1024"),
        ("2 ** 3 ** 2", "512"),
        ("-2 ^ 2", "-4"),
        ("2 ^ -2", "0.25"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("17 % 5", "2"),
        ("1,234,567 + 1", "1234568"),
        ("3.", "3"),
        (".5", "0.5"),
        ("--3", "3"),
        ("+5", "5"),
        ("6 × 7 ÷ 2 − 1", "20"),
        ("1 / 10^20", "1e-20"),
        ("10 ^ 100", "10000000000000000000... (101 digits)"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("9**9**9", "too large"),
        ("9^9^9^9^9", "too large"),
        ("10 ^ 100000", "too large"),
        ("2 ^ 2000 * 2 ^ 2000", "too large"),
        ("(1/3) ^ 2000", "too large"),
        ("1 / 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("0 ^ -1", "division by zero"),
        ("2 ^ 0.5", "whole number"),
        ("", "empty"),
        ("2 +", "ends too early"),
        ("(2", "not closed"),
        ("2)", "did not expect ')'"),
        ("2 3", "did not expect '3'"),
        ("* 2", "did not expect '*'"),
        ("__import__('os')", "cannot read"),
        ("1e5", "cannot read 'e5'"),
        ("x + 1", "cannot read"),
        ("1" * (MAX_TEXT + 1), "longer than"),
        ("(" * 60 + "1" + ")" * 60, "nested deeper"),
        ("-" * 60 + "1", "nested deeper"),
        ("2" + "^1" * 60, "nested deeper"),
    ],
)
def test_what_has_no_value_is_told_why(expression: str, why: str) -> None:
    with pytest.raises(CalculationError) as caught:
        calculate(expression)
    assert why in str(caught.value)


@settings(max_examples=400, deadline=None)
@given(st.text(alphabet="0123456789.+-*/%^() ,x", max_size=60) | st.text(max_size=40))
def test_any_text_has_a_short_value_or_a_reason(expression: str) -> None:
    try:
        found = calculate(expression)
    except CalculationError as error:
        found = str(error)
    assert 0 < len(found) < 200


NUMBERS = st.integers(0, 999).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda e: st.tuples(e, st.sampled_from(["+", "-", "*", "/"]), e).map(lambda x: f"({' '.join(x)})"),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(EXPRESSIONS)
def test_arithmetic_is_that_of_fractions(expression: str) -> None:
    """Python's own, on the same expression in exact numbers; it is the test's, and was made by it."""
    import re

    exact = re.sub(r"\d+", lambda n: f"Fraction({n[0]})", expression)
    try:
        value = eval(exact, {"Fraction": Fraction})  # noqa: S307
    except ZeroDivisionError:
        with pytest.raises(CalculationError, match="division by zero"):
            calculate(expression)
        return
    if value.denominator == 1 and abs(value) < 10**50:
        assert calculate(expression) == str(value.numerator)
    else:
        assert abs(Fraction(calculate(expression)) - value) <= Fraction(1, 10**9)


def test_the_bound_is_on_every_step() -> None:
    assert calculate(f"2 ^ {MAX_BITS - 1} - 2 ^ {MAX_BITS - 1}") == "0"
    with pytest.raises(CalculationError, match="too large"):
        calculate(f"2 ^ {MAX_BITS}")
