"""One rank: ``python -m mdapo.trainer CONFIG [key=value ...]``, as torchrun starts it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

from mdapo.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, NonFiniteError, NothingLearnableError, StorageError, UserError
from mdapo.trainer.launch import die_with_parent, write_outcome
from mdapo.trainer.signals import Interrupted


def main(arguments: Sequence[str]) -> int:
    """Run one rank; exit codes as in the README. What people can mend is said in one message, without a traceback."""
    die_with_parent()
    from mdapo.config.load import load

    try:
        from mdapo.trainer.run import run

        return finish(run(load(arguments[0], arguments[1:])), "")
    except (UserError, NonFiniteError, NothingLearnableError, StorageError) as error:
        return finish(error.exit_code, f"mdapo: {error}")
    except Interrupted as error:
        return finish(EXIT_INTERRUPTED, f"mdapo: {error}")
    except Exception:
        return finish(EXIT_INTERNAL, traceback.format_exc() + "mdapo: internal error, please report it with the lines above")


def finish(code: int, message: str) -> int:
    if not write_outcome(code, message) and message:
        print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
