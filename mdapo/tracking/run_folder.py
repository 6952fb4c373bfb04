"""The folder of a run: one process at a time, never overwritten; what the run was made with (config.yaml, env.json)."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from mdapo.errors import UserError, cannot_use

LOCK = ".lock"
CONFIG = "config.yaml"
ENVIRONMENT = "env.json"
EVAL = "eval"  # what `mdapo eval` writes, also before there is a run
SERVERS = "servers"  # what the servers of a run say, also before it has begun
CHECKPOINTS = "checkpoints"
FOLDERS = (CHECKPOINTS, EVAL, SERVERS, "episodes", "replay", "hf", ".hf.partial", "tensorboard")
REPLACED = ("hf", ".hf.partial")  # by renaming, which a link withstands
FILES = ("metrics.jsonl", "summary.json", ENVIRONMENT)
# A run that differs in one of these is another run: its weights or its prompt cursor would mean something else.
IDENTITY = ("run.seed", "model.path", "data.train_files", "environment.name", "debug.mode")
SECRET_ENDINGS = ("api_key", "apikey", "secret", "password", "access_token", "auth_token")


class RunFolder:
    """An open run folder; the lock is held until ``close`` or the end of the process, however it ends.

    What it holds is as it was before until ``claim``: a start that fails leaves an earlier run where it is.
    """

    def __init__(
        self,
        path: Path,
        lock: int,
        *,
        former: Mapping[str, Any] | None,
        config: Mapping[str, Any],
        fresh: bool,
        environment: Mapping[str, Any] | None,
        notify: Callable[[str], None],
    ) -> None:
        """Made by `open_run_folder`. ``former``: the configuration of the run that it holds."""
        self.path, self._lock, self._notify = path, lock, notify
        self._former, self._config, self._fresh, self._environment = former, config, fresh, environment

    @property
    def goes_on(self) -> bool:
        """Whether it holds this run, by its configuration, which is to be resumed."""
        return self._former is not None and not self._fresh and not self._others()

    def _others(self) -> list[str]:
        changed = differences(self._former or {}, self._config)
        return [line for line in changed if line.split(":")[0] in IDENTITY]

    def claim(self, *, lost: str | None = None) -> None:
        """Make it this run's: another run in it is moved aside, ``config.yaml`` and ``env.json`` are written.

        ``lost`` says why this very run, if that is what it holds, cannot go on: it is then moved aside as well.
        Raises ``UserError`` or ``StorageError`` when it cannot be written.
        """
        with usable(self.path):
            if self.goes_on and lost is not None:
                self._move_aside(lost)
            elif self.goes_on:
                changed = differences(self._former or {}, self._config)
                if changed:
                    self._notify(f"{self.path}: goes on with changed settings: " + "; ".join(changed))
            elif self._former is not None:
                self._move_aside(f"held another run ({'; '.join(self._others()) or 'run.resume: never'})")
            config = yaml.safe_dump(dict(self._config), sort_keys=False, allow_unicode=True)
            _keep_and_write(self.path / CONFIG, config)
            if self._environment is not None:
                _keep_and_write(
                    self.path / ENVIRONMENT, json.dumps(self._environment, indent=1, allow_nan=False) + "\n"
                )

    def _move_aside(self, why: str) -> None:
        aside = _free_name(self.path.parent, self.path.name, "")
        self.path.rename(aside)
        os.close(self._lock)
        self._notify(f"{self.path}: {why}; it is kept as {aside}")
        self.path.mkdir(exist_ok=True)
        self._lock = _lock(self.path)

    def close(self) -> None:
        os.close(self._lock)


def open_run_folder(
    path: Path,
    config: Mapping[str, Any],
    *,
    fresh: bool = False,
    environment: Mapping[str, Any] | None = None,
    notify: Callable[[str], None] = lambda text: None,
) -> RunFolder:
    """Make or reopen ``path`` for the run that ``config`` (resolved, nested) describes; ``claim`` then takes it.

    The same run is resumed. Another run in the folder (another seed, model, data, environment or debug.mode; any, when
    ``fresh``) is moved aside to ``path.1``, ``path.2``, … and named to ``notify``. Changed keys are named too; a
    changed ``config.yaml`` or ``env.json`` stays beside the new one as ``config.1.yaml``, ….
    Raises ``UserError`` when a process works in the folder, when it holds something else, a file where the run needs a
    folder or the other way round, or when it cannot be written; ``StorageError`` when the storage is full or read-only.
    """
    with usable(path):
        path.mkdir(parents=True, exist_ok=True)
        if not (path / CONFIG).exists() and any(_is_content(f.name) for f in path.iterdir()):
            raise UserError(f"{path}: not empty and not a run's folder (it has no {CONFIG}); choose another run.name")
        lock = _lock(path)
        try:
            former = _read(path / CONFIG)
        except BaseException:
            os.close(lock)
            raise
    config = redact(config)
    folder = RunFolder(path, lock, former=former, config=config, fresh=fresh, environment=environment, notify=notify)
    if folder.goes_on:
        try:
            _refuse_odd_entries(path, folders=FOLDERS, files=FILES)
        except UserError:
            folder.close()
            raise
    return folder


@contextmanager
def usable(path: Path) -> Generator[None]:
    """The operating system's errors as ``UserError``, or ``StorageError`` where it is the storage that fails."""
    try:
        yield
    except OSError as error:
        raise cannot_use(f"{path}: cannot be used as run folder", error) from error


