"""Sample, filter and fill: what each built-in decides, and what is said of a plug-in that breaks the contract."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdapo.config.schema import Config
from mdapo.errors import UserError
from mdapo.rollout.fill import Arrival, Balanced, LongDialogsFirst, bias
from mdapo.rollout.filter import BELOW_THRESHOLD, MOST_MOVE, Adaptive, Fixed
from mdapo.rollout.sample import Need, Wave, YieldAware
from mdapo.rollout.stages import Stages
from mdapo.rollout.yields import Yield
from mdapo.types import Episode, Group, Message, Prompt, Score, Turn

NOTHING = np.zeros(0, np.int32)


def config(**filters: Any) -> Config:
    data = {"train_files": ["x"], "train_prompt_bsz": 32, "gen_batch_size": 64}
    return Config.model_validate({"model": {"path": "x"}, "data": data, "algorithm": {"filter_groups": filters}})


def group(values: Sequence[float], *, turns: int = 1, tokens: int = 3) -> Group:
    prompt = Prompt("p", 0, (Message("user", "ask"),))
    turn = Turn("assistant", np.zeros(tokens, np.int32), np.ones(tokens, bool), np.zeros(tokens, np.float32))
    episodes = [
        Episode(prompt, i, NOTHING, (turn,) * turns, (), "done", Score(value, value)) for i, value in enumerate(values)
    ]
    return Group(prompt, tuple(episodes), 0)


def known(kept: int, judged: int) -> Yield:
    estimate = Yield()
    estimate.kept, estimate.judged = float(kept), float(judged)
    return estimate


# ---- sample ----------------------------------------------------------------------------------------------------------


def test_a_wave_is_scaled_down_to_what_is_missing() -> None:
    """Case 6: one rejection of 32 launches two replacements at the configured ratio of two, not a wave of 64."""
    wave = Wave(config=config())
    assert [wave.ask(Need(missing, 0, Yield())) for missing in (32, 16, 1, 0)] == [64, 32, 2, 0]
    assert wave.ask(Need(32, 30, Yield(), ahead=True)) == 2  # each under way may count as accepted
    assert not wave.streams


def test_one_missing_group_at_a_yield_near_one_asks_for_one_prompt() -> None:
    """Case 6."""
    sampler = YieldAware(config=config())
    assert sampler.ask(Need(1, 0, known(199, 200))) == 1
    assert sampler.ask(Need(1, 1, known(199, 200))) == 0  # it is on its way
    assert sampler.streams


def test_requests_follow_the_yield() -> None:
    sampler = YieldAware(config=config())
    assert sampler.ask(Need(32, 0, Yield())) == 64  # nothing is known yet: the user's ratio
    assert sampler.ask(Need(32, 60, Yield())) == 4
    asked = [sampler.ask(Need(32, 0, known(kept, 2000))) for kept in (400, 800, 1600)]
    assert asked == sorted(asked, reverse=True)
    assert all(0.75 < count / (32 / share) <= 1.05 for count, share in zip(asked, (0.2, 0.4, 0.8), strict=True))
    late, early = (Need(missing, 0, known(800, 2000)) for missing in (2, 32))
    assert sampler.ask(late) / 2 > sampler.ask(early) / 32  # surer as the step's end comes near
    ahead = sampler.ask(Need(32, 0, known(800, 2000), ahead=True))
    assert 32 / 0.4 * 0.75 < ahead < 32 / 0.4  # by the upper bound of the yield: surplus would grow too old


# ---- filter ----------------------------------------------------------------------------------------------------------


def judge(stage: Fixed, values: Sequence[float]) -> str:
    found = group(values)
    verdict = stage.judge(found)
    stage.saw(found, verdict)
    return verdict.reason


def test_the_adaptive_threshold_brings_the_yield_to_its_target_and_moves_slowly() -> None:
    stage, random = Adaptive(config=config(filter="adaptive", target_yield=0.3)), np.random.default_rng(0)
    assert stage.threshold == 0.0
    kept, thresholds = [], []
    for step in range(60):
        stage.open_step()
        thresholds.append(stage.threshold)
        for _ in range(32):
            mean = random.uniform(0.1, 0.9)
            reason = judge(stage, [mean - 0.1, mean + 0.1] if random.random() < 0.8 else [mean, mean])
            kept.append(reason == "" if step >= 20 else None)
    shares = [k for k in kept if k is not None]
    assert np.mean(shares) == pytest.approx(0.3, abs=0.05)
    assert max(abs(b - a) for a, b in pairwise(thresholds)) <= MOST_MOVE + 1e-9
    assert thresholds[-1] == pytest.approx(0.6, abs=0.08)  # 0.3 of all is 3/8 of those with spread


def test_the_adaptive_threshold_neither_starves_nor_leaves_its_range() -> None:
    stage = Adaptive(config=config(filter="adaptive", target_yield=0.9, threshold_range=[0.2, 0.5]))
    for _ in range(10):
        stage.open_step()
        for _ in range(40):
            judge(stage, [1.0, 1.0])  # no spread, whatever the threshold
        judge(stage, [0.1, 0.5])
    assert stage.threshold == 0.2  # less is accepted than the target even without a threshold
    assert judge(stage, [0.0, 0.3]) == BELOW_THRESHOLD
    greedy = Adaptive(config=config(filter="adaptive", target_yield=0.01, threshold_range=[0.2, 0.5]))
    for _ in range(40):
        greedy.open_step()
        for _ in range(40):
            judge(greedy, [0.7, 0.9])
    assert greedy.threshold <= 0.5
    assert {"rollout/threshold", "rollout/threshold_yield"} == set(greedy.metrics())


def test_the_adaptive_threshold_survives_a_restart() -> None:
    first, second = (Adaptive(config=config(filter="adaptive", target_yield=0.3)) for _ in range(2))
    for i in range(300):
        if i % 30 == 0:
            first.open_step()
        judge(first, [0.0, (i % 17) / 16] if i % 3 else [0.5, 0.5])
    second.restore(json.loads(json.dumps(first.state())))
    for stage in (first, second):
        stage.open_step()
    assert (second.threshold, second.metrics()) == (first.threshold, first.metrics()) and first.threshold > 0.0


def test_a_group_with_one_loser_is_kept_whole_by_the_adaptive_filter() -> None:
    """Case 5b."""
    stage = Adaptive(config=config(filter="adaptive"))
    assert stage.judge(group([0.0, *[0.95] * 7])).kept
    assert not stage.judge(group([0.1, 0.1, 0.1])).kept  # case 5a


# ---- fill ------------------------------------------------------------------------------------------------------------


def test_each_fill_takes_what_it_says() -> None:
    groups = [group([0, 1], turns=turns) for turns in (1, 5, 2, 9, 3, 7)]
    assert list(Arrival(config=config()).choose(groups, 3)) == [0, 1, 2]
    assert list(LongDialogsFirst(config=config()).choose(groups, 3)) == [3, 5, 1]
    assert sorted(Balanced(config=config()).choose(groups, 3)) == [0, 1, 5]  # of 1 2 3 5 7 9 turns: 1, 5, 7
    longer = [group([0, 1], turns=2, tokens=tokens) for tokens in (3, 9, 5)]
    assert list(LongDialogsFirst(config=config()).choose(longer, 2)) == [1, 2]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=40), st.data())
def test_fills_take_distinct_groups_and_balanced_has_the_least_bias(turns: list[int], data: Any) -> None:
    groups = [group([0, 1], turns=t) for t in turns]
    count = data.draw(st.integers(0, len(groups)))
    for name in ("arrival", "long_dialogs_first", "balanced"):
        chosen = Stages.of(config(fill=name)).choose(groups, count)
        assert len(chosen) == len(set(chosen)) == count and chosen == sorted(chosen)
    if count:
        stage, longest = Balanced(config=config()), LongDialogsFirst(config=config())
        means = [np.mean([turns[i] for i in s.choose(groups, count)]) for s in (stage, longest)]
        assert means[1] >= means[0] - 1e-9
        spread = max(turns) - min(turns)
        assert abs(means[0] - np.mean(turns)) <= spread / count + 1e-9  # systematic sampling: within one stratum


def test_the_bias_of_a_fill_is_told_and_arrival_has_none_to_tell() -> None:
    groups = [group([0, 1], turns=t, tokens=2) for t in (1, 3)]
    assert bias(groups[1:], groups) == {
        "rollout/fill/turns_trained": 3,
        "rollout/fill/tokens_trained": 6,
        "rollout/fill/turns_accepted": 2,
        "rollout/fill/tokens_accepted": 4,
    }
    assert Stages.of(config()).bias(groups[1:], groups) == {}


# ---- plug-ins --------------------------------------------------------------------------------------------------------

PLUGIN = """
from mdapo.rollout.fill import Fill
from mdapo.rollout.filter import Filter, Fixed
from mdapo.rollout.sample import Sample

