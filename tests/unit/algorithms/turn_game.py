"""A conversation small enough to enumerate: up to three turns, each ``stop``, ``ask`` or ``wander``; what a turn gains
depends on all that was said. Every episode, every group of three, and so the exact mean of any estimate of the policy
gradient, against the gradient by central differences of the exact mean value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

ACTIONS, LAST_TURN = 3, 2  # action 0 ends the conversation
History = tuple[int, ...]
HISTORIES: list[History] = [(), (1,), (2,), (1, 1), (1, 2), (2, 1), (2, 2)]
MEMBERS = 3


@dataclass(frozen=True)
class Game:
    """``gains[history + (action,)]``: what a turn gains; ``theta`` [histories, actions]: the policy's logits."""

    gains: dict[History, float]
    theta: np.ndarray

    @classmethod
    def random(cls, seed: int, *, gain: float = 0.4) -> Game:
        rng = np.random.default_rng(seed)
        gains = {(*h, a): float(rng.normal(gain, 1.0)) for h in HISTORIES for a in range(ACTIONS)}
        return cls(gains, rng.normal(size=(len(HISTORIES), ACTIONS)) * 0.7)

    def at(self, theta: np.ndarray) -> Game:
        return Game(self.gains, theta)

    @cached_property
    def policy(self) -> np.ndarray:
        odds = np.exp(self.theta)
        return odds / odds.sum(axis=1, keepdims=True)

    @cached_property
    def episodes(self) -> list[History]:
        ends = [h for n in range(1, LAST_TURN + 2) for h in product(range(ACTIONS), repeat=n)]
        return [h for h in ends if 0 not in h[:-1] and (h[-1] == 0 or len(h) == LAST_TURN + 1)]

    def probability(self, episode: History) -> float:
        return float(np.prod([self.policy[HISTORIES.index(episode[:k]), a] for k, a in enumerate(episode)]))

    def rewards(self, episode: History) -> list[float]:
        return [self.gains[episode[: k + 1]] for k in range(len(episode))]

    def score(self, episode: History, turn: int) -> np.ndarray:
        """Gradient of the log-probability of a turn, [histories, actions]."""
        found = np.zeros_like(self.theta)
        row = HISTORIES.index(episode[:turn])
        found[row] = -self.policy[row]
        found[row, episode[turn]] += 1.0
        return found

    @property
    def mean_value(self) -> float:
        return sum(self.probability(e) * sum(self.rewards(e)) for e in self.episodes)

    def gradient(self, step: float = 1e-5) -> np.ndarray:
        """Of ``mean_value``, by central differences: no score function, no returns."""
        found = np.zeros_like(self.theta)
        for i in np.ndindex(*self.theta.shape):
            values = []
            for sign in (1.0, -1.0):
                theta = self.theta.copy()
                theta[i] += sign * step
                values.append(self.at(theta).mean_value)
            found[i] = (values[0] - values[1]) / (2 * step)
        return found

    def gradient_of_returns(self, turn_gamma: float) -> np.ndarray:
        """Mean of ``G_t x score of turn t`` summed over turns, without any baseline."""
        found = np.zeros_like(self.theta)
        for episode in self.episodes:
            rewards = self.rewards(episode)
            for turn in range(len(episode)):
                later = sum(r * turn_gamma**k for k, r in enumerate(rewards[turn:]))
                found += self.probability(episode) * later * self.score(episode, turn)
        return found

    @cached_property
    def groups(self) -> list[tuple[History, ...]]:
        return list(product(self.episodes, repeat=MEMBERS))

    def moments(self, estimate: Callable[[Game], Sequence[Sequence[np.ndarray]]]) -> tuple[np.ndarray, float]:
        """Exact mean and total variance of a group's estimate of the gradient. ``estimate``: an advantage for each turn
        of each member of each of ``groups``."""
        credits = estimate(self)
        scores = {e: np.stack([self.score(e, turn).ravel() for turn in range(len(e))]) for e in self.episodes}
        found_G = np.zeros((len(self.groups), self.theta.size))
        for found, members, credit in zip(found_G, self.groups, credits, strict=True):
            for episode, own in zip(members, credit, strict=True):
                found += np.asarray(own, np.float64) @ scores[episode] / MEMBERS
        probability = {e: self.probability(e) for e in self.episodes}
        weight_G = np.array([np.prod([probability[e] for e in members]) for members in self.groups])
        mean = (weight_G @ found_G).reshape(self.theta.shape)
        square = float(weight_G @ (found_G**2).sum(axis=1))
        return mean, square - float((mean**2).sum())


def in_groups(flat: Sequence[np.ndarray]) -> list[Sequence[np.ndarray]]:
    return [flat[i : i + MEMBERS] for i in range(0, len(flat), MEMBERS)]


def off_direction(found: np.ndarray, wanted: np.ndarray) -> float:
    """How far ``found`` is from any multiple of ``wanted``, as a share of its own length."""
    along = float((found * wanted).sum() / (wanted**2).sum())
    return float(np.linalg.norm(found - along * wanted) / np.linalg.norm(found))
