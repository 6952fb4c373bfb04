"""single_turn and gsm8k: when they answer and when they end."""

from __future__ import annotations

import pytest

from mdapo.environments.base import Observation
from mdapo.environments.gsm8k import FEEDBACK, Gsm8k
from mdapo.environments.single_turn import SingleTurn
from mdapo.types import Message, Prompt

PROMPT = Prompt(uid="p", row=0, messages=(Message("user", "3 + 4?"),), ground_truth="7")


def say(text: str) -> list[Message]:
    return [*PROMPT.messages, Message("assistant", text)]


def test_single_turn_ends_after_the_first_reply() -> None:
    environment = SingleTurn(PROMPT, seed=0)
    assert environment.opening() == PROMPT.messages
    assert environment.observe(say("anything")) == Observation(end="done")


def test_right_answer_ends_at_once() -> None:
    assert Gsm8k(PROMPT, seed=0).observe(say("#### 7")) == Observation(end="done")


def test_wrong_answer_gets_feedback_once_that_does_not_give_the_answer_away() -> None:
    environment = Gsm8k(PROMPT, seed=0)
    assert environment.observe(say("#### 8")) == Observation((Message("user", FEEDBACK),))
    assert "7" not in FEEDBACK
    assert environment.observe(say("#### 9")) == Observation(end="gave_up")


def test_second_answer_may_be_right_and_an_empty_one_is_wrong() -> None:
    environment = Gsm8k(PROMPT, seed=0)
    assert environment.observe(say("")).end is None
    assert environment.observe(say("So it is 7.")).end == "done"


def test_number_of_tries_is_a_configuration_argument() -> None:
    environment = Gsm8k(PROMPT, seed=0, tries=3)
    assert [environment.observe(say("8")).end for _ in range(3)] == [None, None, "gave_up"]


def test_prompt_without_ground_truth_is_refused() -> None:
    with pytest.raises(ValueError, match="p: ground_truth must be text or a number"):
        Gsm8k(Prompt(uid="p", row=0, messages=PROMPT.messages), seed=0)
