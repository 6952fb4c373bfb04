"""One sync into recording servers: what arrives, in which order, and what becomes of a server that fails."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import MODEL, NBYTES, SHAPES, RecordingServer, weights
from torch import Tensor

from mdapo.errors import StorageError
from mdapo.rollout.engine import EngineError
from mdapo.sync.disk import DiskTransport
from mdapo.sync.memory import Colocated
from mdapo.sync.push import Outcome, Pusher
from mdapo.sync.servers import Fleet
from mdapo.sync.shared_memory import TensorTransport
from mdapo.sync.transport import Transport

UPDATE = "/update_weights_from_disk"


@pytest.fixture(params=["disk", "tensor"])
def transport(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Transport]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(os.listdir("/proc/self/fd"))
    made: Transport = (
        DiskTransport(tmp_path / "sync", timeout_s=5.0) if request.param == "disk" else TensorTransport(timeout_s=5.0)
    )
    yield made
    asyncio.run(made.close())
    assert not list(tmp_path.glob("mdapo-sync-*"))
    assert not [path for path in tmp_path.glob("**/*") if path.name.endswith(".partial")]
    gc.collect()  # a traceback may hold the last bucket
    assert set(os.listdir("/proc/self/fd")) <= before, "shared memory is still open"


def pusher(transport: Transport, *, bucket_bytes: int = 400, occupation: Any = None) -> Pusher:
    return Pusher(transport, MODEL, bucket_bytes=bucket_bytes, timeout_s=1.0, occupation=occupation)


def push(by: Pusher, servers: list[RecordingServer], version: int, stream: Any = None) -> Outcome:
    return asyncio.run(by.push(servers, stream or weights(version), version))


def fails(path: str, *, after: int = 0) -> Callable[[str, Any], None]:
    """The call number ``after`` (from 0) to ``path``, and all later ones, fail as a dead server's."""
    calls = iter(range(10**6))

    def refuse(asked: str, body: Any) -> None:
        if asked == path and next(calls) >= after:
            raise EngineError(f"{path} is dead")

    return refuse


def holds(server: RecordingServer, seed: int) -> bool:
    return all(torch.equal(server.held[name], tensor) for name, tensor in weights(seed))


def test_all_servers_get_every_weight_once_and_each_byte_is_sent_once(transport: Transport) -> None:
    servers = [RecordingServer(f"http://s{i}") for i in range(3)]
    by = pusher(transport)
    for version in (1, 2):
        outcome = push(by, servers, version)
        assert (outcome.synced, outcome.failed) == (tuple(server.url for server in servers), {})
        assert outcome.bytes_sent == NBYTES, "one engine group, however many servers are in it"
        for server in servers:
            assert holds(server, version)
            assert set(server.times.values()) == {version}
            assert (server.version, server.paused) == (str(version), False)
    assert transport.bytes_sent == 2 * NBYTES


def test_a_server_is_held_still_and_answers_for_no_version_until_it_is_checked(transport: Transport) -> None:
    server = RecordingServer()
    said: list[tuple[str, str, bool]] = []
    server.refuse = lambda path, body: said.append((path, server.version, server.paused))
    push(pusher(transport), [server], 7)
    updates = [entry for entry in said if entry[0] == UPDATE]
    assert updates and all(entry == (UPDATE, "half-7", True) for entry in updates)
    assert server.paths()[:3] == ["/pause_generation", "/flush_cache", "/update_weight_version"]
    assert server.paths()[-1] == "/continue_generation"
    assert server.paths().index("/get_weights_by_name") > max(
        i for i, path in enumerate(server.paths()) if path == UPDATE
    )


def test_a_request_that_still_runs_is_waited_for(transport: Transport) -> None:
    server = RecordingServer()
    server.busy = 2
    assert push(pusher(transport), [server], 1).synced == (server.url,)


@pytest.mark.parametrize(
    "path", ["/model_info", "/pause_generation", "/update_weight_version", UPDATE, "/get_weights_by_name"]
)
def test_a_server_that_fails_is_reported_and_the_others_are_synced(transport: Transport, path: str) -> None:
    good, bad = RecordingServer("http://good"), RecordingServer("http://bad")
    by = pusher(transport)
    push(by, [good, bad], 1)
    bad.refuse = fails(path)
    outcome = push(by, [bad, good], 2)
    assert outcome.synced == ("http://good",)
    assert list(outcome.failed) == ["http://bad"] and "is dead" in outcome.failed["http://bad"]
    assert holds(good, 2)
    if path not in ("/model_info", "/pause_generation"):
        assert bad.paused
    assert bad.version != "2"


def test_a_half_applied_update_leaves_a_server_without_a_known_version(transport: Transport) -> None:
    server = RecordingServer()
    by = pusher(transport)
    push(by, [server], 1)
    server.refuse = fails(UPDATE, after=1 if isinstance(transport, TensorTransport) else 0)
    outcome = push(by, [server], 2)
    assert (outcome.synced, list(outcome.failed)) == ((), [server.url])
    assert (server.version, server.paused) == ("half-2", True)
    if isinstance(transport, TensorTransport):
        assert not holds(server, 1) and not holds(server, 2), "that is what half means"
    server.refuse = lambda path, body: None
    assert push(by, [server], 3).synced == (server.url,)
    assert holds(server, 3) and (server.version, server.paused) == ("3", False)


def test_a_server_that_says_no_with_status_200_has_failed(transport: Transport) -> None:
    for answer in ({"success": False, "message": "Failed to update weights"}, {}, "ok", None):
        server = RecordingServer()
        server._update_weights_from_disk = lambda body, answer=answer: answer
        outcome = push(pusher(transport), [server], 1)
        assert "/update_weights_from_disk answered" in outcome.failed[server.url]


