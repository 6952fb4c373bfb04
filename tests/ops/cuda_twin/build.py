"""Compiles a twin's driver with the host compiler, once per content of its sources."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CXX = next((found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))), None)


@cache
def load(name: str) -> ctypes.CDLL:
    """The shared library of ``<name>_twin.cpp``."""
    assert CXX is not None
    target = ROOT / "build" / "twin" / f"{name}.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    sources = [*HERE.glob("*.h"), *HERE.glob("*.cpp"), *(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.cu")]
    if not target.exists() or target.stat().st_mtime_ns < max(path.stat().st_mtime_ns for path in sources):
        flags = ["-std=c++17", "-O2", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
        command = [CXX, *flags, f"-I{HERE}", f"-I{ROOT / 'csrc'}", str(HERE / f"{name}_twin.cpp"), "-o", str(target)]
        subprocess.run(command, check=True)
    return ctypes.CDLL(str(target))
