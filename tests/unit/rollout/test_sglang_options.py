"""From the configuration to a server's command line and environment; nothing is started here."""

from __future__ import annotations

import sys

import pytest

from mdapo.rollout.sglang_options import LAUNCH, ServerOptions

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
