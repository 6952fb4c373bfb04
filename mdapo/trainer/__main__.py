"""One rank: ``python -m mdapo.trainer [--eval] CONFIG [key=value ...]``, as torchrun starts it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from mdapo.errors import (
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_STORAGE,
    NonFiniteError,
    NothingLearnableError,
    StorageError,
    UserError,
    accept_any_text,
    is_storage,
)
from mdapo.trainer.launch import EVAL_FLAG, die_with_parent, write_outcome
from mdapo.trainer.quiet import silence_known_warnings
from mdapo.trainer.signals import RESUMES, Interrupted, exit_on_signal

# How gloo says that the other side of a connection is not there any more.
PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def main(arguments: Sequence[str]) -> int:
    """Run one rank; exit codes as in the README. What people can mend is said in one message, without a traceback."""
    # Not the cause of anything: torchrun, too, tells the ranks to leave when one of them has failed.
    exit_on_signal(lambda: finish(EXIT_INTERRUPTED, f"mdapo: {RESUMES}", lost_peer=True))
    die_with_parent()
    accept_any_text()
    silence_known_warnings()
    only_evaluate = arguments[0] == EVAL_FLAG
    config, *overrides = arguments[1:] if only_evaluate else arguments
    try:
        from mdapo.config.load import load
        from mdapo.config.placement import actor_environment

        loaded = load(config, overrides)
        os.environ.update(actor_environment(loaded.config))  # before anything asks for the device
        if only_evaluate:
            from mdapo.trainer.evaluate import evaluate as work
        else:
            from mdapo.trainer.run import run as work
        return finish(work(loaded), "")
    except (UserError, NonFiniteError, NothingLearnableError, StorageError) as error:
        return finish(error.exit_code, f"mdapo: {error}")
    except Interrupted as error:
        return finish(EXIT_INTERRUPTED, f"mdapo: {error}")
    except BaseException as error:  # torch's CheckpointException is no Exception; nor is an exit that nobody asked for
        if any(text in str(error) for text in PEER_IS_GONE):
            return finish(EXIT_INTERRUPTED, f"mdapo: another rank has gone: {error}", lost_peer=True)
        if isinstance(error, OSError) and is_storage(error):
            return finish(EXIT_STORAGE, f"mdapo: the storage failed, the last checkpoint is as it was: {error}")
        report = f"{traceback.format_exc()}mdapo: internal error, please report it with the lines above"
        return finish(EXIT_INTERNAL, report)


def finish(code: int, message: str, *, lost_peer: bool = False) -> int:
    if not write_outcome(code, message, lost_peer=lost_peer) and message:
        print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
