"""What the Ascend host twin shows beside the vectors: it catches broken kernels, and kernels keep to its API."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ascend import twin
from ascend.mutants import MUTANTS, WRONG, Mutant

from mdapo.ops import pack  # noqa: F401  its reference
from mdapo.ops import token_logprob as op
from mdapo.ops.registry import REFERENCES

KERNELS = [*sorted(twin.CSRC.glob("*/*_ascend_kernel*")), twin.CSRC / "common" / "ascend_kernel.h"]
TWIN = twin.CSRC / "ascend_twin"
MANIFEST = json.loads((TWIN / "api_manifest.json").read_text())
needs_compiler = pytest.mark.skipif(twin.CXX is None, reason="no C++ compiler")


def code(path: Path) -> str:
    """Without comments and strings."""
    return re.sub(r'//[^\n]*|"[^"\n]*"', "", path.read_text())


def names_of(text: str) -> set[str]:
    """What a kernel takes from the API: qualified names, members (they begin with a capital), macros and types."""
    qualified = re.findall(r"AscendC::(\w+)(?:::(\w+))?", text)
    members = re.findall(r"(?:\.|->)(?:template )?([A-Z]\w*)\s*[<(]", text)
    others = re.findall(r"\b(GM_ADDR|__gm__|__aicore__|__global__|bfloat16_t|event_t|PIPE_\w+|KERNEL_\w+)\b", text)
    enumerators = {f"{kind}::{value}" for kind, value in qualified if value}
    return {kind for kind, _ in qualified} | enumerators | set(members) | set(others)


def test_there_are_kernels_for_pack_and_token_logprob() -> None:
    assert {path.parent.name for path in KERNELS} == {"pack", "token_logprob", "common"}


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_kernels_use_only_what_the_manifest_names(path: Path) -> None:
    assert names_of(code(path)) <= {entry["name"] for entry in MANIFEST}


def test_the_manifest_names_nothing_that_no_kernel_uses() -> None:
    used = set().union(*(names_of(code(path)) for path in KERNELS))
    assert {entry["name"] for entry in MANIFEST} == used
    assert all(entry["page"] and entry["signature"] for entry in MANIFEST)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_kernels_use_nothing_that_an_ai_core_lacks(path: Path) -> None:
    found = re.findall(r"\bstd::|\bnew\b|\bdelete\b|\bdouble\b|\bvirtual\b|\bthrow\b|#include <", code(path))
    assert not found


def tile_of(dtype: torch.dtype) -> dict[str, Any]:
    """Rows of two chunks, more than a batch a core; some logits of -inf; a target in most rows, one nearly certain."""
    generator = torch.Generator().manual_seed(3)
    logits_RC = torch.randn(200, 4133, generator=generator).to(dtype)
    logits_RC[:, 7::500] = -torch.inf
    targets_R = torch.randint(90, 4300, (200,), generator=generator)
    targets_R[5] = 100 + 11
    logits_RC[5, 11] = 40.0
    return {"logits_RC": logits_RC, "targets_R": targets_R, "first_id": 100, "temperature": 0.8}


def stats_of(run: Any, dtype: torch.dtype, rows: int = 200) -> torch.Tensor:
    tile = tile_of(dtype)
    stats_4R = torch.zeros(4, rows)
    stats_4R[op.LARGEST] = -torch.inf
    for first, last in ((0, 4100), (4100, 4133)):
        part_RC, start = tile["logits_RC"][:rows, first:last], tile["first_id"] + first
        run(stats_4R, part_RC, tile["targets_R"][:rows], start, tile["temperature"])
    return stats_4R


def gradient_of(run: Any, dtype: torch.dtype) -> torch.Tensor:
    tile, stats_4R = tile_of(dtype), stats_of(op.stats_reference, dtype)
    log_sum_R = stats_4R[op.SUM].log()
    entropy_R = log_sum_R - stats_4R[op.MOMENT] / stats_4R[op.SUM]
    generator = torch.Generator().manual_seed(4)
    grads_2R = torch.randn(2, 200, generator=generator)
    grads_2R[:, 9] = 0.0
    terms_5R = torch.cat([torch.stack([stats_4R[op.LARGEST], log_sum_R, entropy_R]), grads_2R])
    run(tile["logits_RC"], tile["targets_R"], terms_5R, tile["first_id"], tile["temperature"])
    return tile["logits_RC"].float()


def packed_by(run: Any) -> list[torch.Tensor]:
    """Three runs with zeros between and behind them; tokens of which few fill a transfer."""
    runs_4M = torch.tensor([[1, 20, 9], [4, 7, 9], [0, 6, 14], [5, 8, 10]])
    large = torch.arange(40 * 9000, dtype=torch.int32).view(40, 9000)
    return run([torch.arange(40), large, torch.ones(40, 3, dtype=torch.uint8)], runs_4M, 28, 1, 0)


def check(library: ctypes.CDLL, vector: str) -> None:
    """Raises what the twin says, or that the result is wrong."""
    if vector == "pack":
        found = packed_by(lambda *args: twin.copy(library, *args, unpack=False))
        wanted = packed_by(REFERENCES["pack"])
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), WRONG
        return
    for dtype in (torch.float32, torch.bfloat16):
        if vector == "stats":
            found = stats_of(lambda *args: twin.stats(library, *args), dtype)
            wanted = stats_of(op.stats_reference, dtype)
        else:
            found = gradient_of(lambda *args: twin.gradient(library, *args), dtype)
            wanted = gradient_of(op.grad_reference, dtype)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        assert torch.allclose(found, wanted, rtol=tolerance, atol=tolerance), WRONG


def compiling() -> ModuleType:
    """csrc/compile.py, which is no package's."""
    spec = importlib.util.spec_from_file_location("csrc_compile", twin.CSRC / "compile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@needs_compiler
@pytest.mark.skipif("MDAPO_TORCH_NPU" not in os.environ, reason="MDAPO_TORCH_NPU names no unzipped wheel of torch-npu")
@pytest.mark.parametrize("op", ["pack", "token_logprob"])
def test_host_sides_compile_against_torch_npu(op: str) -> None:
    """Its headers are enough: the wheel is unzipped aside, not installed (torch would not start without CANN)."""
    building, torch_npu = compiling(), Path(os.environ["MDAPO_TORCH_NPU"])
    tools = replace(building.find_tools(), torch_npu=torch_npu, ascend=torch_npu)  # the wheel has acl.h too
    source = twin.CSRC / op / f"{op}_ascend_host.cpp"
    command = [*building.compile_command(source, os.devnull, tools), "-fsyntax-only", "-Werror"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@needs_compiler
@pytest.mark.parametrize("vector", ["stats", "grad", "pack"])
def test_the_vectors_of_the_mutants_pass_unbroken(vector: str) -> None:
    check(twin.library(), vector)


@needs_compiler
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_broken_kernels_are_caught(mutant: Mutant, tmp_path: Path) -> None:
    text = (twin.CSRC / mutant.file).read_text()
    assert mutant.old in text, "the mutant no longer applies"
    broken = tmp_path / mutant.file
    broken.parent.mkdir()
    broken.write_text(text.replace(mutant.old, mutant.new, 1))
    library = twin.compile_driver(tmp_path / "broken.so", [tmp_path])
    with pytest.raises((AssertionError, ValueError), match=mutant.message):
        check(library, mutant.vector)


@needs_compiler
@pytest.mark.parametrize("max_keeps_nan", [True, False])
def test_nan_is_not_hidden_whatever_a_maximum_makes_of_it(*, max_keeps_nan: bool) -> None:
    """The documentation does not say, so that both must do."""
    logits_RC = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    logits_RC[1, 3] = logits_RC[2] = torch.nan
    stats_4R = torch.zeros(4, 4)
    stats_4R[op.LARGEST] = -torch.inf
    targets_R, library = torch.tensor([0, 3, 5, 7]), twin.library()
    for part in (slice(0, 20), slice(20, 50)):
        twin.stats(library, stats_4R, logits_RC[:, part], targets_R, part.start, 1.0, max_keeps_nan=max_keeps_nan)
    assert stats_4R[op.SUM].isnan().tolist() == stats_4R[op.MOMENT].isnan().tolist() == [False, True, True, False]
    known_3R = torch.stack([logits_RC.amax(1), torch.zeros(4), torch.zeros(4)]).nan_to_num(0.0)
    terms_5R = torch.cat([known_3R, torch.ones(2, 4)])
    twin.gradient(library, logits_RC, targets_R, terms_5R, 0, 1.0, max_keeps_nan=max_keeps_nan)
    assert logits_RC.isnan()[:, 3].tolist() == [False, True, True, False] and logits_RC[2].isnan().all()
