"""Which way of the weights a configuration asks for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from recording import MODEL, RecordingServer, weights

from mdapo.config.schema import Config
from mdapo.device import Device
from mdapo.errors import UserError
from mdapo.sync.build import build_pusher, chosen_mode, own_address, own_folder
from mdapo.sync.disk import DiskTransport
from mdapo.sync.distributed import DistributedTransport
from mdapo.sync.shared_memory import TensorTransport

HERE = "http://127.0.0.1:1"


def config(**sync: object) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"train_files": ["a"]}, "sync": sync})


@pytest.mark.parametrize(
    ("mode", "transport"),
    [("tensor", TensorTransport), ("disk", DiskTransport), ("distributed", DistributedTransport)],
)
def test_each_mode_has_its_transport(mode: str, transport: type, tmp_path: Path) -> None:
    pusher = build_pusher(
        config(mode=mode), MODEL, device=Device("cpu"), servers_on="cpu", urls=[HERE], ranks=1, colocated=True
    )
    assert type(pusher.transport) is transport


def test_what_else_lies_in_the_folder_of_weights_stays(tmp_path: Path) -> None:
    """Runs that share it, of one name too, do not remove each other's weights, nor their user's."""
    (tmp_path / "weights-of-mine").mkdir()
    folders = []
    for run in ("a", "b"):
        asked = config(mode="disk", dir=str(tmp_path))
        asked = asked.model_copy(update={"run": asked.run.model_copy(update={"dir": run})})
        pusher = build_pusher(
            asked, MODEL, device=Device("cpu"), servers_on="cpu", urls=[HERE], ranks=1, colocated=True
        )
        folders.append(own_folder(asked))
        outcome = asyncio.run(pusher.push([RecordingServer()], weights(), 1))
        assert not outcome.failed
    assert sorted(tmp_path.iterdir()) == sorted([*folders, tmp_path / "weights-of-mine"])
    assert all((folder / "weights-1").is_dir() for folder in folders)


def test_servers_here_are_reached_from_the_loopback_and_get_shared_memory() -> None:
    assert own_address([HERE, "http://localhost:2"]) in ("127.0.0.1", "::1")
    assert chosen_mode(config(), [HERE]) == "tensor"
    assert chosen_mode(config(mode="disk"), [HERE]) == "disk"


def test_a_server_that_is_nowhere_is_an_error_for_people() -> None:
    with pytest.raises(UserError, match=r"no-such-host\.invalid:1: no way there"):
        own_address(["http://no-such-host.invalid:1"])
