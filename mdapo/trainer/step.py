"""One training step, top to bottom. Every rank runs it; rank 0 also coordinates the rollout (it alone holds groups)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mdapo.trainer.record import StepRecord, make_record
from mdapo.types import NO_SAMPLES

if TYPE_CHECKING:
    from mdapo.trainer.flow import Trainer


def step(t: Trainer) -> StepRecord:
    """Collect groups, give credit, pack and scatter, train, bring the engine the new weights.

    A step that has nothing to train on (``on_limit: skip``, the data has ended, ``debug.mode: rollout``) makes no
    update and keeps the weights' version. Raises ``NothingLearnableError`` (``on_limit: stop``), ``NonFiniteError``,
    and ``Interrupted`` for a signal during the collection; nothing was trained then.
    """
    with t.timers("collect"):
        collected = t.collect()
    with t.timers("batch"):
        samples, credit = t.credited(collected) if collected is not None else (NO_SAMPLES, {})
        mini_batches = t.scatter(samples if t.trains else NO_SAMPLES)
    if mini_batches:
        t.make_room()
    mini_batches = t.with_logps(mini_batches)
    with t.timers("train"):
        updates = [t.actor.update(mini, t.loss_fn) for mini in mini_batches * t.config.actor.ppo_epochs]
    t.check_finite(updates, collected)
    if updates:
        with t.timers("sync"):
            t.state.version += 1
            t.sync()
    t.state.step += 1
    return make_record(t, collected, credit, updates)
