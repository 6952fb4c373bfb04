"""Stores past the cache (csrc/common/stream.h): every instruction set that this machine has gives what memcpy gives."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CXX = next((found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))), None)


@pytest.mark.skipif(CXX is None, reason="no C++ compiler")
def test_streams_write_what_copies_write(tmp_path: Path) -> None:
    program = tmp_path / "check"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
    subprocess.run([str(CXX), *flags, str(ROOT / "tests/ops/stream/check.cpp"), "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout) == (3 if platform.machine() == "x86_64" else 2)
