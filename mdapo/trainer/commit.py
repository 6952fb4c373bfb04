"""Folders that are either complete or not there: write aside, manifest with SHA-256 last, rename.

A commit is ``<root>/step_000006/`` with a ``manifest.json`` that lists every file's size and SHA-256. The file system
is POSIX: ``rename`` of a folder is atomic, and durable once its parent has been synced.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mdapo.errors import cannot_use

MANIFEST = "manifest.json"
FORMER = ".former-"
NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class Found:
    """The newest complete commit, and what was wrong with newer ones (one line each)."""

    path: Path | None
    problems: tuple[str, ...]


def name_of(step: int) -> str:
    return f"step_{step:06d}"


def open_commit(root: Path, step: int) -> Path:
    """An empty folder to write the commit of ``step`` into; leftovers of killed runs are removed."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in [*root.glob(".tmp-*"), *root.glob(f"{FORMER}*")]:
        _remove(leftover)
    folder = root / f".tmp-{name_of(step)}"
    folder.mkdir()
    return folder


def close_commit(folder: Path, *, keep: int) -> Path:
    """Make ``folder`` the commit: manifest, fsync, rename; then remove all but the newest ``keep``."""
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(_seal, files))
    listing = {
        str(f.relative_to(folder)): {"bytes": f.stat().st_size, "sha256": digest}
        for f, digest in zip(files, digests, strict=True)
    }
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps(listing, indent=1, allow_nan=False), encoding="utf-8")
    _sync(manifest)
    for directory in {folder, *(f.parent for f in files)}:
        _sync(directory)
    final = folder.parent / folder.name.removeprefix(".tmp-")
    former = folder.parent / f"{FORMER}{final.name}"
    if os.path.lexists(final):  # damaged, or of the same step before its evaluation
        final.rename(former)
    folder.rename(final)
    _sync(final.parent)
    shutil.rmtree(former, ignore_errors=True)
    for old in _commits(final.parent)[keep:]:
        shutil.rmtree(old)
    return final


def newest_commit(root: Path, *, needs: Sequence[str] = ()) -> Found:
    """The newest commit whose files are all there and as they were written; damaged ones are named, not used.

    ``needs``: files that a commit must have.
    """
    for former in root.glob(f"{FORMER}*"):  # a process was killed while it replaced this one
        if not (replaced := root / former.name.removeprefix(FORMER)).exists():
            former.rename(replaced)
    problems = []
    for folder in _commits(root):
        problem = verify(folder, needs=needs)
        if problem is None:
            return Found(folder, tuple(problems))
        problems.append(f"{folder}: {problem}")
    return Found(None, tuple(problems))


def verify(folder: Path, *, needs: Sequence[str] = ()) -> str | None:
    """What is wrong with a commit, or None. Nothing in it is unpickled before this says None."""
    try:
        listing = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"no readable manifest ({error})"
    if not isinstance(listing, dict) or not listing:
        return f"{MANIFEST} lists no files"
    unlisted = [name for name in needs if name not in listing]
    if unlisted:
        return f"{MANIFEST} does not list {unlisted[0]}"
    malformed = [name for name, entry in listing.items() if not isinstance(entry, dict) or "sha256" not in entry]
    if malformed:
        return f"{MANIFEST} has no SHA-256 of {malformed[0]}"
    missing = [name for name in listing if not (folder / name).is_file()]
    if missing:
        return f"{missing[0]} is missing"
    with ThreadPoolExecutor(4) as pool:
        digests = dict(zip(listing, pool.map(_digest, [folder / name for name in listing]), strict=True))
    changed = [name for name, entry in listing.items() if digests[name] != entry["sha256"]]
    return f"{changed[0]} is damaged (SHA-256 differs from the manifest)" if changed else None


def any_commit(root: Path) -> bool:
    """Whether there is one, good or damaged."""
    return bool(_commits(root)) or any(root.glob(f"{FORMER}*"))


def _remove(path: Path) -> None:
    """Also what somebody put there under a commit's name: a file, a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _commits(root: Path) -> list[Path]:
    """Newest first."""
    folders = [f for f in root.glob("step_*") if f.is_dir() and not f.is_symlink()]
    found = [(int(match[1]), f) for f in folders if (match := NAME.fullmatch(f.name))]
    return [f for _, f in sorted(found, reverse=True)]


def _seal(path: Path) -> str:
    _sync(path)
    return _digest(path)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:  # not passed over: an older commit would then replace one that may be whole
        raise cannot_use(f"{path}: cannot be read", error) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
