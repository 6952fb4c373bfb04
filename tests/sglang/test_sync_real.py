"""Weight sync of a Megatron actor into the real SGLang server, in all three modes, after real optimizer steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mdapo.config.model_facts import require_facts
from mdapo.rollout.sglang_server import Server

from .conftest import MODEL, ROOT

MODES = ["tensor", "distributed", "disk"]
BUCKET_MB = 64
pytestmark = [pytest.mark.sglang, pytest.mark.model, pytest.mark.timeout(900)]
versions = count(100, 100)  # none is brought twice to the server that all tests share


def synced(server: Server, folder: Path, *, ranks: int = 1, **changes: Any) -> list[dict[str, Any]]:
    """Run ``sync_rank.py`` on ``ranks`` ranks; what it found."""
    case = {"model": str(MODEL), "url": server.url, "key": server.key, "tp": ranks, "lr": 1e-4, "modes": MODES,
            "bucket_mb": BUCKET_MB, "repeats": 2, "folder": str(folder / "weights"), "version": next(versions),
            "colocated": False, "result": str(folder / "result.json")} | changes  # fmt: skip
    (folder / "case.json").write_text(json.dumps(case))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
               str(Path(__file__).with_name("sync_rank.py")), str(folder / "case.json")]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'distributed'}", "MDAPO_DEVICE": "cpu",
           "OMP_NUM_THREADS": "1"}  # fmt: skip
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}\n{server.log.read_text()[-3000:]}"
    return json.loads((folder / "result.json").read_text())


def parameters() -> int:
    return require_facts(str(MODEL)).parameters


def test_every_mode_brings_the_actors_log_probs_to_the_server(server: Server, tmp_path: Path) -> None:
    """fp32; the first sync of a mode also makes its group or folder."""
    found = synced(server, tmp_path)
    assert [entry["mode"] for entry in found] == [mode for mode in MODES for _ in range(2)]
    for entry in found:
        print(entry)
        assert entry["failed"] == {}
        assert entry["before"] > 1e-2, "the step changed nothing that a sync could bring"
        assert entry["after"] <= 1e-4
        assert entry["said"] == str(entry["version"])
        assert entry["bytes"] == 4 * parameters(), "every parameter once, the tied embedding too"
    # The embedding (108 MiB in fp32) is larger than a bucket, and a bucket of its own.
    largest = max(BUCKET_MB << 20, 4 * 49152 * 576)
    for entry in found:
        if entry["repeat"] == 1:  # the first also maps what a process needs once: libraries, connections
            assert entry["growth"] <= 1.1 * largest


def test_a_tensor_parallel_actor_brings_the_same(server: Server, tmp_path: Path) -> None:
    for entry in synced(server, tmp_path, ranks=3, modes=["tensor"], repeats=1):
        assert entry["failed"] == {}
        assert entry["before"] > 1e-2 and entry["after"] <= 1e-4


def test_a_server_that_gave_its_memory_back_takes_it_again_around_a_sync(server: Server, tmp_path: Path) -> None:
    """On a CPU nothing is freed; the calls, their order, and that no scheduler ends itself are what is shown."""
    for entry in synced(server, tmp_path, modes=["tensor"], repeats=3, colocated=True):
        print(entry)
        assert entry["failed"] == {}
        assert entry["before"] > 1e-2 and entry["after"] <= 1e-4
