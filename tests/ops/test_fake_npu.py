"""The ops end to end as on Ascend: torch's dispatcher, the real host sides, the real kernels; the device is a fake.

The vector suite runs again in a process that has a device "npu": its memory is the host's, its cores are the host twin.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ascend.twin import CXX

HERE = Path(__file__).resolve().parent
SUITE = ["test_pack.py", "test_token_logprob.py", "test_token_logprob_edges.py"]


@pytest.mark.skipif(CXX is None, reason="no C++ compiler")
@pytest.mark.skipif(bool(os.environ.get("MDAPO_TEST_NPU")), reason="this is that process")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("suite", SUITE)
def test_the_vectors_pass_on_a_fake_npu(suite: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / suite), "-k", "npu"]
    environment = {**os.environ, "MDAPO_TEST_NPU": "fake"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout.splitlines()[-1]
