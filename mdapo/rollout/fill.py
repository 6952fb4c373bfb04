"""The stage *fill*: which of the accepted groups to train now. ``algorithm.filter_groups.fill``, or your own class.

Only `Arrival` takes what comes as it comes. The others choose, so that what is trained has other lengths than what was
accepted; by how much is in ``metrics.jsonl`` (`bias`). Groups that the next step could not train are taken first,
whatever the stage says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from mdapo.config.schema import Config
from mdapo.types import Group


class Fill(Protocol):
    """A plug-in is made with the whole ``config``."""

    def choose(self, groups: Sequence[Group], count: int) -> Sequence[int]:
        """``count`` different indices into ``groups`` (at least as many), which are the oldest first."""
        ...


class Arrival(Fill):
    """The oldest first: no group's length has a say."""

    def __init__(self, *, config: Config) -> None: ...

    def choose(self, groups: Sequence[Group], count: int) -> Sequence[int]:
        return range(count)


class LongDialogsFirst(Fill):
    """Those with the most turns first, equal ones by their tokens, then by age."""

    def __init__(self, *, config: Config) -> None: ...

    def choose(self, groups: Sequence[Group], count: int) -> Sequence[int]:
        return sorted(range(len(groups)), key=lambda i: (-mean_turns(groups[i]), -mean_tokens(groups[i]), i))[:count]


class Balanced(Fill):
    """Evenly spaced over the groups in the order of their turns: few and many turns in the shares that were accepted
    (systematic sampling)."""

    def __init__(self, *, config: Config) -> None: ...

    def choose(self, groups: Sequence[Group], count: int) -> Sequence[int]:
        by_turns = sorted(range(len(groups)), key=lambda i: (mean_turns(groups[i]), i))
        places = (len(groups) * (place + 0.5) / count - 0.5 for place in range(count))  # the middle of each share
        return [by_turns[round(middle + (0.1 if i % 2 else -0.1) / count)] for i, middle in enumerate(places)]


def mean_turns(group: Group) -> float:
    return float(np.mean([episode.num_agent_turns for episode in group.episodes]))


def mean_tokens(group: Group) -> float:
    return float(np.mean([episode.num_model_tokens for episode in group.episodes]))


def bias(trained: Sequence[Group], accepted: Sequence[Group]) -> dict[str, float]:
    """``rollout/fill/...``: mean turns and tokens of what is trained and of all that was there to choose from."""
    found: dict[str, float] = {}
    for name, groups in (("trained", trained), ("accepted", accepted)):
        if groups:
            found[f"rollout/fill/turns_{name}"] = float(np.mean([mean_turns(g) for g in groups]))
            found[f"rollout/fill/tokens_{name}"] = float(np.mean([mean_tokens(g) for g in groups]))
    return found


BUILTIN: Mapping[str, str] = {
    "arrival": "mdapo.rollout.fill:Arrival",
    "long_dialogs_first": "mdapo.rollout.fill:LongDialogsFirst",
    "balanced": "mdapo.rollout.fill:Balanced",
}
