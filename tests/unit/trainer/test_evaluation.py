"""What an evaluation says of conversations that have no score: how many, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from mdapo.errors import UserError
from mdapo.trainer.rollout import evaluation, unscored
from mdapo.types import Episode, Message, Prompt, Score

BAD = Score(value=0.0, outcome=0.0, valid=False)
FAILED = Episode(
    Prompt("p", 0, (Message("user", "1"),)), 0, np.ones(1, np.int32), (), (Message("user", "1"),), "done", BAD
)
SCORED = replace(FAILED, score=Score(value=0.5, outcome=1.0))
BROKEN = replace(FAILED, end="error")


def test_an_evaluation_without_one_score_says_which_function_failed_how_and_how_often() -> None:
    with pytest.raises(UserError) as caught:
        evaluation(
            [FAILED, FAILED, BROKEN], Counter({"mine: raised ValueError": 2}), broken=["val/p/2: the engine died"]
        )
    assert caught.value.problems == [
        "evaluation: not one of 3 conversations could be scored:",
        "  2 x mine: raised ValueError",
        "  val/p/2: the engine died",
    ]


def test_some_failures_are_left_out_of_the_means_and_told() -> None:
    episodes, failures = [FAILED, SCORED, SCORED], Counter({"mine: returned NaN": 1})
    assert evaluation(episodes, failures, broken=[])["eval/reward"] == 0.5
    assert unscored(episodes, failures, broken=[]) == (1, ["1 x mine: returned NaN"])
    assert unscored([SCORED], Counter(), broken=[]) == (0, [])


def test_coherence_and_relevance_are_means_over_what_was_measured() -> None:
    measured = replace(FAILED, score=Score(0.5, 1.0, coherence=0.75, relevance=0.25))
    found = evaluation([SCORED, measured, FAILED], Counter(), broken=[])
    assert (found["eval/coherence"], found["eval/relevance"]) == (0.75, 0.25)
    assert not {"eval/coherence", "eval/relevance"} & evaluation([SCORED], Counter(), broken=[]).keys()
