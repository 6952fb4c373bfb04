"""From the configuration to a server's command line and environment; nothing is started here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mdapo.config.load import load
from mdapo.rollout.sglang_options import LAUNCH, ServerOptions, server_options

ON_A_GPU = ServerOptions("models/m", device="cuda", devices=(2, 3), tp=2, max_context=1024, max_running=8)


def options_of(command: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in command[2:]:
        if word.startswith("--"):
            found[word.removeprefix("--")] = []
        else:
            found[list(found)[-1]].append(word)
    return found


def test_a_command_has_the_model_one_address_and_room_for_the_longest_dialogue() -> None:
    command = ON_A_GPU.command(31000)
    assert command[:2] == [sys.executable, str(LAUNCH)]
    said = options_of(command)
    assert said["model-path"] == ["models/m"]
    assert (said["host"], said["port"], said["tp-size"]) == (["127.0.0.1"], ["31000"], ["2"])
    assert said["context-length"] == ["1030"], "SGLang takes a little less than its context"
    assert "attention-backend" not in said, "on a GPU SGLang chooses"


def test_only_servers_that_take_turns_with_the_trainer_on_a_gpu_can_give_memory_back() -> None:
    assert "enable-memory-saver" not in options_of(ON_A_GPU.command(1))
    turns = ServerOptions("m", device="cuda", takes_turns=True)
    assert options_of(turns.command(1))["enable-memory-saver"] == []
    assert "enable-memory-saver" not in options_of(ServerOptions("m", device="cpu", takes_turns=True).command(1))


def test_engine_args_go_in_verbatim_under_either_spelling_and_win() -> None:
    given = {
        "attention_backend": "fa3",
        "dtype": "float16",
        "enable-metrics": True,
        "disable_radix_cache": False,
        "cuda_graph_bs": [1, 2],
        "json_model_override_args": {"a": 1},
        "mem_fraction_static": 0.5,
    }
    said = options_of(ServerOptions("m", engine_args=given).command(1))
    assert said["attention-backend"] == ["fa3"]
    assert said["dtype"] == ["float16"]
    assert said["enable-metrics"] == []
    assert "disable-radix-cache" not in said
    assert said["cuda-graph-bs"] == ["1", "2"]
    assert said["json-model-override-args"] == ['{"a": 1}']
    assert said["mem-fraction-static"] == ["0.5"]


def test_a_server_sees_its_own_devices_among_those_that_the_job_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert ON_A_GPU.environment()["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert ON_A_GPU.environment()["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert ServerOptions("m", device="cuda").environment()["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_a_server_reaches_itself_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert ServerOptions("m").environment()["no_proxy"] == "127.0.0.1"
    monkeypatch.setenv("NO_PROXY", "internal")
    environment = ServerOptions("m").environment()
    assert environment["no_proxy"] == environment["NO_PROXY"] == "internal,127.0.0.1"


def test_a_server_is_no_rank_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE")
    for name in ranks:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    environment = ServerOptions("m").environment()
    assert not environment.keys() & {*ranks, "OMP_NUM_THREADS"}
    assert environment["PATH"]
    assert ServerOptions("m", threads=3).environment()["OMP_NUM_THREADS"] == "3"
    assert ON_A_GPU.environment()["OMP_NUM_THREADS"] == "1"


def test_a_run_says_how_many_servers_there_are_and_what_each_gets(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        """
model: {path: models/m, dtype: float32, max_context: 2048}
data: {train_files: [a.jsonl]}
rollout: {engine: sglang, tp: 2, max_running: 7, server_python: /env/bin/python, engine_args: {page_size: 16}}
placement:
  groups: [{name: train, device: npu}, {name: serve, device: cuda, ids: [4, 5, 6, 7]}]
  actor: train
  rollout: serve
"""
    )
    first, second = server_options(load(tmp_path / "c.yaml").config, here="npu", visible=8)
    assert (first.device, first.devices, second.devices) == ("cuda", (4, 5), (6, 7))
    assert (first.model_path, first.dtype, first.max_context, first.max_running) == ("models/m", "float32", 2048, 7)
    assert (first.python, first.tp, first.engine_args) == ("/env/bin/python", 2, {"page_size": 16})
    local = load(tmp_path / "c.yaml", ["placement={groups: [], actor: null, rollout: null}", "rollout.num_servers=2"])
    assert [(o.device, o.devices) for o in server_options(local.config, here="cpu", visible=0)] == [("cpu", ())] * 2
