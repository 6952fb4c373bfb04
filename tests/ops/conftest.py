"""``backend``: every test that takes it runs once on each, for the op that its module names in ``OP``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# Before mdapo.ops: libraries are loaded for the devices that torch has by then.
match os.environ.get("MDAPO_TEST_NPU"):
    case "fake":
        import fake_npu

        fake_npu.install()
    case "device":
        import torch_npu  # noqa: F401  # pyrefly: ignore
from backends import BACKENDS, Backend


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    found: Backend = request.param
    if why := found.missing(request.module.OP):
        pytest.skip(why)
    with found.serving():
        yield found


@pytest.fixture(params=[b for b in BACKENDS if b.name in ("reference", "cpu")], ids=lambda backend: backend.name)
def host(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """As ``backend``, for ops that run on the host whatever the device."""
    found: Backend = request.param
    if why := found.missing(request.module.OP):
        pytest.skip(why)
    with found.serving():
        yield found
