"""A whole run on one rank: build, resume, evaluate, train, save, evaluate, export."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mdapo.errors import NothingLearnableError, UserError
from mdapo.trainer.finish import finish
from mdapo.trainer.flow import Trainer
from mdapo.trainer.record import first_step_health
from mdapo.trainer.report import startup_report
from mdapo.trainer.signals import Interrupted
from mdapo.trainer.step import step

if TYPE_CHECKING:
    from mdapo.config.load import Loaded


def run(loaded: Loaded) -> int:
    """Train to ``run.total_steps`` or the end of the data, from where the run folder stands; returns the exit code.

    A commit point is written every ``run.save_every`` steps, at the end, and when the run is stopped, by a signal or
    by what people can mend. Steps are whole: one that was stopped in mid-collection begins again.
    """
    config = loaded.config.run
    with Trainer(loaded) as trainer:
        trainer.say(startup_report(trainer))
        trainer.resume()
        trainer.sync()
        trainer.raise_if_lost()
        try:
            if config.eval_before and trainer.state.step == 0 and not trainer.state.before:
                trainer.state.before = trainer.evaluate()
            while not trainer.at_end or trainer.state.waiting is not None:
                advance(trainer)
                trainer.raise_if_stopped()
                if due(trainer, config.save_every):
                    trainer.save()
            return finish(trainer)
        except (Interrupted, NothingLearnableError, UserError):
            trainer.save()
            raise


def advance(trainer: Trainer) -> None:
    """One step and, where it is due, an evaluation. A step whose evaluation was interrupted is not trained again."""
    state = trainer.state
    if state.waiting is None:
        record = step(trainer)
        trainer.keep(record)
        state.waiting = record.metrics
    metrics = dict(state.waiting)
    if due(trainer, trainer.config.run.eval_every):
        trainer.raise_if_lost()
        metrics |= trainer.evaluate()
    state.waiting = None
    trainer.note(metrics)
    if trainer.first_step:
        trainer.say(first_step_health(metrics))
        trainer.first_step = False


def due(trainer: Trainer, every: int) -> bool:
    """Whether something that is done every so many steps is due now; the end does its own."""
    return every > 0 and trainer.state.step % every == 0 and not trainer.at_end
