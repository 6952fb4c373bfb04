"""The ``mdapo`` command. Thin: each command loads what it needs and calls one function."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from mdapo.errors import EXIT_STORAGE, StorageError, UserError, accept_any_text, is_storage

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
ConfigArg = Annotated[str, typer.Argument(metavar="CONFIG", help="a YAML file")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="dotted overrides")]


NprocOption = Annotated[
    int, typer.Option("--nproc", min=0, help="ranks on this machine; 0: what the configuration asks for")
]


@app.command()
def train(config: ConfigArg, overrides: Overrides = None, nproc: NprocOption = 0) -> None:
    """Train, or resume the run of the same name."""
    raise typer.Exit(_start(config, overrides or [], nproc=nproc, only_evaluate=False))


@app.command(name="eval")
def evaluate(config: ConfigArg, overrides: Overrides = None, nproc: NprocOption = 0) -> None:
    """Evaluate the newest checkpoint of a run, or the model itself where there is none, on ``data.val_files``."""
    raise typer.Exit(_start(config, overrides or [], nproc=nproc, only_evaluate=True))


def _start(config: str, overrides: list[str], *, nproc: int, only_evaluate: bool) -> int:
    from mdapo.config.load import load
    from mdapo.config.plan import require_plan
    from mdapo.trainer.launch import EVAL_FLAG, launch

    loaded = load(config, overrides)
    parallel = loaded.config.parallel
    ranks = nproc or parallel.tensor * parallel.pipeline * (parallel.data or 1)
    require_plan(loaded, world_size=ranks)
    return launch(config, overrides, nproc=ranks, flags=[EVAL_FLAG] if only_evaluate else [])


@app.command()
def check(
    config: ConfigArg,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(min=0, help="ranks that the run will have; 0: as configured")] = 0,
) -> None:
    """Show the resolved configuration, batch and parallel arithmetic, one rendered prompt; find every problem."""
    from mdapo.check import check as run_check

    report = run_check(config, overrides or [], world_size=ranks or None)
    typer.echo(report.text)
    raise typer.Exit(report.exit_code)


@app.command()
def doctor() -> None:
    """Show what this machine has for mdapo: versions, device, attention, ops, environment."""
    from mdapo.doctor import doctor as run_doctor

    typer.echo(run_doctor())


def main() -> None:
    """Entry point: errors of the user's input, and of the storage, in plain words."""
    accept_any_text()
    try:
        app()
    except (UserError, StorageError) as error:
        print(f"mdapo: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os._exit(0)
    except OSError as error:
        if not is_storage(error):
            raise
        print(f"mdapo: the output cannot be written: {error.strerror}", file=sys.stderr)
        os._exit(EXIT_STORAGE)  # at a plain exit Python would try to write it once more


if __name__ == "__main__":
    main()
