"""The stage *sample*: how many prompts to ask next. ``algorithm.filter_groups.sample``, or a class of your own.

`Wave` is the papers': a round asks ``data.gen_batch_size`` prompts, or as large a share of them as groups are missing.
`YieldAware` asks what is missing over the estimated yield, and is *streaming*: a group is judged as soon as it is
scored, and one that teaches nothing is replaced at once instead of in the next round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mdapo.config.schema import Config
from mdapo.rollout.yields import Yield

# In mode sync: the probability that what is under way is enough, as a step begins and as it ends. What is asked later
# loses no time while conversations still wait for the engine, so a step begins with little and asks more as it learns
# its yield; at its end one group too few costs a whole conversation with the engine idle, one too many almost nothing.
SURE_AT_FIRST, SURE_AT_LAST = 0.1, 0.8
# In modes that run ahead: not to accept more than can be trained before it is too old. The upper bound of the yield.
SURE_NOT_TOO_MANY = 0.9


@dataclass(frozen=True)
class Need:
    """``missing`` groups that teach, more than the batch has; ``under_way``: begun and not judged. ``ahead``: surplus
    would wait, and be too old in the end, where without it too few would be waited for."""

    missing: int
    under_way: int
    estimate: Yield
    ahead: bool = False


class Sample(Protocol):
    """A plug-in is made with the whole ``config``. ``streams``: it is asked again after every judged group."""

    streams: bool = False

    def ask(self, need: Need) -> int:
        """Prompts to begin now. At least one must be begun when groups are missing and none is under way."""
        ...

    def state(self) -> dict[str, Any]:
        """Plain JSON data, part of every checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        return None


class Wave(Sample):
    """``gen_batch_size`` prompts, scaled down to what is missing (default: ``train_prompt_bsz``). In mode async each
    group under way counts as one that teaches, so that none is ever begun in vain."""

    def __init__(self, *, config: Config) -> None:
        self.batch = config.data.train_prompt_bsz
        self.wave = config.data.gen_batch_size or self.batch

    def ask(self, need: Need) -> int:
        if need.ahead:
            return max(need.missing - need.under_way, 0)
        return min(self.wave, -(-need.missing * self.wave // self.batch))


class YieldAware(Sample):
    """What is missing over the yield, by quantiles of the beta-binomial posterior (`Yield`)."""

    streams = True

    def __init__(self, *, config: Config) -> None:
        self.wave = Wave(config=config)

    def ask(self, need: Need) -> int:
        if need.missing <= 0:
            return 0
        if not need.estimate.known:
            return max(self.wave.ask(need) - (0 if need.ahead else need.under_way), 0)
        if need.ahead:
            return max(need.estimate.at_most(need.missing, sure=SURE_NOT_TOO_MANY) - need.under_way, 0)
        sure = SURE_AT_LAST - (SURE_AT_LAST - SURE_AT_FIRST) * min(need.missing / self.wave.batch, 1.0)
        return max(need.estimate.enough(need.missing, sure=sure) - need.under_way, 0)


BUILTIN: Mapping[str, str] = {"wave": "mdapo.rollout.sample:Wave", "yield": "mdapo.rollout.sample:YieldAware"}
