"""Credit by turn (``algorithm.advantage.credit: turn``): a turn of the policy is worth what was gained from it on,
against what others of its group gained from theirs. Pure numpy, fp64 inside.

**Return.** ``before[i][t]`` is the value of episode i as it stood before its turn t. Turn t gained ``r_t``, which is
``before[i][t + 1] - before[i][t]``, of the last turn ``values[i] - before[i][t]``: a potential-based reward (Ng, Harada
and Russell, 1999). Its return is ``G_t = r_t + g r_(t+1) + g^2 r_(t+2) + ...`` with ``g = turn_gamma``; at 1 it is
``values[i] - before[i][t]``. A discount step is a turn, however long it and what the user says are.

**Baseline.** Episodes end at different turns, by the policy's own doing, so turn t is compared among those that got
there: a selection, and an innocent one. What is needed is that a baseline does not depend on what turn t *says*, given
what was said before it: then its product with the gradient of ``log pi`` has mean 0. Whether episode i has a turn t was
settled before turn t; whether others have one, and what they gained, has nothing to do with episode i (one prompt, one
seed of the environment, sampled apart). So the mean of the *others'* ``G_t`` is such a baseline, whatever their number:

    A_t = G_t - mean of G_t over the group's other episodes that have a turn t                            (`rloo`)

and the sum over turns of ``A_t x gradient of log pi(turn t)`` has the policy gradient as its mean, exactly. A turn that
none of the others has is compared with their last turns, another number that its words have no part in. (Left without
credit it would be missing from the mean; with the others' last turns, an outcome at the end alone gives the baseline
that `rloo` has for whole episodes.)

**What would be biased**, and is not done (each is in the tests, against gradients that were enumerated):

* the mean over all that have a turn t, the turn's own episode among them: that is ``(m - 1) / m`` times the above, with
  m another number at each turn, so that late turns count for less. ``group_mean`` takes this factor off and puts that
  of the whole group on, ``(n - 1) / n``, the same for all turns and for episodes, as a learning rate is;
* one mean, or one standard deviation, over all turns of the group (the process supervision of GRPO, arXiv 2402.03300,
  section 4.1.3): an episode's later turns are in it, their number too, and both depend on what the turn said;
* rewards made relative turn by turn and added up afterwards: how many baselines are added depends on when the episode
  ends, which is a bonus, or a fine, for going on;
* no credit for a turn without peers.

Missing turns counted as gains of 0 would be unbiased too: a baseline drawn to 0, which is good where gains lie about 0
and bad where they do not.

**Standard deviation.** ``group_norm`` divides by that of the turns compared, itself a function of what they said, as
GRPO does with episodes (that bias is Dr. GRPO's subject, arXiv 2503.20783), and gives 0 to a turn without peers, which
has none: its mean lies near the gradient's direction, not in it. MT-GRPO (2505.11821) is close to it, with one reward a
turn in the place of returns; GiGPO (2505.10978) compares equal states, not equal turns.

None of this undoes what chooses groups or episodes by their outcome: dynamic sampling, ``algorithm.mask_truncated``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mdapo.algorithms.advantages import TOLERANCE, Estimator, advantages


def turn_advantages(
    values_N: np.ndarray,
    before: Sequence[Sequence[float]],
    group_N: np.ndarray,
    *,
    estimator: Estimator,
    turn_gamma: float = 1.0,
    valid_N: np.ndarray | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
) -> list[np.ndarray]:
    """Advantage of each turn of the policy of each episode, float32 [turns] x N; see the module.

    ``values_N``, ``group_N`` and ``valid_N`` as `advantages` has them. With m valid episodes of the group that have a
    turn t, and n in the group:

    * ``group_norm``  ``(G - mean of the m) / (std of the m + eps)``, divisor m - 1; 0 where m is 1
    * ``rloo``        ``G - mean of the other m - 1``; where m is 1, of the others' last turns
    * ``group_mean``  ``(n - 1) / n`` times that of ``rloo``
    * ``reinforce++`` knows neither groups nor turns: its baseline is the mean over the whole batch (arXiv 2501.03262,
      global batch normalisation), here over all turns of all valid episodes, first or last, every token counting once
      (``tokens[i][t]``, the model tokens of the turn; None: every turn counts once).

    Turns that are compared and have no spread get exactly 0, and so does an episode that is alone in its group.
    """
    sizes = np.array([len(turns) for turns in before], np.int64)
    values = np.asarray(values_N, np.float64)
    usable_N = np.isfinite(values) if valid_N is None else np.isfinite(values) & np.asarray(valid_N, bool)
    episode_M = np.repeat(np.arange(len(sizes)), sizes)
    turn_M = np.arange(len(episode_M)) - np.repeat(sizes.cumsum() - sizes, sizes)
    returns_M = turn_returns(values, before, turn_gamma=turn_gamma)
    group_N = np.unique(np.asarray(group_N), return_inverse=True)[1].reshape(-1)
    _, peers_M = np.unique(np.stack([group_N[episode_M], turn_M]), axis=1, return_inverse=True)
    peers_M, valid_M = peers_M.reshape(-1), usable_N[episode_M]
    tokens_M = None if tokens is None else np.array([n for turns in tokens for n in turns], np.int64)
    found_M = advantages(returns_M, peers_M, estimator=estimator, valid_N=valid_M, tokens_N=tokens_M)
    if estimator in ("rloo", "group_mean"):
        exact_M = found_M.astype(np.float64)
        talks_N = usable_N & (sizes > 0)
        n_M, m_M = _count(group_N, talks_N)[episode_M], _count(peers_M, valid_M)
        alone_M = valid_M & (m_M == 1) & (n_M > 1)
        exact_M[alone_M] = _against_last_turns(returns_M, alone_M, sizes, np.where(talks_N, group_N, -1))
        if estimator == "group_mean":
            exact_M[alone_M] *= (n_M[alone_M] - 1) / n_M[alone_M]
            compared = m_M > 1
            m, n = m_M[compared], n_M[compared]
            exact_M[compared] *= (n - 1) * m / (n * (m - 1))
        found_M = exact_M.astype(np.float32)
    return np.split(found_M, sizes.cumsum()[:-1])


def turn_returns(values_N: np.ndarray, before: Sequence[Sequence[float]], *, turn_gamma: float = 1.0) -> np.ndarray:
    """The return of each turn, float64 [M]: the turns of episode 0, then those of episode 1, ..."""
    assert 0.0 <= turn_gamma <= 1.0, turn_gamma
    sizes = [len(turns) for turns in before]
    episode_M = np.repeat(np.arange(len(sizes)), sizes)
    before_M = np.array([v for turns in before for v in turns], np.float64)
    values_M = np.asarray(values_N, np.float64)[episode_M]
    if turn_gamma == 1.0:
        return values_M - before_M
    last_M = np.append(episode_M[1:] != episode_M[:-1], True)[: len(episode_M)]
    returns_M = np.where(last_M, values_M, np.append(before_M[1:], 0.0)[: len(before_M)]) - before_M
    for i in np.flatnonzero(~last_M)[::-1]:
        returns_M[i] += turn_gamma * returns_M[i + 1]
    return returns_M


def _count(names: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """How many entries of the same name there are for which ``counts``, float64, for each entry."""
    return np.bincount(names, weights=counts)[names] if len(names) else np.zeros(0)


def _against_last_turns(
    returns_M: np.ndarray, alone_M: np.ndarray, sizes: np.ndarray, group_N: np.ndarray
) -> np.ndarray:
    """The advantages of the turns without peers (``alone_M``), float64, in order: their returns less the mean return of
    the last turns of the group's other episodes. ``group_N`` is -1 for episodes that do not count. Differences that
    rounding made are 0."""
    last_N = np.append(returns_M, 0.0)[sizes.cumsum() - 1]
    order = np.argsort(group_N, kind="stable")
    sorted_N = group_N[order]
    alone_N = np.bincount(np.repeat(np.arange(len(sizes)), sizes)[alone_M], minlength=len(sizes))
    baselines = []
    for i in np.flatnonzero(alone_N):
        first, end = np.searchsorted(sorted_N, [group_N[i], group_N[i] + 1])
        others = order[first:end]
        baselines.append(last_N[others[others != i]].mean())
    returns, baseline = returns_M[alone_M], np.repeat(np.array(baselines), alone_N[alone_N > 0])
    difference = returns - baseline
    return np.where(np.abs(difference) > TOLERANCE * np.maximum(np.abs(returns), np.abs(baseline)), difference, 0.0)