def test_wrong_values_on_a_server_leave_it_without_a_known_version(transport: Transport) -> None:
    server = RecordingServer()
    load = server._update_weights_from_disk

    def corrupt(body: Any) -> Any:
        answer = load(body)
        server.held = {name: tensor + 0.5 for name, tensor in server.held.items()}
        return answer

    server._update_weights_from_disk = corrupt
    outcome = push(pusher(transport), [server], 1)
    assert "holds other values than were sent" in outcome.failed[server.url]
    assert (server.version, server.paused) == ("half-1", True)


def test_a_stream_that_breaks_leaves_no_file_no_memory_and_no_version(transport: Transport) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(weights(1))[:4]
        raise RuntimeError("a rank is gone")

    server = RecordingServer()
    with pytest.raises(RuntimeError, match="a rank is gone"):
        push(pusher(transport), [server], 1, broken())
    assert server.version == "half-1"


def test_with_no_server_left_the_rest_of_the_weights_is_not_sent(tmp_path: Path) -> None:
    server = RecordingServer()
    server.refuse = fails(UPDATE)
    transport = TensorTransport(timeout_s=1.0)
    outcome = push(pusher(transport), [server], 1)
    assert list(outcome.failed) == [server.url]
    assert server.paths().count(UPDATE) == 1


def test_the_newest_folder_on_disk_stays_for_servers_that_are_started_later(tmp_path: Path) -> None:
    transport = DiskTransport(tmp_path, timeout_s=1.0)
    by, server = pusher(transport), RecordingServer()
    for version in (1, 2, 3):
        push(by, [server], version)
    assert [path.name for path in tmp_path.iterdir()] == ["weights-3"]
    late = RecordingServer("http://late")
    asyncio.run(by.again(late, 3))
    assert holds(late, 3) and (late.version, late.paused) == ("3", False)
    with pytest.raises(EngineError, match="version 2 are not on disk"):
        asyncio.run(by.again(late, 2))


def test_after_a_stream_that_broke_the_weights_on_disk_are_held_against_their_own_values(tmp_path: Path) -> None:
    by, server = pusher(DiskTransport(tmp_path, timeout_s=1.0)), RecordingServer()
    push(by, [server], 1)

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(weights(2))[:-1]
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        push(by, [server], 2, broken())
    asyncio.run(by.again(server, 1))
    assert holds(server, 1) and (server.version, server.paused) == ("1", False)


def test_without_a_disk_a_server_that_was_restarted_waits_for_the_next_sync() -> None:
    by, server = pusher(TensorTransport(timeout_s=1.0)), RecordingServer()
    push(by, [server], 1)
    with pytest.raises(EngineError, match="gets weights with the next sync"):
        asyncio.run(by.again(server, 1))


def test_a_full_disk_is_an_error_for_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    by, server = pusher(DiskTransport(tmp_path, timeout_s=1.0)), RecordingServer()
    push(by, [server], 1)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageError, match="No space left"):
        push(by, [server], 2)
    assert [path.name for path in tmp_path.iterdir()] == ["weights-1"]


def test_shared_memory_has_no_name_in_any_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server, seen = RecordingServer(), []
    load, before = server._update_weights_from_disk, set(os.listdir("/dev/shm"))

    def look(body: Any) -> Any:
        [file] = Path(body["model_path"]).iterdir()
        seen.append((os.readlink(file).split("/fd/")[0], Path(body["model_path"]).stat().st_mode & 0o777))
        assert set(os.listdir("/dev/shm")) == before
        return load(body)

    server._update_weights_from_disk = look
    assert push(pusher(TensorTransport(timeout_s=1.0)), [server], 1).synced
    assert set(seen) == {(f"/proc/{os.getpid()}", 0o700)}
    assert not list(tmp_path.iterdir())


def test_a_tensor_larger_than_a_bucket_passes_through_shared_memory(tmp_path: Path) -> None:
    server = RecordingServer()
    outcome = push(pusher(TensorTransport(timeout_s=1.0), bucket_bytes=16), [server], 1)
    assert outcome.synced and holds(server, 1)
    assert server.paths().count(UPDATE) == len(SHAPES)


def test_memory_is_released_when_idle_and_taken_back_weights_first_and_cache_last() -> None:
    server, occupation = RecordingServer(), Colocated(timeout_s=1.0)
    by = pusher(TensorTransport(timeout_s=1.0), occupation=occupation)
    push(by, [server], 1)
    assert not [path for path in server.paths() if "memory" in path], "nothing was away yet"
    server.asked.clear()
    asyncio.run(occupation.give_back(Fleet.of([server])))
    assert server.away == {"weights", "kv_cache", "cuda_graph"}
    push(by, [server], 2)
    assert holds(server, 2) and not server.away
    steps = [(path, body["tags"]) for path, body in server.asked if path == "/resume_memory_occupation"]
    assert [tags for _, tags in steps] == [["weights"], ["kv_cache", "cuda_graph"]]
    order = [path for path in server.paths() if path in (UPDATE, "/resume_memory_occupation")]
    assert order[0] == order[-1] == "/resume_memory_occupation" and set(order[1:-1]) == {UPDATE}


def test_a_server_that_was_restarted_meanwhile_has_nothing_to_take_back() -> None:
    server, occupation = RecordingServer(), Colocated(timeout_s=1.0)
    by = pusher(TensorTransport(timeout_s=1.0), occupation=occupation)
    push(by, [server], 1)
    asyncio.run(occupation.give_back(Fleet.of([server])))
    server.version, server.away = "default", set()  # another process under the same address
    assert push(by, [server], 2).synced == (server.url,)
