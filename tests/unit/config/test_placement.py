"""Which devices actor and servers get, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mdapo.config.load import load
from mdapo.config.placement import (
    actor_environment,
    colocated,
    server_devices,
    server_python_problems,
    sharing_problems,
)
from mdapo.config.plan import plan
from mdapo.config.schema import Config
from mdapo.errors import UserError

TRAIN, SERVE = "{name: train, device: cuda, ids: [0, 1]}", "{name: serve, device: cuda, ids: [2, 3]}"
APART = f"placement.groups=[{TRAIN}, {SERVE}] placement.actor=train placement.rollout=serve"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text("model: {path: m}\ndata: {train_files: [a.jsonl]}\nrollout: {engine: sglang}\n")
    return path


def config_of(path: Path, words: str) -> Config:
    return load(path, [w if "=" in w else "" for w in split(words)]).config


def split(words: str) -> list[str]:
    """At spaces outside brackets."""
    parts, depth = [""], 0
    for letter in words:
        depth += (letter in "[{") - (letter in "]}")
        if letter == " " and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [p for p in parts if p]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("placement.actor=x", "placement.actor: 'x' is no group of placement.groups; there are none"),
        (f"{APART} placement.rollout=x", "placement.rollout: 'x' is no group of placement.groups; there is train or"),
        (f"placement.groups=[{TRAIN}]", "placement.groups.0.name: 'train' is used by neither placement.actor nor"),
        (
            f"placement.groups=[{TRAIN}, {TRAIN}] placement.actor=train",
            "placement.groups.1.name: 'train' is there twice",
        ),
        (
            "placement.groups=[{name: a, device: cpu, ids: [0]}] placement.actor=a",
            "ids: must be empty: a machine's CPU",
        ),
        ("placement.groups=[{name: a, ids: [1, 1]}] placement.actor=a", "placement.groups.0.ids: has a number twice"),
        ("placement.groups=[{name: a, ids: [-1]}] placement.actor=a", "placement.groups.0.ids.0: must be at least 0"),
        (
            "placement.groups=[{name: a, ids: [0, 1]}, {name: b, ids: [1, 2]}] placement.actor=a placement.rollout=b",
            "placement.groups: actor and servers share devices [1], but not all",
        ),
        (
            "placement.groups=[{name: a}, {name: b, ids: [1, 2]}] placement.actor=a placement.rollout=b",
            "placement.groups: actor and servers overlap: one of them has no ids",
        ),
        (
            f"placement.groups=[{TRAIN}] placement.rollout=train",
            "placement.groups: actor and servers overlap: one of them has no ids",
        ),
        (f"{APART} rollout.tp=3", "rollout.tp: 3 does not divide the 2 devices of the servers; set 1 or 2"),
        (
            f"{APART} rollout.num_servers=3",
            "rollout.num_servers: 3 x rollout.tp=1 is not the servers' 2 devices; set 2",
        ),
        ("rollout.engine=local rollout.tp=2", "rollout.tp: is for SGLang servers that mdapo starts; the local engine"),
        ("rollout.urls=['http://h:1'] rollout.num_servers=2", "rollout.num_servers: is for SGLang servers that mdapo"),
        ("rollout.urls=['http://h:1'] rollout.server_python=/p", "rollout.server_python: is for SGLang servers that"),
        (
            f"rollout.urls=['http://h:1'] {APART}",
            "placement.rollout: is for SGLang servers that mdapo starts; rollout.u",
        ),
        (
            "rollout.engine_args={api_key: x}",
            "rollout.engine_args.api_key: is not to be given: each server gets a random",
        ),
        ("rollout.engine_args={tp: 2}", "rollout.engine_args.tp: is not to be given: set rollout.tp"),
        ("rollout.engine_args={host: 0.0.0.0}", "rollout.engine_args.host: is not to be given: servers listen on 127"),
        ("rollout.engine_args={tokenizer-worker-num: 2}", "tokenizer-worker-num: is not to be given: SGLang checks no"),
        ("rollout.start_timeout_s=0.5", "rollout.start_timeout_s: must be at least 1"),
    ],
)
def test_a_placement_that_contradicts_itself_is_refused(good: Path, overrides: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        config_of(good, overrides)
    assert says in str(error.value)


def test_by_default_servers_and_actor_share_all_devices(good: Path) -> None:
    config = config_of(good, "rollout.tp=2")
    assert colocated(config)
    assert actor_environment(config) == {}
    assert server_devices(config, kind="cuda", visible=5) == [(0, 1), (2, 3)]
    assert server_devices(config, kind="cpu", visible=1) == [()]
    assert server_devices(config_of(good, "rollout.num_servers=2"), kind="cpu", visible=1) == [(), ()]


def test_two_groups_keep_actor_and_servers_apart(good: Path) -> None:
    config = config_of(good, APART)
    assert not colocated(config)
    assert actor_environment(config) == {"MDAPO_DEVICE": "cuda", "MDAPO_DEVICE_IDS": "0,1"}
    assert server_devices(config, kind="cuda", visible=4) == [(2,), (3,)]


def test_one_group_for_both_is_colocated_whatever_it_is_called(good: Path) -> None:
    same = f"placement.groups=[{TRAIN}] placement.actor=train placement.rollout=train"
    assert colocated(config_of(good, same))
    unnamed = TRAIN.replace("train", "a").replace("device: cuda, ", "")
    assert colocated(
        config_of(good, f"placement.groups=[{TRAIN}, {unnamed}] placement.actor=a placement.rollout=train")
    )
    mixed = "placement.groups=[{name: a, device: cuda, ids: [0]}, {name: b, device: cpu}] placement.actor=a"
    assert not colocated(config_of(good, f"{mixed} placement.rollout=b"))


SHARED = f"placement.groups=[{TRAIN}] placement.actor=train"


def test_two_ranks_on_one_gpu_cannot_be_and_the_remedy_works(good: Path) -> None:
    with pytest.raises(UserError) as error:
        config_of(good, f"{SHARED} sync.mode=distributed")
    (problem,) = error.value.problems
    assert problem.startswith("sync.mode: distributed cannot be: the servers that mdapo starts share the actor's cuda")
    assert "NCCL has no two ranks on one; set tensor, or give them a group" in problem
    config_of(good, f"{SHARED} sync.mode=tensor")
    config_of(good, f"{APART} sync.mode=distributed")
    config_of(good, f"{SHARED} sync.mode=distributed rollout.urls=['http://h:1']")  # somebody else's devices
    config_of(good, f"{SHARED.replace('cuda', 'cpu').replace('[0, 1]', '[]')} sync.mode=distributed")  # gloo can
    with pytest.raises(UserError, match="HCCL has no two ranks"):
        config_of(good, f"{SHARED.replace('cuda', 'npu')} sync.mode=distributed")


def test_servers_cannot_work_while_the_actor_trains_on_their_devices(good: Path) -> None:
    with pytest.raises(UserError, match=r"rollout\.mode: async lets servers work while the actor trains, but the serv"):
        config_of(good, f"{SHARED} rollout.mode=async")
    config_of(good, f"{SHARED} rollout.mode=partial")
    config_of(good, f"{APART} rollout.mode=async")


def test_where_no_group_names_a_kind_of_device_the_one_that_is_found_decides(good: Path) -> None:
    config = config_of(good, "sync.mode=distributed rollout.mode=async")
    assert [p.key for p in sharing_problems(config, "cuda")] == ["sync.mode", "rollout.mode"]
    assert not list(sharing_problems(config, "cpu"))


def test_devices_that_the_machine_has_not_are_told(good: Path) -> None:
    with pytest.raises(UserError, match=r"there are 3 cuda devices, numbered from 0; \[3\] are not there"):
        server_devices(config_of(good, APART), kind="cuda", visible=3)
    with pytest.raises(UserError, match=r"1 servers x rollout.tp=4 need 4 devices, there are 2"):
        server_devices(config_of(good, "rollout.tp=4"), kind="cuda", visible=2)


def test_ranks_that_do_not_fit_the_actors_devices_are_told(good: Path) -> None:
    found = plan(config_of(good, APART), world_size=3, model=None).problems
    assert ("placement.actor", "2 devices do not divide 3 ranks; a rank drives one device") in [
        (p.key, p.text) for p in found
    ]
    assert not [p for p in plan(config_of(good, APART), world_size=4, model=None).problems if p.key.startswith("place")]


def test_the_python_of_the_servers_must_be_one_with_sglang(good: Path, tmp_path: Path) -> None:
    def told(python: str) -> list[str]:
        return [p.text for p in server_python_problems(config_of(good, f"rollout.server_python={json.dumps(python)}"))]

    assert told(str(tmp_path / "no"))[0].startswith("is no program that can be started")
    (without,) = told(sys.executable)
    assert without.startswith("has no SGLang") and "scripts/install_sglang_cpu.sh" in without
    (echo,) = told("/bin/echo")
    assert echo.startswith("is no Python interpreter: /bin/echo")
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho '\"0.5.19\"'\n")
    fake.chmod(0o755)
    assert told(str(fake)) == []


def test_without_such_a_python_sglang_must_be_beside_mdapo(good: Path) -> None:
    (problem,) = server_python_problems(config_of(good, ""))
    assert problem.text.startswith("is not set, and SGLang is not installed beside mdapo; name the Python that has it")
    assert not list(server_python_problems(config_of(good, "rollout.urls=['http://h:1']")))
