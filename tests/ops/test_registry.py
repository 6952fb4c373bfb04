"""Which kernel serves an op: native where its library is there, else the reference, or an error where that is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mdapo.errors import UserError
from mdapo.ops import registry

ROOT = Path(__file__).resolve().parents[2]
NATIVE = not registry.LIBRARIES["cpu"]
REPORT = """
import torch
from mdapo.ops import registry
from mdapo.ops.pack import pack, segments
print(registry.summary())
print(pack({"x": torch.arange(3)}, segments([1, 2], align=2))["x"].tolist(), torch.cuda.is_initialized())
"""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    registry.native_backends()  # all pages are imported
    references, libraries = dict(registry.REFERENCES), dict(registry.LIBRARIES)
    yield
    for now, before in ((registry.REFERENCES, references), (registry.LIBRARIES, libraries)):
        now.clear()
        now.update(before)


def double(x: Tensor) -> Tensor:
    return x * 2


def test_a_defined_op_works_by_its_reference_and_has_its_gradient() -> None:
    registry.define(
        "test_double(Tensor x) -> Tensor",
        reference=double,
        fake=torch.empty_like,
        setup_context=lambda ctx, inputs, output: None,
        backward=lambda ctx, grad: grad * 2,
    )
    x = torch.ones(2, requires_grad=True)
    torch.ops.mdapo.test_double(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2]
    assert registry.native_backends()["test_double"] == ()
    assert "reference: test_double" in registry.summary()


def test_a_missing_kernel_is_an_error_where_native_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDAPO_REQUIRE_NATIVE", "1")
    registry.define("test_required(Tensor x) -> Tensor", reference=double, fake=torch.empty_like)
    with pytest.raises(UserError, match="test_required has no kernel for this device"):
        torch.ops.mdapo.test_required(torch.ones(2))
    assert torch.ops.mdapo.test_required(torch.ones(2, device="meta")).shape == (2,)


@pytest.mark.parametrize("variables", [{"MDAPO_OPS": "fast"}, {"MDAPO_OPS": "reference", "MDAPO_REQUIRE_NATIVE": "1"}])
def test_variables_that_mean_nothing_are_refused(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="MDAPO_OPS"):
        registry.load()


def test_a_library_that_is_not_there_is_said_with_what_builds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(registry, "NATIVE", tmp_path)
    registry.load()
    assert all("csrc/compile.py" in why for why in registry.LIBRARIES.values())
    (tmp_path / "mdapo_cpu.so").write_bytes(b"not a library")
    registry.load()
    assert "cannot be loaded" in registry.LIBRARIES["cpu"]


@pytest.mark.skipif(not NATIVE, reason="no native library")
def test_the_report_names_native_ops() -> None:
    assert registry.native_backends()["pack"][0] == "cpu"
    assert registry.summary().startswith("native on cpu")


def test_references_can_be_forced_and_importing_touches_no_device() -> None:
    environment = {**os.environ, "MDAPO_OPS": "reference", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", REPORT]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=True)
    summary, packed = ran.stdout.splitlines()
    assert "native" not in summary and "pack" in summary
    assert packed == "[0, 0, 1, 2] False"
