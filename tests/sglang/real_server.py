"""The real SGLang on a CPU, for tests: started, waited for, and ended with all its processes."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("MDAPO_SGLANG_ENV", ROOT / ".venv-sglang")) / "bin" / "python"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
CONTEXT = 2048
START_S = 600.0


@contextmanager
def real_server(log: Path, *, dtype: str = "float32") -> Generator[tuple[str, str]]:
    """URL and key of a server of the small model. Skips where SGLang or the model is not there."""
    if not PYTHON.exists():
        pytest.skip(f"no SGLang at {PYTHON}: bash scripts/install_sglang_cpu.sh")
    if not MODEL.is_dir():
        pytest.skip(f"no model at {MODEL}: scripts/fetch_model.py")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    key = secrets.token_hex(16)
    command = [str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(MODEL), "--device", "cpu"]
    command += ["--dtype", dtype, "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    command += ["--grammar-backend", "none", "--disable-cuda-graph", "--disable-overlap-schedule"]
    command += ["--mem-fraction-static", "0.2", "--max-total-tokens", "16384", "--max-running-requests", "64"]
    command += ["--context-length", str(CONTEXT), "--host", "127.0.0.1", "--port", str(port), "--api-key", key]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    for name in ("PYTHONPATH", "PYTEST_CURRENT_TEST"):
        env.pop(name, None)
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True, cwd=log.parent)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, process, log)
            yield url, key
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(1.0)
    pytest.fail(f"SGLang did not start: {log.read_text(errors='replace')[-3000:]}")
