"""From one value an episode to one advantage an episode, and from there to its tokens. Pure numpy, fp64 inside.

Discount convention (`spread`): a step is a *model token*. Observations (user turns, tool output) neither receive
credit nor cost a discount step, so that an environment that talks a lot does not change what the policy's earlier
turns are worth.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Estimator = Literal["group_norm", "group_mean", "rloo", "reinforce++"]
EPS = 1e-6
TOLERANCE = 1e-6


def has_spread(values: np.ndarray, *, tolerance: float = TOLERANCE) -> bool:
    """Whether the values differ by more than ``tolerance`` times the largest magnitude among them.

    Compares max and min, never a standard deviation: three times 0.1 has a standard deviation of 1.4e-17.
    """
    return bool(values.max() - values.min() > tolerance * np.abs(values).max())


def advantages(
    values_N: np.ndarray,
    group_N: np.ndarray,
    *,
    estimator: Estimator,
    valid_N: np.ndarray | None = None,
    tokens_N: np.ndarray | None = None,
    tolerance: float = TOLERANCE,
    eps: float = EPS,
) -> np.ndarray:
    """Advantage of each episode, float32 [N].

    ``values_N`` rewards, ``group_N`` an integer naming each episode's group (any sizes, any order), ``valid_N`` bool:
    episodes that are False, or whose value is not finite, enter no statistic and get exactly 0.

    With ``n`` valid episodes in the group, their mean ``m`` and their standard deviation ``s`` (divisor ``n - 1``):

    * ``group_norm``   ``(r - m) / (s + eps)``        GRPO (arXiv 2402.03300, section 4.1.2), DAPO (2503.14476, eq. 9)
    * ``group_mean``   ``r - m``                      Dr. GRPO (2503.20783)
    * ``rloo``         ``r - mean of the others``     RLOO (2402.14740); equals ``n / (n - 1) * (r - m)``
    * ``reinforce++``  ``(r - M) / (S + eps)``        REINFORCE++ (2501.03262): ``M``, ``S`` over the *whole batch*,
      every token counting once (``tokens_N``, the model tokens of each episode; None: every episode counts once)

    A group (for ``reinforce++``: the batch) without spread, or with one valid episode, gets exactly 0.
    """
    values = np.asarray(values_N, np.float64)
    usable = np.isfinite(values) if valid_N is None else np.isfinite(values) & np.asarray(valid_N, bool)
    result = np.zeros(len(values), np.float64)
    if estimator == "reinforce++":
        weights = np.ones(len(values)) if tokens_N is None else np.asarray(tokens_N, np.float64)
        result[usable] = _batch_norm(values[usable], weights[usable], tolerance=tolerance, eps=eps)
        return result.astype(np.float32)
    for members in _members(np.asarray(group_N), usable):
        rewards = values[members]
        if len(rewards) < 2 or not has_spread(rewards, tolerance=tolerance):
            continue
        centred = rewards - rewards.mean()
        if estimator == "group_norm":
            centred /= rewards.std(ddof=1) + eps
        elif estimator == "rloo":
            centred *= len(rewards) / (len(rewards) - 1)
        else:
            assert estimator == "group_mean", estimator
        result[members] = centred
    return result.astype(np.float32)


def spread(advantage_N: np.ndarray, mask_P: np.ndarray, lengths_N: np.ndarray, *, gamma: float = 1.0) -> np.ndarray:
    """Each episode's advantage on its tokens, float32 [P]: ``advantage * gamma ** (model tokens that follow)``, 0 off
    the mask. Episode i is the next ``lengths_N[i]`` of the P tokens.

    The episode's reward arrives with its last model token. Discounting counts model tokens only (see the module); with
    mask 1, 0, 1, an advantage of 1 and gamma 0.5 the first token gets 0.5. Peers differ: some discount over masked
    tokens.
    """
    mask = np.asarray(mask_P, bool)
    advantage_P = np.repeat(np.asarray(advantage_N, np.float64), lengths_N)
    if gamma != 1.0:
        upto_P1 = np.append(0, mask.cumsum())
        following_P = np.repeat(upto_P1[np.cumsum(lengths_N)], lengths_N) - upto_P1[1:]
        advantage_P *= np.power(float(gamma), following_P)
    return np.where(mask, advantage_P, 0.0).astype(np.float32)


def _members(group_N: np.ndarray, usable_N: np.ndarray) -> list[np.ndarray]:
    """Indices of the usable episodes of each group."""
    indices = np.flatnonzero(usable_N)
    order = indices[np.argsort(group_N[indices], kind="stable")]
    cuts = np.flatnonzero(np.diff(group_N[order])) + 1
    return [part for part in np.split(order, cuts) if len(part)]


def _batch_norm(values: np.ndarray, weights: np.ndarray, *, tolerance: float, eps: float) -> np.ndarray:
    if len(values) < 2 or weights.sum() <= 0 or not has_spread(values, tolerance=tolerance):
        return np.zeros_like(values)
    mean = np.average(values, weights=weights)
    std = np.sqrt(np.average((values - mean) ** 2, weights=weights))
    return (values - mean) / (std + eps)
