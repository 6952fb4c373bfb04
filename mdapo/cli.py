"""The ``mdapo`` command. Thin: each command loads what it needs and calls one function."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import mdapo
from mdapo.errors import EXIT_STORAGE, StorageError, UserError, accept_any_text, is_storage

HELP = """Post-train a dialogue language model with DAPO.

A run is one YAML file: look at it with check, train it with train, measure it with eval. Begin with
scripts/quickstart.sh, or with mdapo check configs/quickstart.yaml; configs/README.md describes every key."""
EXIT_CODES = (
    "Exit codes: 0 done; 2 something you gave cannot be used (the message says what); 3 loss not finite three times in "
    "a row; 4 no group taught anything; 70 an internal error; 74 the storage failed; 75 interrupted, the same command "
    "goes on."
)
app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=HELP, epilog=EXIT_CODES
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mdapo {mdapo.__version__}")
        raise typer.Exit


@app.callback(epilog=EXIT_CODES)
def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None: ...


ConfigArg = Annotated[
    str, typer.Argument(metavar="CONFIG", help="the run's YAML file, such as configs/quickstart.yaml")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[key=value ...]", help="changes to it, such as run.seed=1 actor.lr=1e-5")
]


NprocOption = Annotated[
    int, typer.Option("--nproc", min=0, help="processes (ranks) to start here; 0: as many as parallel.* asks for")
]


@app.command(epilog=EXIT_CODES)
def train(config: ConfigArg, overrides: Overrides = None, nproc: NprocOption = 0) -> None:
    """Train a run, or go on with it where it stopped.

    Everything is written to runs/<run.name>/: metrics, conversations, checkpoints, and the trained model in hf/.
    Stop it with Ctrl-C whenever you like; the same command resumes.

    Example: mdapo train configs/quickstart.yaml run.name=mine actor.lr=1e-5
    """
    raise typer.Exit(_start(config, overrides or [], nproc=nproc, only_evaluate=False))


@app.command(name="eval", epilog=EXIT_CODES)
def evaluate(config: ConfigArg, overrides: Overrides = None, nproc: NprocOption = 0) -> None:
    """Measure a run's newest checkpoint (or the model itself, before any training) on data.val_files.

    Prints a table and writes the numbers and conversations to runs/<run.name>/eval/; the run itself stays as it is.

    Example: mdapo eval configs/quickstart.yaml run.name=mine
    """
    raise typer.Exit(_start(config, overrides or [], nproc=nproc, only_evaluate=True))


def _start(config: str, overrides: list[str], *, nproc: int, only_evaluate: bool) -> int:
    from mdapo.trainer.signals import RESUMES, exit_on_signal

    exit_on_signal(lambda: print(f"mdapo: {RESUMES}", file=sys.stderr))  # until there are ranks to be asked
    from mdapo.config.load import load
    from mdapo.config.plan import require_plan
    from mdapo.trainer.launch import EVAL_FLAG, launch

    loaded = load(config, overrides)
    parallel = loaded.config.parallel
    ranks = nproc or parallel.tensor * parallel.pipeline * (parallel.data or 1)
    require_plan(loaded, world_size=ranks)
    return launch(config, overrides, nproc=ranks, flags=[EVAL_FLAG] if only_evaluate else [])


@app.command(epilog="Exit codes: 0 it can run; 2 there are problems, listed at the end.")
def check(
    config: ConfigArg,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(min=0, help="ranks the run will have; 0: as many as parallel.* asks for")] = 0,
) -> None:
    """Show what a run would do, and every problem it would meet, without starting it.

    Prints the whole configuration, the sizes of batches and ranks, memory, and one conversation token by token.

    Example: mdapo check configs/quickstart.yaml parallel.tensor=2
    """
    from mdapo.check import check as run_check

    report = run_check(config, overrides or [], world_size=ranks or None)
    typer.echo(report.text)
    raise typer.Exit(report.exit_code)


@app.command()
def doctor() -> None:
    """Show what this machine has for mdapo: versions, device, attention, ops, environment variables.

    Example: mdapo doctor
    """
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
