"""``backend``: every test that takes it runs once on each, for the op that its module names in ``OP``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from backends import BACKENDS, Backend

if os.environ.get("MDAPO_FAKE_NPU") == "1":
    import fake_npu

    fake_npu.install()


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    found: Backend = request.param
    if why := found.missing(request.module.OP):
        pytest.skip(why)
    with found.serving():
        yield found
