"""The real SGLang server on this machine's CPU: its environment, made once by the script, and one server a session."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mdapo.rollout.sglang_options import ServerOptions
from mdapo.rollout.sglang_server import Server

ROOT = Path(__file__).resolve().parents[2]
START_S = 900.0  # half a minute on a free machine
INSTALL_S = 1500.0


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter of an environment with SGLang in it; MDAPO_SGLANG_ENV names the folder where it is kept."""
    script = ["bash", str(ROOT / "scripts" / "install_sglang_cpu.sh")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=INSTALL_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="session")
def small_model() -> Path:
    """SmolLM2-135M-Instruct; scripts/fetch_model.py makes the folder."""
    folder = ROOT / "models" / "SmolLM2-135M-Instruct"
    assert folder.is_dir(), "scripts/fetch_model.py makes it"
    return folder


@pytest.fixture(scope="session")
def options(sglang_python: str, small_model: Path) -> ServerOptions:
    return ServerOptions(
        str(small_model),
        dtype="float32",
        max_context=256,
        max_running=16,
        python=sglang_python,
        threads=int(os.environ.get("OMP_NUM_THREADS", "0")),
    )


@pytest.fixture(scope="session")
def server(options: ServerOptions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests that only ask it; those that end a server start their own."""
    started = Server(options, log=tmp_path_factory.mktemp("servers") / "0.log")
    asyncio.run(started.start(START_S))
    yield started
    asyncio.run(started.stop())
