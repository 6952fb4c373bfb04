"""The script that makes the SGLang environment: what it refuses, and that a second call does nothing."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LOCK = ROOT / "requirements-sglang-cpu.lock"
STAND_IN = ROOT / "tests" / "sglang" / "stand_in"


def install(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "scripts" / "install_sglang_cpu.sh"), *arguments]
    kept = {"PATH": os.environ["PATH"]} | environment
    return subprocess.run(command, env=kept, capture_output=True, text=True, timeout=60)


def test_every_package_has_one_version() -> None:
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.\-]+==[\w.+!]+", line)] == []
    names = [line.split("==")[0].lower().replace("_", "-") for line in lines]
    assert len(set(names)) == len(names)
    assert {"sglang", "torch", "transformers"} <= set(names)


def test_another_python_is_refused_by_name() -> None:
    done = install("/nowhere/env", PYTHON="/bin/true")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "install_sglang_cpu: PYTHON=/bin/true is not a Python 3.11, for which the lock is\n"


def test_a_second_call_names_the_interpreter_and_installs_nothing(tmp_path: Path) -> None:
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    stamp = hashlib.sha256(LOCK.read_bytes()).hexdigest()
    (tmp_path / "env" / ".mdapo-sglang-stamp").write_text(f"{stamp}  -\n")
    for arguments, variables in (([str(tmp_path / "env")], {}), ([], {"MDAPO_SGLANG_ENV": str(tmp_path / "env")})):
        done = install(*arguments, **variables)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{python}\n", "")
    copy = tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "sgl_kernel" / "__init__.py"
    assert copy.read_text() == (STAND_IN / "sgl_kernel" / "__init__.py").read_text()


def test_the_stand_in_imports_anything_computes_nothing_and_lacks_what_sglang_asks_for() -> None:
    code = """
import importlib.util
import sgl_kernel
from sgl_kernel import silu_and_mul
from sgl_kernel.flash_attn import flash_attn_varlen_func
assert importlib.util.find_spec("sgl_kernel.scalar_type") is None
try:
    from sgl_kernel.scalar_type import ScalarType
except ImportError:
    print("missing")
for function in (silu_and_mul, flash_attn_varlen_func):
    try:
        function(1)
    except NotImplementedError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(STAND_IN)}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == [
        "missing",
        *(
            f"{name} is a GPU kernel; on this CPU a stand-in of mdapo's tests has its place"
            for name in ("sgl_kernel.silu_and_mul", "sgl_kernel.flash_attn.flash_attn_varlen_func")
        ),
    ], done.stderr
