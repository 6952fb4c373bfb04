"""How many groups are under way when conversations outlive a step, and which a step must wait for.

A group begun with weight version v can be trained up to version v + eta (``rollout.max_staleness``), and a step takes a
batch, which is what becomes of a wave of prompts (``data.gen_batch_size``) once the filter has seen them. So that none
becomes too old,

* no more groups are ever begun than make eta + 1 batches, with those accepted and not trained yet (the rule of AReaL,
  arXiv 2505.24298, eq. 3, for groups of which a filter takes a share); and
* a step of version V ends only when, of the groups begun with version V - eta + j or before, at most j waves are not
  complete: those that must be trained now are waited for, and of the next ones no more are left than later steps can
  take.

A group is then dropped for its age only when a step trained less than a batch, or when more groups were accepted than a
wave promises. Long conversations have no disadvantage: what was begun is completed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mdapo.config.schema import Config


@dataclass(frozen=True)
class Pacing:
    """``batch``: groups of a step; ``wave``: prompts that make one, by the user's word; ``over_sampling``: groups under
    way for each one that a round needs."""

    batch: int
    wave: int
    over_sampling: float
    max_staleness: int

    @classmethod
    def of(cls, config: Config) -> Pacing:
        batch = config.data.train_prompt_bsz
        wave = max(config.data.gen_batch_size or batch, batch)
        return cls(batch, wave, config.rollout.over_sampling, config.rollout.max_staleness)

    def room(self, *, accepted: int, under_way: int) -> int:
        """Groups that may still be begun, beside those accepted and not trained, and those not judged yet."""
        missing = (self.max_staleness + 1) * self.batch - accepted
        return max(missing * self.wave // self.batch - under_way, 0)

    def to_begin(self, wanted: int, *, accepted: int, under_way: int) -> int:
        """Groups that a partial round begins to complete ``wanted``."""
        more = max(math.ceil(wanted * self.over_sampling) - under_way, 0)
        return min(more, self.room(accepted=accepted, under_way=under_way))

    def enough(self, wanted: int, under_way: int) -> int:
        """Groups to be complete when a partial round ends: in proportion, where there is no room for more."""
        return min(wanted, max(math.floor(under_way / self.over_sampling), 1))

    def must_wait(self, unended: Iterable[tuple[int, int]], version: int, *, wave: int | None = None) -> bool:
        """``unended``: (v, groups begun with version v or before that are not complete), ascending. ``wave``: groups
        that make a batch, where that is known better."""
        oldest = version - self.max_staleness
        return any(count > (begun - oldest) * (wave or self.wave) for begun, count in unended)
