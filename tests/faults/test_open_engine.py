"""The engine of a configuration over servers that run already: checked, and closed when it cannot be used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from mdapo.config.model_facts import ModelFacts
from mdapo.config.schema import Config
from mdapo.errors import UserError
from mdapo.rollout.sglang_options import ServerOptions
from mdapo.rollout.sglang_server import Server, ServerFailed
from mdapo.rollout.sglang_servers import Address
from mdapo.sync.disk import DiskTransport
from mdapo.sync.shared_memory import TensorTransport
from mdapo.trainer import engines
from mdapo.trainer.engines import open_engine

from .hostile_server import KEY, VOCAB, HostileServer


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(bounded())


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4, "intermediate_size": 4,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": VOCAB,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "torch_dtype": "float32", "rms_norm_eps": 1e-6,
    "rope_theta": 1e4, "hidden_act": "silu",
}  # fmt: skip


def config(folder: Path, url: str, **sync: Any) -> Config:
    model, key = folder / "model", folder / "key"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(LLAMA))
    key.write_text(KEY)
    key.chmod(0o600)
    rollout = {"engine": "sglang", "urls": [url], "key_file": str(key)}
    return Config.model_validate(
        {
            "run": {"dir": str(folder)},
            "model": {"path": str(model), "max_context": 64, "dtype": "float32"},
            "data": {"train_files": ["a"]},
            "rollout": rollout,
            "sync": sync,
        }
    )


@pytest.mark.parametrize("mode", ["disk", "tensor"])
def test_only_weights_on_disk_are_brought_to_a_server_between_two_updates(mode: str, tmp_path: Path) -> None:
    """The others keep nothing: a server that comes back waits for the next update."""

    async def work() -> None:
        async with HostileServer() as server:
            server.architecture = "LlamaForCausalLM"
            opened = await open_engine(config(tmp_path, server.url, mode=mode), logs=tmp_path, say=lambda _: None)
            try:
                assert opened.pusher is not None and list(opened.servers) == []
                kinds = {"disk": DiskTransport, "tensor": TensorTransport}
                assert type(opened.pusher.transport) is kinds[mode]
                fleet = opened.engine.fleet  # type: ignore[attr-defined]
                assert (fleet.resync is not None) == (mode == "disk")
                assert fleet.restart is None, "servers of others are not started again"
            finally:
                await opened.close()

    run(work())


def test_a_server_of_another_model_is_refused_and_nothing_stays_open(tmp_path: Path) -> None:
    async def work() -> None:
        async with HostileServer() as server:
            with pytest.raises(UserError, match=r"serves A, model\.path is LlamaForCausalLM"):
                await open_engine(config(tmp_path, server.url), logs=tmp_path, say=lambda _: None)
            own = asyncio.current_task()
            left = [t for t in asyncio.all_tasks() if t is not own and "HostileServer" not in repr(t)]
            assert not left, left

    run(work())


def test_a_restart_that_failed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start, one that fails too, gives a server another address than the engine knows."""

    class Starts(Server):
        problems = iter(["", "ended with exit code 1", "", ""])

        def _spawn(self, port: int) -> None:
            pass

        async def _ready(self, port: int, end: float, deadline_s: float) -> str:
            return next(self.problems)

        def _said(self) -> str:
            return ""

    known: dict[str, Any] = {}

    async def connect(config: Config, model: ModelFacts, addresses: list[Address], **given: Any) -> None:
        known.update(given, address=addresses[0])

    async def work() -> None:
        options = cast("ServerOptions", None)
        monkeypatch.setattr(engines, "_owned", lambda config, logs: [Starts(options, log=logs / "log")])
        monkeypatch.setattr(engines, "connect", connect)
        asked = config(tmp_path, "http://127.0.0.1:1")
        own = asked.model_copy(update={"rollout": asked.rollout.model_copy(update={"urls": []})})
        await open_engine(own, logs=tmp_path, say=lambda _: None)
        with pytest.raises(ServerFailed):
            await known["restart"](known["address"])
        now = await known["restart"](known["address"])
        assert now.url and now != known["address"]
        assert await known["restart"](now) not in (now, known["address"])

    run(work())
