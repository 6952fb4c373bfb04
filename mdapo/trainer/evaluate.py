"""``mdapo eval``: a run's newest checkpoint, or the model itself where there is none, on the validation prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from mdapo.errors import UserError
from mdapo.trainer.finish import in_order
from mdapo.trainer.flow import Trainer

if TYPE_CHECKING:
    from mdapo.config.load import Loaded


def evaluate(loaded: Loaded) -> int:
    """Print a table, write ``eval/step_000006.json`` and the conversations below the run folder; returns the exit code.

    Nothing else in the run folder is touched. Raises ``UserError`` without ``data.val_files``, or when all checkpoints
    are damaged.
    """
    if not loaded.config.data.val_files:
        raise UserError("data.val_files: names no file, there is nothing to evaluate on")
    with Trainer(loaded, only_evaluate=True) as trainer:
        resumed = trainer.resume()
        if not resumed:
            trainer.say(f"no checkpoint below {loaded.config.run.dir}/{loaded.config.run.name}: the model itself")
        trainer.sync()
        trainer.raise_if_stopped()
        found = trainer.evaluate()
        if trainer.journal is not None:
            trainer.journal.console.show(table(found, step=trainer.state.step, prompts=loaded.config.data.val_files))
            trainer.journal.summarise({"step": trainer.state.step, "model": loaded.config.model.path, **found})
    return 0


def table(found: dict[str, float], *, step: int, prompts: list[str]) -> Table:
    result = Table(title=f"after step {step}, on {', '.join(prompts)}")
    result.add_column("")
    result.add_column("mean", justify="right")
    for name in in_order(found):
        result.add_row(name.removeprefix("eval/"), f"{found[name]:.3f}")
    return result
