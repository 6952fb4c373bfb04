"""Credit by turn: what an advantage is made of, and that its mean is the policy gradient, whenever episodes end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.algorithms.advantages import EPS, Estimator, advantages
from mdapo.algorithms.turn_credit import turn_advantages, turn_returns

from .turn_game import MEMBERS, Game, in_groups, off_direction

SEEDS = (0, 1, 2)
Credit = Callable[[Game], list[Sequence[np.ndarray]]]


def test_a_turn_is_credited_with_what_was_gained_from_it_on() -> None:
    """Two episodes of a group; the second gained all it has in its first turn and nothing after."""
    values, before = np.array([1.0, 0.5]), [[0.0, 0.25], [0.0, 0.5]]
    first, second = turn_advantages(values, before, np.array([7, 7]), estimator="group_mean")
    np.testing.assert_allclose(first, [0.25, 0.375])  # gained 1.0 and 0.75, against 0.5 and 0.0
    np.testing.assert_allclose(second, [-0.25, -0.375])


def test_returns_are_discounted_by_turns() -> None:
    """Case 22a by turns: 0, 0, 1 and 0.5 make 0.25, 0.5, 1; the next episode's returns do not leak into them."""
    found = turn_returns(np.array([1.0, 8.0]), [[0.0, 0.0, 0.0], [2.0]], turn_gamma=0.5)
    np.testing.assert_array_equal(found, [0.25, 0.5, 1.0, 6.0])
    found = turn_returns(np.array([3.0]), [[0.0, 1.0, 3.0]], turn_gamma=0.5)
    np.testing.assert_array_equal(found, [1.0 + 0.5 * 2.0, 2.0, 0.0])
    np.testing.assert_array_equal(turn_returns(np.zeros(2), [[], []], turn_gamma=0.5), [])
    np.testing.assert_array_equal(turn_returns(np.array([3.0]), [[0.0, 1.0]], turn_gamma=0.0), [1.0, 2.0])


def test_a_turn_is_compared_with_the_same_turn_of_the_same_group() -> None:
    values = np.array([1.0, 0.0, 5.0, 3.0])
    before = [[0.0], [0.0, 0.0], [0.0], [0.0]]
    found = turn_advantages(values, before, np.array([0, 0, 1, 1]), estimator="group_norm")
    assert [len(turns) for turns in found] == [1, 2, 1, 1]
    half = 1 / np.sqrt(2)
    np.testing.assert_allclose([turns[0] for turns in found], [half, -half, half, -half], rtol=1e-5)
    assert found[1][1] == 0.0  # no other episode came so far, and one number has no standard deviation


@pytest.mark.parametrize(("estimator", "share"), [("rloo", 1.0), ("group_mean", 2 / 3)])
def test_a_turn_that_no_other_has_is_compared_with_the_others_last_turns(estimator: Estimator, share: float) -> None:
    values = np.array([1.0, 0.5, 4.0])
    before = [[0.0], [0.0, 0.3], [0.0, 1.0, 2.5]]
    _, _, longest = turn_advantages(values, before, np.zeros(3, int), estimator=estimator)
    np.testing.assert_allclose(longest, share * np.array([4.0 - 0.75, 3.0 - 0.2, 1.5 - (1.0 + 0.2) / 2]), rtol=1e-6)


def test_all_turns_that_no_other_has_are_and_other_groups_are_left_out() -> None:
    values, before = np.array([9.0, 1.0, 4.0, 0.5]), [[0.0], [0.0], [0.0, 1.0, 2.5], [0.25]]
    _, _, longest, _ = turn_advantages(values, before, np.array([8, 5, 5, 5]), estimator="rloo")
    np.testing.assert_allclose(longest, [4.0 - 0.625, 3.0 - 0.625, 1.5 - 0.625], rtol=1e-6)


def test_rounding_alone_is_no_credit() -> None:
    """Case 5a: all gained 0.1, as well as three numbers of 64 bits can say it."""
    values, before = np.array([0.1, 0.1, 0.1, 0.1 + 0.2]), [[0.0], [0.0], [0.0], [0.2, 0.2]]
    for estimator in ("rloo", "group_mean", "group_norm"):
        found = turn_advantages(values, before, np.zeros(4, int), estimator=estimator)
        assert not np.concatenate(found).any(), estimator


def test_an_episode_that_is_not_valid_neither_gets_nor_changes_a_turns_credit() -> None:
    values, before, group = np.array([1.0, 0.0, np.nan]), [[0.0], [0.0], [0.0, 0.0]], np.zeros(3, int)
    valid = np.array([True, True, False])
    for estimator, unit in (("group_mean", 0.5), ("rloo", 1.0)):
        found = turn_advantages(values, before, group, estimator=estimator, valid_N=valid)
        np.testing.assert_allclose(np.concatenate(found), [unit, -unit, 0.0, 0.0])
    alone = turn_advantages(values, before, group, estimator="rloo", valid_N=np.array([True, False, False]))
    assert not np.concatenate(alone).any()


