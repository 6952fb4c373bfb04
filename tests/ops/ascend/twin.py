"""token_logprob and pack by their Ascend C kernels on the host twin (csrc/ascend_twin), in the place of the ops."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_twin.pack_twin import Guarded, item_bytes
from torch import Tensor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CSRC = ROOT / "csrc"
CXX = next((found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))), None)
CORES = 3  # more than one, and no divisor of what the vectors use
OPS = ("token_logprob_stats", "token_logprob_grad", "pack", "unpack")


def compile_driver(target: Path, includes: Sequence[Path] = ()) -> ctypes.CDLL:
    """The driver with the kernels found in ``includes`` first, then in csrc/."""
    assert CXX is not None
    folders = [f"-I{folder}" for folder in (*includes, CSRC, CSRC / "ascend_twin")]
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-DMDAPO_ASCEND_TWIN"]
    subprocess.run([CXX, *flags, *folders, str(HERE / "driver.cpp"), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


@cache
def library() -> ctypes.CDLL:
    target = ROOT / "build" / "twin" / "ascend.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    sources = [HERE / "driver.cpp", *CSRC.rglob("*.h"), *CSRC.rglob("*_ascend_kernel.cpp")]
    if target.exists() and target.stat().st_mtime_ns > max(path.stat().st_mtime_ns for path in sources):
        return ctypes.CDLL(str(target))
    return compile_driver(target)


def table(*, max_keeps_nan: bool = True) -> Mapping[str, Callable[..., Any]]:
    twin = library()
    return {
        "token_logprob_stats": partial(stats, twin, max_keeps_nan=max_keeps_nan),
        "token_logprob_grad": partial(gradient, twin, max_keeps_nan=max_keeps_nan),
        "pack": partial(copy, twin, unpack=False),
        "unpack": partial(copy, twin, unpack=True),
    }


def stats(
    twin: Any,
    stats_4R: Tensor,
    logits_RC: Tensor,
    targets_R: Tensor,
    first_id: int,
    temperature: float,
    *,
    max_keeps_nan: bool = True,
) -> None:
    _tile(twin, stats_4R, logits_RC, targets_R, first_id, temperature, gradient=False, max_keeps_nan=max_keeps_nan)


def gradient(
    twin: Any,
    logits_RC: Tensor,
    targets_R: Tensor,
    terms_5R: Tensor,
    first_id: int,
    temperature: float,
    *,
    max_keeps_nan: bool = True,
) -> None:
    _tile(twin, terms_5R, logits_RC, targets_R, first_id, temperature, gradient=True, max_keeps_nan=max_keeps_nan)


def _tile(
    twin: Any,
    values_KR: Tensor,
    logits_RC: Tensor,
    targets_R: Tensor,
    first_id: int,
    temperature: float,
    *,
    gradient: bool,
    max_keeps_nan: bool,
) -> None:
    if logits_RC.dtype == torch.float64:
        pytest.skip("an Ascend core has no float64")
    rows, cols = logits_RC.shape
    if rows == 0 or cols == 0:
        return  # the host side launches nothing
    targets_R = targets_R.contiguous()
    message = ctypes.create_string_buffer(300)
    failed = twin.token_logprob_ascend(
        int(gradient),
        int(logits_RC.dtype == torch.bfloat16),
        ctypes.c_void_p(logits_RC.data_ptr()),
        ctypes.c_void_p(targets_R.data_ptr()),
        ctypes.c_void_p(values_KR.data_ptr()),
        (ctypes.c_int64 * 5)(rows, cols, logits_RC.stride(0) if rows > 1 else cols, first_id, values_KR.stride(0)),
        ctypes.c_double(temperature),
        CORES,
        int(max_keeps_nan),
        message,
        ctypes.c_int64(len(message)),
    )
    assert not failed, message.value.decode()


def copy(
    twin: Any, fields: list[Tensor], runs_4M: Tensor, size: int, cp: int, cp_rank: int, *, unpack: bool
) -> list[Tensor]:
    fields, runs_4M = [field.contiguous() for field in fields], runs_4M.contiguous()
    rows, total = (size, len(fields[0]) * cp) if unpack else (len(fields[0]), size)
    outputs = [Guarded(field, rows if unpack else total // cp) for field in fields]
    pointers, message = ctypes.c_void_p * len(fields), ctypes.create_string_buffer(300)
    failed = twin.pack_ascend(
        int(unpack),
        len(fields),
        pointers(*(field.data_ptr() for field in fields)),
        pointers(*(output.address for output in outputs)),
        (ctypes.c_int64 * len(fields))(*map(item_bytes, fields)),
        ctypes.c_void_p(runs_4M.data_ptr()),
        (ctypes.c_int64 * 5)(runs_4M.shape[1], rows, total, cp, cp_rank),
        CORES,
        message,
        ctypes.c_int64(len(message)),
    )
    if failed:
        raise ValueError(message.value.decode())
    return [output.result() for output in outputs]
