"""Weight sync of a Megatron actor into the real SGLang server, in all three modes, after real optimizer steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
SERVER_PYTHON = Path(os.environ.get("MDAPO_SGLANG_ENV", ROOT / ".venv-sglang"), "bin", "python")
STAND_IN = Path(__file__).parent / "stand_in"
KEY, READY_S, MODES = "0123456789abcdef", 240.0, ["tensor", "distributed", "disk"]
BUCKET_MB = 64
OPTIONS = (
    "--device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch --grammar-backend none "
    "--disable-cuda-graph --disable-overlap-schedule --mem-fraction-static 0.2 --max-total-tokens 8192 "
    "--max-running-requests 16 --context-length 1024 --host 127.0.0.1"
)

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not SERVER_PYTHON.exists(), reason="scripts/install_sglang_cpu.sh installs the server"),
    pytest.mark.skipif(not MODEL.exists(), reason="scripts/fetch_model.py makes the model"),
]


@dataclass
class Running:
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    version: int = 0  # that the next sync counts on from


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("server")
    port, log = free_port(), folder / "log"
    stand_in = os.environ.get("MDAPO_SGLANG_STAND_IN", str(STAND_IN))
    env = {**os.environ, "PYTHONPATH": stand_in, "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1",
           "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    command = [str(SERVER_PYTHON), "-m", "sglang.launch_server", "--model-path", str(MODEL), "--port", str(port),
               "--api-key", KEY, *OPTIONS.split()]  # fmt: skip
    with open(log, "wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True, cwd=folder)
    running = Running(f"http://127.0.0.1:{port}", process, log)
    try:
        wait_until_ready(running)
        yield running
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_ready(running: Running) -> None:
    request = urllib.request.Request(running.url + "/health_generate", headers={"Authorization": f"Bearer {KEY}"})
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        assert running.process.poll() is None, running.log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(request, timeout=30):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1.0)
    pytest.fail(f"not ready after {READY_S:g} s: {running.log.read_text()[-3000:]}")


def synced(server: Running, folder: Path, *, ranks: int = 1, **changes: Any) -> list[dict[str, Any]]:
    """Run ``sync_rank.py`` on ``ranks`` ranks; what it found."""
    case = {"model": str(MODEL), "url": server.url, "key": KEY, "tp": ranks, "lr": 1e-4, "modes": MODES,
            "bucket_mb": BUCKET_MB, "repeats": 2, "folder": str(folder / "weights"), "version": server.version,
            "colocated": False, "result": str(folder / "result.json")} | changes  # fmt: skip
    (folder / "case.json").write_text(json.dumps(case))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
               str(Path(__file__).with_name("sync_rank.py")), str(folder / "case.json")]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'distributed'}", "MDAPO_DEVICE": "cpu",
           "OMP_NUM_THREADS": "1"}  # fmt: skip
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}\n{server.log.read_text()[-3000:]}"
    found = json.loads((folder / "result.json").read_text())
    server.version = max(entry["version"] for entry in found)
    return found


def parameters() -> int:
    from mdapo.config.model_facts import require_facts

    return require_facts(str(MODEL)).parameters


def test_every_mode_brings_the_actors_log_probs_to_the_server(server: Running, tmp_path: Path) -> None:
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


def test_a_tensor_parallel_actor_brings_the_same(server: Running, tmp_path: Path) -> None:
    for entry in synced(server, tmp_path, ranks=3, modes=["tensor"], repeats=1):
        assert entry["failed"] == {}
        assert entry["before"] > 1e-2 and entry["after"] <= 1e-4


def test_a_server_that_gave_its_memory_back_takes_it_again_around_a_sync(server: Running, tmp_path: Path) -> None:
    """On a CPU nothing is freed; the calls, their order, and that no scheduler ends itself are what is shown."""
    for entry in synced(server, tmp_path, modes=["tensor"], repeats=3, colocated=True):
        print(entry)
        assert entry["failed"] == {}
        assert entry["before"] > 1e-2 and entry["after"] <= 1e-4