def test_reinforce_plus_plus_compares_turns_over_the_whole_batch_each_token_once() -> None:
    values, before, group = np.array([1.0, 0.0]), [[0.0], [0.0, -2.0]], np.array([0, 1])
    tokens = [[3], [4, 1]]
    found = turn_advantages(values, before, group, estimator="reinforce++", tokens=tokens)
    gained, weights = np.array([1.0, 0.0, 2.0]), np.array([3, 4, 1])  # of other groups, of other turns
    mean = np.average(gained, weights=weights)
    std = np.sqrt(np.average((gained - mean) ** 2, weights=weights))
    assert [len(turns) for turns in found] == [1, 2]
    np.testing.assert_allclose(np.concatenate(found), (gained - mean) / (std + EPS), rtol=1e-6)


@pytest.mark.parametrize("estimator", ["group_norm", "group_mean", "rloo"])
def test_tokens_of_a_turn_count_for_reinforce_plus_plus_only(estimator: Estimator) -> None:
    values, before, group = np.array([1.0, 0.0]), [[0.0, 0.5], [0.0, 0.25]], np.zeros(2, int)
    plain = turn_advantages(values, before, group, estimator=estimator)
    counted = turn_advantages(values, before, group, estimator=estimator, tokens=[[9, 1], [1, 5]])
    np.testing.assert_array_equal(np.concatenate(plain), np.concatenate(counted))


@pytest.mark.parametrize("estimator", ["group_norm", "group_mean", "rloo", "reinforce++"])
def test_with_one_turn_an_episode_turn_credit_is_the_episodes(estimator: Estimator) -> None:
    rng = np.random.default_rng(0)
    values, group = rng.normal(size=12), np.repeat([0, 1, 2], 4)
    tokens = rng.integers(1, 9, size=12)
    found = turn_advantages(values, [[0.0]] * 12, group, estimator=estimator, tokens=tokens[:, None].tolist())
    episodes = advantages(values, group, estimator=estimator, tokens_N=tokens)
    np.testing.assert_array_equal(np.concatenate(found), episodes)


@pytest.mark.parametrize("seed", SEEDS)
def test_group_norm_is_that_of_episodes_for_each_turn_of_each_group(seed: int) -> None:
    rng = np.random.default_rng(seed)
    turns = rng.integers(1, 6, size=24)
    before = [[0.0, *rng.normal(size=n - 1)] for n in turns]
    values, group, valid = rng.normal(size=24), np.repeat([0, 1, 2], 8), rng.random(24) < 0.8
    found = turn_advantages(values, before, group, estimator="group_norm", valid_N=valid)
    for turn in range(5):
        own = np.flatnonzero(turns > turn)
        gained = np.array([values[i] - before[i][turn] for i in own])
        wanted = advantages(gained, group[own], estimator="group_norm", valid_N=valid[own])
        np.testing.assert_array_equal([found[i][turn] for i in own], wanted)


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(st.lists(st.floats(-5, 5, width=32), min_size=0, max_size=5), min_size=1, max_size=9),
    estimator=st.sampled_from(["group_norm", "group_mean", "rloo", "reinforce++"]),
    turn_gamma=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_credit_is_finite_and_no_group_changes_anothers(
    turns: list[list[float]], estimator: Estimator, turn_gamma: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values, group = rng.normal(size=len(turns)).astype(np.float32), rng.integers(0, 3, size=len(turns))
    found = turn_advantages(values, turns, group, estimator=estimator, turn_gamma=turn_gamma)
    assert [len(own) for own in found] == [len(own) for own in turns]
    assert all(np.isfinite(own).all() for own in found)
    if estimator == "reinforce++":
        return
    for name in np.unique(group):
        own = np.flatnonzero(group == name)
        again = turn_advantages(
            values[own], [turns[i] for i in own], group[own], estimator=estimator, turn_gamma=turn_gamma
        )
        for i, credit in zip(own, again, strict=True):
            np.testing.assert_array_equal(found[i], credit)


# The mean of the estimate over all groups that there can be, and the gradient.


def ours(estimator: Estimator, turn_gamma: float = 1.0) -> Credit:
    def credit(game: Game) -> list[Sequence[np.ndarray]]:
        episodes = [e for group in game.groups for e in group]
        gained = [np.cumsum([0.0, *game.rewards(e)]).tolist() for e in episodes]
        values, before = np.array([g[-1] for g in gained]), [g[:-1] for g in gained]
        names = np.repeat(np.arange(len(game.groups)), MEMBERS)
        return in_groups(turn_advantages(values, before, names, estimator=estimator, turn_gamma=turn_gamma))

    return credit


@cache
def moments(seed: int, estimator: Estimator) -> tuple[np.ndarray, float]:
    return Game.random(seed).moments(ours(estimator))


def by_hand(rule: Callable[[list[list[float]]], list[list[float]]]) -> Credit:
    """``rule`` makes advantages of the turns' own rewards, for a group's members."""
    return lambda game: [[np.array(own) for own in rule([game.rewards(e) for e in members])] for members in game.groups]


def to_go(rewards: Sequence[float]) -> list[float]:
    return [sum(rewards[k:]) for k in range(len(rewards))]


def padded_with_0(rewards: list[list[float]]) -> list[list[float]]:
    """Others that have no turn t gained 0 in it."""
    returns = [to_go(r) for r in rewards]

    def baseline(i: int, turn: int) -> float:
        return sum(g[turn] for j, g in enumerate(returns) if j != i and turn < len(g)) / (len(returns) - 1)

    return [[g - baseline(i, turn) for turn, g in enumerate(own)] for i, own in enumerate(returns)]


def own_turn_in_the_mean(rewards: list[list[float]]) -> list[list[float]]:
    returns = [to_go(r) for r in rewards]
    most = max(map(len, returns))
    means = [np.mean([g[turn] for g in returns if turn < len(g)]) for turn in range(most)]
    return [[g - float(means[turn]) for turn, g in enumerate(own)] for own in returns]


def nothing_without_peers(rewards: list[list[float]]) -> list[list[float]]:
    returns = [to_go(r) for r in rewards]

    def credit(i: int, turn: int) -> float:
        others = [g[turn] for j, g in enumerate(returns) if j != i and turn < len(g)]
        return returns[i][turn] - float(np.mean(others)) if others else 0.0

    return [[credit(i, turn) for turn in range(len(own))] for i, own in enumerate(returns)]


def one_mean_for_all_turns(rewards: list[list[float]]) -> list[list[float]]:
    returns = [to_go(r) for r in rewards]
    mean = float(np.mean(np.concatenate(returns)))
    return [[g - mean for g in own] for own in returns]


def one_std_for_all_turns(rewards: list[list[float]]) -> list[list[float]]:
    std = float(np.std(np.concatenate([to_go(r) for r in rewards]))) + EPS
    return [[g / std for g in own] for own in one_mean_for_all_turns(rewards)]


def relative_then_added_up(rewards: list[list[float]]) -> list[list[float]]:

    def others(i: int, turn: int) -> float:
        found = [r[turn] for j, r in enumerate(rewards) if j != i and turn < len(r)]
        return float(np.mean(found)) if found else 0.0

    relative = [[r - others(i, turn) for turn, r in enumerate(own)] for i, own in enumerate(rewards)]
    return [to_go(own) for own in relative]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("estimator", "share"), [("rloo", 1.0), ("group_mean", (MEMBERS - 1) / MEMBERS)])
