"""A whole run on one rank: build, resume, evaluate, train, save, evaluate, export."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mdapo.trainer.finish import finish
from mdapo.trainer.flow import Trainer
from mdapo.trainer.record import first_step_health
from mdapo.trainer.signals import Interrupted
from mdapo.trainer.step import step

if TYPE_CHECKING:
    from mdapo.config.load import Loaded


def run(loaded: Loaded) -> int:
    """Train to ``run.total_steps`` or the end of the data, from where the run folder stands; returns the exit code.

    A commit point is written every ``run.save_every`` steps, on a signal, and always at the end.
    """
    started, config = time.monotonic(), loaded.config.run
    with Trainer(loaded) as trainer:
        resumed = trainer.resume()
        trainer.sync()
        if config.eval_before and not resumed:
            trainer.state.before = trainer.evaluate()
        first = True
        while trainer.state.step < config.total_steps and not trainer.state.exhausted:
            try:
                record = step(trainer)
            except Interrupted:
                trainer.save()
                raise
            if due(trainer, config.eval_every):
                record.metrics |= trainer.evaluate()
            trainer.note(record)
            if first:
                trainer.say(first_step_health(record))
                first = False
            if trainer.stop_requested():
                trainer.save()
                raise Interrupted("stopped on a signal; the same command resumes")
            if due(trainer, config.save_every):
                trainer.save()
        return finish(trainer, seconds=time.monotonic() - started)


def due(trainer: Trainer, every: int) -> bool:
    """Whether something that is done every so many steps is due now; the end does its own."""
    return every > 0 and trainer.state.step % every == 0 and trainer.state.step < trainer.config.run.total_steps
