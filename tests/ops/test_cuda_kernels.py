"""benchmarks/gpu.sh runs sanitize/cuda_kernels.cu on a device; here the same program, on the host twin of CUDA."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cuda_twin import build

SOURCE = Path(__file__).resolve().parent / "sanitize" / "cuda_kernels.cu"


@pytest.mark.skipif(build.CXX is None, reason="no C++ compiler")
def test_the_program_for_compute_sanitizer_finds_nothing_on_the_twin(tmp_path: Path) -> None:
    program = tmp_path / "cuda_kernels"
    folders = [f"-I{build.HERE}", f"-I{build.ROOT / 'csrc'}"]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-x", "c++"]
    subprocess.run([str(build.CXX), *flags, *folders, str(SOURCE), "-o", str(program)], check=True)
    done = subprocess.run([str(program), "10"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0 and done.stdout == "cuda_kernels: 10 cases, no finding\n", done.stdout