def test_the_mean_over_all_groups_is_the_policy_gradient(seed: int, estimator: Estimator, share: float) -> None:
    game = Game.random(seed)
    wanted = game.gradient()
    assert len({len(e) for e in game.episodes}) == 3 and np.abs(wanted).max() > 0.05
    mean, _ = moments(seed, estimator)
    np.testing.assert_allclose(mean, share * wanted, atol=2e-7)


@pytest.mark.parametrize("turn_gamma", [0.0, 0.6])
def test_with_a_discount_it_is_that_of_the_discounted_returns(turn_gamma: float) -> None:
    game = Game.random(3)
    mean, _ = game.moments(ours("rloo", turn_gamma))
    np.testing.assert_allclose(mean, game.gradient_of_returns(turn_gamma), atol=2e-7)
    assert np.abs(mean - game.gradient()).max() > 0.02
    np.testing.assert_allclose(game.gradient_of_returns(1.0), game.gradient(), atol=1e-9)


@pytest.mark.parametrize(
    "rule",
    [
        own_turn_in_the_mean,
        nothing_without_peers,
        one_mean_for_all_turns,
        one_std_for_all_turns,
        relative_then_added_up,
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_not_done_is_off_even_in_direction(
    seed: int, rule: Callable[[list[list[float]]], list[list[float]]]
) -> None:
    game = Game.random(seed)
    mean, _ = game.moments(by_hand(rule))
    assert off_direction(mean, game.gradient()) > 0.01
    assert off_direction(moments(seed, "rloo")[0], game.gradient()) < 1e-5


def test_missing_turns_as_gains_of_0_are_no_bias_but_gains_off_0_cost_variance() -> None:
    near, far = Game.random(0), Game.random(0, gain=3.0)
    for game in (near, far):
        mean, variance = game.moments(by_hand(padded_with_0))
        np.testing.assert_allclose(mean, game.gradient(), atol=1e-6)
    assert variance > 1.2 * far.moments(ours("rloo"))[1]


@pytest.mark.parametrize("seed", SEEDS)
def test_with_a_standard_deviation_the_mean_still_leads_up(seed: int) -> None:
    game = Game.random(seed)
    wanted = game.gradient()
    mean, _ = moments(seed, "group_norm")
    cosine = (mean * wanted).sum() / np.linalg.norm(mean) / np.linalg.norm(wanted)
    assert 0.9 < cosine < 0.999  # near the gradient's direction, and not in it
    assert game.at(game.theta + 0.1 * mean).mean_value > game.mean_value
