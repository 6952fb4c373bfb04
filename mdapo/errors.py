"""Errors for people: what is wrong with their input, all of it at once, without a traceback."""

from __future__ import annotations

from collections.abc import Sequence

# Exit codes of every command; the README says what to do on each.
EXIT_USER, EXIT_NON_FINITE, EXIT_NOTHING_LEARNABLE, EXIT_INTERNAL, EXIT_STORAGE, EXIT_INTERRUPTED = 2, 3, 4, 70, 74, 75


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
    """A checkpoint could not be written (disk full, quota, read-only); the last complete one is as it was."""

    exit_code = EXIT_STORAGE
