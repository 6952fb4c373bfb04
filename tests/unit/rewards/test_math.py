"""Answers found and compared: one line a case."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.rewards.math import extract_answer, gsm8k, marked_answer, parse_number, same_answer
from mdapo.types import Message, Prompt


def score(reply: str, truth: object, **args: bool) -> float:
    prompt = Prompt(uid="p", row=0, messages=(Message("user", "How many? 99"),), ground_truth=truth)
    return gsm8k([*prompt.messages, Message("assistant", reply)], prompt, "done", **args).value


RIGHT = [
    ("3 + 4 = 7\n#### 7", "7"),
    ("#### 7.", "7"),
    ("####7", "7"),
    ("#### 7.0", "7"),
    ("#### 7.00", "7"),
    ("#### +7", "7"),
    ("#### $7", "7"),
    ("#### \\$7", "7"),
    ("#### $1,234.50", "1234.5"),
    ("#### 1,234,567", "1234567"),
    ("#### 7%", "7"),
    ("#### 7\\%", "7"),
    ("#### 7 eggs", "7"),
    ("#### 7 dollars per day", "7"),
    ("#### **7**", "7"),
    ("#### `7`", "7"),
    ("#### -7", "-7"),
    ("#### \u22127", "-7"),
    ("#### \u20137", "-7"),
    ("#### - 7", "-7"),
    ("#### .5", "0.5"),
    ("#### 1/2", "0.5"),
    ("#### 0.75", "3/4"),
    ("#### 1 1/2", "1.5"),
    ("#### -1 1/2", "-1.5"),
    ("#### 1e3", "1000"),
    ("#### 2.5e-1", "0.25"),
    ("#### 3 x 10^2", "300"),
    ("#### 3 \\times 10^2", "300"),
    ("#### 4 * 2 = 8", "8"),
    ("#### 6\nno wait\n#### 7", "7"),
    ("#### 7\nThat is the answer to 12 questions.", "7"),
    ("#### \u00a07", "7"),
    ("#### €7", "7"),
    ("The answer is \\boxed{7}.", "7"),
    ("\\boxed{ 7 }", "7"),
    ("\\boxed{\\frac{3}{4}}", "0.75"),
    ("\\boxed{\\dfrac{3}{4}}", "0.75"),
    ("\\boxed{\\frac34}", "0.75"),
    ("\\boxed{7\\text{ eggs}}", "7"),
    ("\\boxed{\\$1{,}200}", "1200"),
    ("\\boxed{10\\,000}", "10000"),
    ("\\boxed{6} so \\boxed{7}", "7"),
    ("#### 6 but \\boxed{7}", "7"),
    ("\\boxed{6}\n#### 7", "7"),
    ("$\\fbox{7}$", "7"),
    ("So the answer is 7, of 12.", "7"),
    ("Final answer: 7 apples out of 12", "7"),
    ("She has 3 and 4, so 7", "7"),
    ("She has 3 and 4, which makes 7.", "7"),
    ("It costs $1,000.", "1000"),
    ("That is 50% of 14", "14"),
    ("#### 18", 18),
    ("#### 0.1", 0.1),
    ("#### Paris", "paris"),
    ("\\boxed{Paris}", "Paris"),
    ("#### 0", "0"),
    ("#### -0", "0"),
    ("#### 007", "7"),
    ("7", "7"),
]

WRONG = [
    ("#### 8", "7"),
    ("#### 7", "-7"),
    ("#### 70", "7"),
    ("#### 7.1", "7"),
    ("7 is it\n#### 8", "7"),
    ("#### 50%", "0.5"),
    ("", "7"),
    ("   ", "7"),
    ("I do not know.", "7"),
    ("####", "7"),
    ("\\boxed{", "7"),
    ("\\boxed{}", "7"),
    ("\\boxed{7", "8"),
    ("#### 7/0", "7"),
    ("#### 1e999999999", "7"),
    ("#### " + "9" * 5000, "9"),
    ("#### 9^9^9^9", "9999"),
    ("#### __import__('os').system('true')", "0"),
    ("#### NaN", "7"),
    ("#### inf", "7"),
    ("\\boxed{6 or 7}", "7"),
    ("\\boxed{3+4}", "7"),
    ("#### 1.2.3", "1.2"),
    ("#### Paris", "7"),
    ("x7", "7"),
    ("#### \u0667", "8"),
]


@pytest.mark.parametrize(("reply", "truth"), RIGHT)
def test_right_answer_scores(reply: str, truth: object) -> None:
    assert score(reply, truth) == 1.0


@pytest.mark.parametrize(("reply", "truth"), WRONG, ids=[r[:30] for r, _ in WRONG])
def test_wrong_answer_does_not_score(reply: str, truth: object) -> None:
    assert score(reply, truth) == 0.0


def test_strict_wants_a_marked_answer() -> None:
    assert score("It is 7", "7", strict=True) == 0.0
    assert score("It is \n#### 7", "7", strict=True) == 1.0
    assert marked_answer("It is 7") is None


def test_only_the_last_assistant_message_counts() -> None:
    prompt = Prompt(uid="p", row=0, messages=(Message("user", "Q"),), ground_truth="7")
    talk = [Message("assistant", "#### 7"), Message("user", "Check."), Message("assistant", "#### 8")]
    assert gsm8k(talk, prompt, "done").value == 0.0
    assert gsm8k([*talk[:2]], prompt, "done").outcome == 1.0
    assert gsm8k([Message("user", "#### 7")], prompt, "done").value == 0.0


@pytest.mark.parametrize("truth", [None, True, [7], {"a": 7}])
def test_ground_truth_that_is_no_answer_is_an_error(truth: object) -> None:
    with pytest.raises(ValueError, match="ground_truth must be text or a number"):
        score("#### 7", truth)


def test_numbers_are_exact() -> None:
    assert parse_number("0.1") == Fraction(1, 10)
    assert parse_number("1,234") == 1234
    assert parse_number("seven") is None
    assert same_answer("0.3", "3/10")
    assert not same_answer("0.33333333333333333", "1/3")
    assert not same_answer("", "")


def test_every_shipped_answer_is_read_and_equals_itself() -> None:
    from mdapo.config.schema import Data
    from mdapo.data.prompts import load_prompts

    for prompt in load_prompts(["package:gsm8k_train.jsonl"], Data(train_files=["x"])):
        assert score(str(prompt.extra["answer"]), prompt.ground_truth, strict=True) == 1.0


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789.,/-+e^ #=\\{}boxedfrac$%x\n", max_size=200))
def test_any_text_is_read_without_an_error(text: str) -> None:
    answer = extract_answer(text)
    assert answer is None or isinstance(same_answer(answer, "7"), bool)


@pytest.mark.parametrize(
    "piece", ["1 ", "1,111", "1/", "\\boxed{", "#### ", "answer is ", "-", "$", "9^", "\\frac{1", "1e"]
)
def test_long_hostile_text_costs_little_work(piece: str) -> None:
    """Only the end is looked at, by patterns that do not backtrack far: a megabyte ends before the limit of tests."""
    extract_answer(piece * 200_000)