class Three(Sample):
    def __init__(self, *, config): self.count = 3
    def ask(self, need): return self.count

class Never(Sample):
    def __init__(self, *, config): pass
    def ask(self, need): return 0

class Half(Three):
    def __init__(self, *, config): self.count = 0.5

class NotAStage:
    def __init__(self, *, config): pass

class Twice(Fill):
    def __init__(self, *, config): pass
    def choose(self, groups, count): return [0] * count

class Strict(Fixed):
    pass

def no_config(): pass
"""


def test_stages_of_ones_own_are_loaded_and_held_to_their_contract(tmp_path: Path) -> None:
    file = tmp_path / "stages_of_mine.py"
    file.write_text(PLUGIN)
    need = Need(4, 0, Yield())
    mine = Stages.of(config(sample=f"{file}:Three", filter=f"{file}:Strict"))
    assert mine.ask(need) == 3 and mine.filter.judge(group([0, 1])).kept
    assert mine.state() == {"sample": {}, "filter": {}}
    with pytest.raises(UserError, match=r"ask\(\) gave 0.5, no count"):
        Stages.of(config(sample=f"{file}:Half")).ask(need)
    with pytest.raises(UserError, match="nothing would ever come"):
        Stages.of(config(sample=f"{file}:Never")).ask(need)
    with pytest.raises(UserError, match=r"choose\(\) gave \[0, 0\], not 2 different ones of 3 groups"):
        Stages.of(config(fill=f"{file}:Twice")).choose([group([0, 1])] * 3, 2)
    with pytest.raises(
        UserError, match=r"lacks judge, saw, open_step, metrics, state, restore; mdapo.rollout.filter.F"
    ):
        Stages.of(config(filter=f"{file}:NotAStage"))
    with pytest.raises(UserError, match="lacks config"):
        Stages.of(config(fill=f"{file}:no_config"))
    with pytest.raises(UserError, match="did you mean yield"):
        Stages.of(config(sample="yeild"))
