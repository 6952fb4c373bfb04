"""What is remembered of prompts, and which of them it spares."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mdapo.config.schema import Config, SkipPrompts
from mdapo.data.prompts import PromptStream
from mdapo.rollout.dealing import Dealer
from mdapo.rollout.pass_rates import PRIOR, PassRates
from mdapo.types import Episode, Group, Message, Prompt, Score

NOTHING = np.zeros(0, np.int32)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", i, (Message("user", "ask"),)) for i in range(count)]


def group(prompt: Prompt, outcomes: Sequence[float | None]) -> Group:
    scores = [None if o is None else Score(o, o) for o in outcomes]
    return Group(prompt, tuple(Episode(prompt, i, NOTHING, (), (), "done", s) for i, s in enumerate(scores)), 0)


def rates(n: int = 8, **keys: Any) -> PassRates:
    return PassRates(SkipPrompts(enable=True, **keys), n=n, seed=0)


def test_the_posterior_is_that_of_a_beta_binomial() -> None:
    memory, prompt = rates(n=2), prompts(1)[0]
    assert memory.pass_rate("p0") is None
    memory.saw(group(prompt, [1.0, 0.0, 1.0, None]))
    a, b = PRIOR + 2.0, PRIOR + 1.0
    assert memory.pass_rate("p0") == pytest.approx(a / (a + b))
    wrong, right = memory.uniform("p0")
    assert wrong == pytest.approx(b * (b + 1) / ((a + b) * (a + b + 1)))
    assert right == pytest.approx(a * (a + 1) / ((a + b) * (a + b + 1)))
    memory.version = 50  # a half-life later
    assert memory.pass_rate("p0") == pytest.approx((PRIOR + 1.0) / (2 * PRIOR + 1.5))


def test_prompts_that_are_surely_all_right_or_all_wrong_are_skipped_until_that_is_long_ago() -> None:
    memory, (easy, hard, medium, unseen) = rates(recheck=0.0), prompts(4)
    for prompt, outcome in ((easy, [1.0] * 8), (hard, [0.0] * 8), (medium, [0.0, 1.0] * 4)):
        memory.saw(group(prompt, outcome))
    assert [memory.skips(p) for p in (easy, hard, medium, unseen)] == [True, True, False, False]
    assert memory.skipped == 2
    found = memory.metrics()
    assert found["rollout/skip/share"] == 0.5
    assert (found["rollout/skip/all_right"], found["rollout/skip/all_wrong"]) == (0.25, 0.25)
    shares = [
        found[f"rollout/skip/{what}_{band}"] for what in ("dealt", "asked") for band in ("hard", "easy", "unseen")
    ]
    assert shares == [0.25, 0.25, 0.25, 0.0, 0.0, 0.5]
    assert memory.metrics() == {}  # since the last call
    memory.version = 100
    assert not memory.skips(easy) and not memory.skips(hard)


def test_a_share_is_asked_all_the_same() -> None:
    memory, prompt = rates(recheck=0.2), prompts(1)[0]
    memory.saw(group(prompt, [0.0] * 8))
    skipped = sum(memory.skips(prompt) for _ in range(2000))
    assert skipped / 2000 == pytest.approx(0.8, abs=0.04)
    assert memory.metrics()["rollout/skip/rechecked"] == 1.0


def test_memory_and_draws_survive_a_restart() -> None:
    first, second, prompt = rates(recheck=0.5), rates(recheck=0.5), prompts(1)[0]
    first.saw(group(prompt, [0.0] * 8))
    [first.skips(prompt) for _ in range(7)]
    second.restore(json.loads(json.dumps(first.state())))
    assert [second.skips(prompt) for _ in range(40)] == [first.skips(prompt) for _ in range(40)]


def dealer(count: int, *, epochs: int | None = None, **keys: Any) -> Dealer:
    skip = {"enable": True, **keys}
    filters = {"algorithm": {"filter_groups": {"skip_prompts": skip}}, "rollout": {"n_resp_per_prompt": 8}}
    config = Config.model_validate({"model": {"path": "x"}, "data": {"train_files": ["x"]}, **filters})
    return Dealer(PromptStream(prompts(count), seed=0, shuffle=False, epochs=epochs), config)


def test_skipped_prompts_are_done_with_for_their_epoch_and_at_most_an_epoch_is_skipped() -> None:
    deal = dealer(10, recheck=0.0)
    assert deal.rates is not None
    first = deal.next(10)
    for prompt in first:
        deal.rates.saw(group(prompt, [0.0] * 8 if prompt.row % 2 else [0.0, 1.0] * 4))
    deal.stream.commit(p.uid for p in first)
    assert [p.row for p in deal.next(5)] == [0, 2, 4, 6, 8]
    assert deal.stream.state()["again"] == [10, 12, 14, 16, 18]  # those asked; the skipped do not come again

    hopeless = dealer(10, recheck=0.0)
    assert hopeless.rates is not None
    for prompt in hopeless.next(10):
        hopeless.rates.saw(group(prompt, [1.0] * 8))
    assert len(hopeless.next(7)) == 7  # never endless


def test_a_stream_that_ends_while_prompts_are_skipped_gives_what_it_has() -> None:
    deal = dealer(4, epochs=2, recheck=0.0)
    assert deal.rates is not None
    first = deal.next(4)
    for prompt in first:
        deal.rates.saw(group(prompt, [1.0] * 8 if prompt.row else [0.0, 1.0] * 4))
    deal.stream.commit(p.uid for p in first)
    assert [p.row for p in deal.next(4)] == [0]
    assert deal.stream.exhausted
