"""Errors for people: what is wrong with their input, all of it at once, without a traceback."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Sequence

# Exit codes of every command; the README says what to do on each.
EXIT_USER, EXIT_NON_FINITE, EXIT_NOTHING_LEARNABLE, EXIT_INTERNAL, EXIT_STORAGE, EXIT_INTERRUPTED = 2, 3, 4, 70, 74, 75
# What is the storage's fault; all else (no permission, no such folder) is that of the path that was given.
_STORAGE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})


class UserError(ValueError):
    """The user's configuration, data, model folder or checkpoint is not usable; each problem is one line."""

    exit_code = EXIT_USER

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class NonFiniteError(RuntimeError):
    """Three steps in a row had a non-finite loss or gradient; nothing non-finite was saved."""

    exit_code = EXIT_NON_FINITE


class NothingLearnableError(RuntimeError):
    """The dynamic batch found no group that teaches within its round limit, and ``on_limit`` is ``stop``."""

    exit_code = EXIT_NOTHING_LEARNABLE


class StorageError(RuntimeError):
    """Something could not be written (disk full, quota, read-only); the last complete checkpoint is as it was."""

    exit_code = EXIT_STORAGE


def is_storage(error: OSError) -> bool:
    """Whether it tells that the storage failed: full, over quota, read-only, broken."""
    return error.errno in _STORAGE


def cannot_use(what: str, error: OSError) -> UserError | StorageError:
    """The error for people where ``what`` could not be made or written."""
    text = f"{what}: {error.strerror or error}"
    return StorageError(text) if is_storage(error) else UserError(text)


def shortened(text: str, *, limit: int = 200) -> str:
    """``text``, cut to ``limit`` characters: what others raise may be pages, once for every conversation."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def accept_any_text() -> None:
    """What the locale cannot show is written as an escape, on stdout as on stderr: no run ends on a letter."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
