"""The real SGLang server on this machine's CPU: its environment, made once by the script, and one server a session.

A start takes half a minute, so that all tests share one; those that change its weights bring it the model's own again,
or bring what they ask about themselves. Whoever ends it costs the next test a start.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mdapo.rollout.sglang_options import CONTEXT_MARGIN, ServerOptions
from mdapo.rollout.sglang_server import Server

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
CONTEXT = 1024  # of the server, of which dialogues get all but CONTEXT_MARGIN
CACHE_TOKENS = 12288  # half a gigabyte in float32
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
    assert MODEL.is_dir(), "scripts/fetch_model.py makes it"
    return MODEL


@pytest.fixture(scope="session")
def options(sglang_python: str, small_model: Path) -> ServerOptions:
    return ServerOptions(
        str(small_model),
        dtype="float32",
        max_context=CONTEXT - CONTEXT_MARGIN,
        max_running=32,
        python=sglang_python,
        threads=int(os.environ.get("OMP_NUM_THREADS", "0")),
        engine_args={"max_total_tokens": CACHE_TOKENS},
    )


@pytest.fixture(scope="session")
def shared_server(options: ServerOptions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    shared = Server(options, log=tmp_path_factory.mktemp("servers") / "0.log")
    yield shared
    asyncio.run(shared.stop())


@pytest.fixture
def server(shared_server: Server) -> Server:
    """It runs, whatever the test before did to it."""
    return running(shared_server)


def running(server: Server) -> Server:
    if not server.alive:
        asyncio.run(server.start(START_S))
    return server
