"""A fake "npu" device, and mdapo's Ascend library for it: the real host sides over the kernels on the host twin.

``install`` changes this process for good; pytest does it when ``MDAPO_TEST_NPU=fake`` (tests/ops/conftest.py), which
tests/ops/test_fake_npu.py sets for a process of its own.
"""

from __future__ import annotations

import subprocess
import types
from collections.abc import Sequence
from pathlib import Path

import torch
from ascend.twin import CSRC, CXX, ROOT

HERE = Path(__file__).resolve().parent
TORCH = Path(torch.__file__).resolve().parent


def install() -> None:
    assert CXX is not None
    torch.utils.rename_privateuse1_backend("npu")
    torch.ops.load_library(str(_build("fake_npu", [HERE / "fake_npu.cpp"], [])))
    npu = types.ModuleType("torch.npu")
    npu.is_available = lambda: True  # type: ignore[attr-defined]
    npu.device_count = lambda: 1  # type: ignore[attr-defined]
    npu.current_device = lambda: 0  # type: ignore[attr-defined]
    npu._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    npu.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    torch._register_device_module("npu", npu)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    flags = [
        "-DMDAPO_ASCEND_TWIN",
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
        f"-I{CSRC}",
        f"-I{CSRC / 'ascend_twin'}",
    ]
    torch.ops.load_library(str(_build("mdapo_npu", sorted(CSRC.glob("*/*_ascend_*.cpp")), flags)))


def _build(name: str, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    target = ROOT / "build" / "twin" / f"{name}.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    depends = [*sources, *CSRC.rglob("*.h")]
    if not target.exists() or target.stat().st_mtime_ns < max(path.stat().st_mtime_ns for path in depends):
        includes = [f"{TORCH}/include", f"{TORCH}/include/torch/csrc/api/include"]
        command = [str(CXX), "-std=c++20" if name == "fake_npu" else "-std=c++17", "-O1", "-fPIC", "-shared", *flags]
        command += [word for folder in includes for word in ("-isystem", folder)]
        libraries = [f"-L{TORCH}/lib", "-ltorch_cpu", "-lc10"]
        subprocess.run([*command, *map(str, sources), "-o", str(target), *libraries], check=True)
    return target
