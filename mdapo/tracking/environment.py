"""What a run was made with, for ``env.json``: versions, hardware, git revision. Nothing of the process environment."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    "mdapo",
    "torch",
    "megatron-core",
    "transformers",
    "tokenizers",
    "numpy",
    "safetensors",
    "sglang",
    "torch-npu",
)
PACKAGES += ("transformer-engine", "pydantic", "omegaconf")
GIT_S = 5.0


def describe_environment(accelerators: list[str] | None = None) -> dict[str, Any]:
    """JSON data. ``accelerators`` are the device names that the caller knows of; this module imports no torch."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "hardware": {
            "machine": platform.machine(),
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "accelerators": accelerators or [],
        },
        "git": git_revision(Path(__file__).parent),
    }


def git_revision(folder: Path) -> str | None:
    """The commit that ``folder`` is checked out at, ``-dirty`` when tracked files differ; None outside a repository."""
    if not _git(folder, "ls-files", "."):  # not a repository, or an installed copy inside somebody else's
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    return f"{commit}-dirty" if _git(folder, "status", "--porcelain", "--untracked-files=no") else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *arguments]
        found = subprocess.run(command, capture_output=True, timeout=GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.decode("utf-8", "replace").strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
