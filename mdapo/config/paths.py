"""What is wrong with a path that a person gave, in words: nothing here raises, and nothing waits for a pipe."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

MAX_KEY = 4096  # bytes of a file with an API key


def why_no_file(path: str | Path) -> str:
    """Why this is no regular file that can be read; empty when it is one."""
    mode, why = _mode(path, missing="no such file")
    if why:
        return why
    if stat.S_ISDIR(mode):
        return "cannot be read: is a folder"
    if not stat.S_ISREG(mode):
        return "cannot be read: not a regular file (a pipe or device?)"
    return "" if os.access(path, os.R_OK) else "cannot be read: permission denied"


def key_in(path: str | Path) -> tuple[str, str]:
    """The API key that a file holds, and why it cannot be used; one of them is empty."""
    if why := why_no_file(path):
        return "", why
    try:
        with Path(path).open("rb") as file:
            mode, said = os.fstat(file.fileno()).st_mode, file.read(MAX_KEY + 1)
    except OSError as error:
        return "", f"cannot be read: {(error.strerror or str(error)).lower()}"
    if mode & 0o077:
        return "", f"others may read it; chmod 600 {path}"
    key = said.strip()
    if not key:
        return "", "is empty"
    if len(said) > MAX_KEY or not all(0x20 < byte < 0x7F for byte in key):
        return "", "is not a key: printable ASCII without spaces, on one line"
    return key.decode("ascii"), ""


def why_no_folder(path: str | Path) -> str:
    """Why this is no folder that can be read; empty when it is one."""
    mode, why = _mode(path, missing="no such folder")
    if why or not stat.S_ISDIR(mode):
        return why or "no such folder"
    return "" if os.access(path, os.R_OK | os.X_OK) else "cannot be read: permission denied"


def odd_files(folder: Path) -> list[str]:
    """Names in a folder that are neither files nor folders: whoever opens a pipe waits for its other end."""
    modes = {entry.name: _mode(entry, missing="")[0] for entry in sorted(folder.iterdir())}
    return [name for name, mode in modes.items() if mode and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)]


def _mode(path: str | Path, *, missing: str) -> tuple[int, str]:
    try:
        return os.stat(path).st_mode, ""
    except (FileNotFoundError, NotADirectoryError):
        return 0, missing
    except OSError as error:  # a loop of links, a name too long, a folder that is closed to us
        return 0, f"cannot be read: {(error.strerror or str(error)).lower()}"
    except UnicodeEncodeError:
        return 0, f"cannot be read: its name cannot be written in this locale ({sys.getfilesystemencoding()})"
    except ValueError:
        return 0, "cannot be read: its name holds a NUL character"