def open_eval_folder(run: Path) -> Path:
    """Where ``mdapo eval`` writes, below a run's folder; found out now that it can, not after the evaluation.

    Raises ``UserError`` or ``StorageError``.
    """
    folder = run / EVAL
    _refuse_odd_entries(run, folders=(CHECKPOINTS, EVAL), files=())
    with usable(run):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    return folder


def _refuse_odd_entries(path: Path, *, folders: Sequence[str], files: Sequence[str]) -> None:
    """``UserError`` for what the run could not write, or would take for absent: a link that leads nowhere, say."""
    odd = [
        f"{path / name}: is no folder"
        for name in folders
        if os.path.lexists(path / name) and not (path / name).is_dir()
    ]
    odd += [f"{path / name}: is a link" for name in folders if name in REPLACED and (path / name).is_symlink()]
    odd += [
        f"{path / name}: is no file" for name in files if os.path.lexists(path / name) and not (path / name).is_file()
    ]
    if odd:
        raise UserError([*odd, f"{path}: move that away, or choose another run.name"])


def differences(former: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """``key: old -> new`` for every changed leaf."""
    old, new = _flat(former), _flat(config)
    keys = [*old, *(k for k in new if k not in old)]
    return [f"{k}: {old.get(k)!r} -> {new.get(k)!r}" for k in keys if old.get(k) != new.get(k)]


def redact(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy whose secrets (by the end of their key) read ``***``."""

    def plain(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(k): plain(str(k), v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(key, v) for v in value]
        return "***" if value is not None and key.lower().replace("-", "_").endswith(SECRET_ENDINGS) else value

    return plain("", config)


def _is_content(name: str) -> bool:
    """Whether a file of this name would be there before a run has taken the folder."""
    return not name.startswith(".") and name not in (EVAL, SERVERS)


def _lock(path: Path) -> int:
    """The lock file's descriptor. A POSIX record lock: it goes when its process goes, and no child inherits it."""
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        holder = os.read(descriptor, 4096).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise UserError(f"{path}: in use by {holder}; wait for it, stop it, or choose another run.name") from error
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {started}\n".encode(), 0)
    return descriptor


def _keep_and_write(path: Path, text: str) -> None:
    if path.exists():
        if path.read_bytes() == text.encode():
            return
        # A copy, so that a kill at any point leaves the folder recognisable as a run's.
        shutil.copyfile(path, _free_name(path.parent, path.stem, path.suffix))
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _free_name(folder: Path, stem: str, suffix: str) -> Path:
    number = 1
    while (folder / f"{stem}.{number}{suffix}").exists():
        number += 1
    return folder / f"{stem}.{number}{suffix}"


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:  # not UTF-8, or a date that is none
        raise UserError(f"{path}: not readable as YAML; repair it or choose another run.name") from error
    return loaded if isinstance(loaded, dict) else {}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            leaves |= _flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return leaves
