"""Steps over two real servers: where turns go, and what becomes of a step when a server dies, stops or is left alone.

What is promised of engines, and what shows it:

- "One of two servers killed in mid-generation: the step completes with its exact batch. All servers dead: a clear error
  within 120 s": ``test_a_server_killed_in_mid_step_...``, ``test_a_scheduler_killed_alone_...``,
  ``test_a_stopped_server_...`` and ``test_both_servers_killed_...`` here; with scripted servers
  ``tests/faults/test_engine_faults.py`` and ``test_batch_faults.py``.
- "No bad sample enters a batch; a deadline per dialogue; 4xx not retried, 5xx with a cap": no real server answers so;
  ``tests/faults`` has a scripted one for each misdeed, at 1 % and at 100 % of replies. A wrong key, a wrong model and
  what is too long the real one refuses in ``test_engine_real.py``.
- "No token without the version that made it; a server with failed or half-applied weights serves nothing": each step
  here looks at the version of each turn; a server that was away is stale until it has the newest weights, and then says
  what the other one says. Half-applied weights of the real one: ``test_engine_real.py``; of scripted ones:
  ``tests/unit/sync/test_push.py``.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from mdapo.environments.base import Observation
from mdapo.errors import UserError
from mdapo.rollout.engine import EngineError
from mdapo.rollout.health import HealthLimits, State
from mdapo.rollout.sglang_options import ServerOptions
from mdapo.rollout.sglang_server import Server
from mdapo.types import Message, Prompt

from .conftest import running
from .stage import Place, Stage, lives, play, processes, scheduler, stage, traces, until, weights, whole

pytestmark = [pytest.mark.sglang, pytest.mark.model, pytest.mark.timeout(2400)]
MORE = 0.05


@pytest.fixture(scope="module")
def second_server(options: ServerOptions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    second = Server(options, log=tmp_path_factory.mktemp("second") / "1.log")
    yield second
    asyncio.run(second.stop())


@pytest.fixture
def pair(server: Server, second_server: Server) -> tuple[Server, Server]:
    return server, running(second_server)


def kill(server: Server) -> None:
    """SIGKILL to all of it, but for the guard."""
    os.killpg(processes(server)[0].pid, signal.SIGKILL)


def test_four_fifths_of_all_prompt_tokens_come_from_the_caches_of_two_servers(
    pair: tuple[Server, Server], tmp_path: Path
) -> None:
    """Eight samples a group and the quickstart's turns: a dialogue's turns and a group's samples keep to one server."""

    async def work() -> None:
        async with stage(pair, tmp_path, n=8) as on:
            await on.engine.update_weights(weights(), 1)
            step = asyncio.ensure_future(on.step(1))
            await on.busy(step)
            collected = await step
            await on.idle(on.places)
            whole(collected, version=1, n=8)
            found = on.engine.metrics()
            print(found, on.asked)
            assert min(on.asked.values()) >= sum(on.asked.values()) / 8, "each has a group at least"
            assert found["engine/cached_share"] >= 0.8
            assert (found["engine/retries"], found["engine/in_flight"]) == (0.0, 0.0)

    play(work())


def test_a_server_killed_in_mid_step_costs_no_group_and_serves_again_with_the_newest_weights(
    pair: tuple[Server, Server], tmp_path: Path
) -> None:
    """Where weights are on disk, it catches up by itself: with those that came while it was away."""

    async def work() -> None:
        async with stage(pair, tmp_path) as on:
            await on.engine.update_weights(weights(), 3)
            victim, was = on.places[1], on.places[1].url
            before = await on.says(3)
            old, there = [process.pid for process in processes(pair[1])], traces()
            step = asyncio.ensure_future(on.step(3))
            await on.busy(step)
            kill(pair[1])
            whole(await step, version=3)
            assert on.engine.metrics()["engine/retries"] >= 1
            on.asked.clear()
            await on.engine.update_weights(weights(by=MORE), 4)
            whole(await on.step(4), version=4)
            await until(lambda: victim.revival is None)
            await again_in_use(on, victim, version=4)
            after = await on.says(4)
            assert after.logps != pytest.approx(before.logps, abs=1e-2)
            assert victim.url != was
            assert was not in on.asked
            changes = [line for line in on.said if line.startswith((f"{was}:", f"{victim.url}:"))]
            states = order(changes)  # one that comes back while weights are brought is not told to be stale
            assert [state for state in states if state != "stale"] == ["dead", "restarting", "healthy"]
            assert victim.health.restarts == 1
            assert [pid for pid in old if lives(pid)] == []
            assert len(traces()) == len(there), "the new one has what the old one had"

    play(work())


def order(changes: Sequence[str]) -> list[str]:
    """The states that a server was told to have taken, without suspicions."""
    found = [line.split(" -> ")[1].split(":")[0] for line in changes if " -> " in line]
    return [state for state in found if state != "suspect"]


async def again_in_use(on: Stage, place: Place, *, version: int) -> None:
    """Steps, until the server takes part; no turn reaches it before it has the weights."""
    while not on.asked.get(place.url):
        whole(await on.step(version), version=version)
    assert place.health.serves(version)


def test_a_scheduler_killed_alone_costs_no_group_and_its_server_is_stale_until_the_next_weights(
    pair: tuple[Server, Server], tmp_path: Path
) -> None:
    """Where weights are nowhere kept (mode tensor), the next update waits for its restart."""

    async def work() -> None:
        async with stage(pair, tmp_path, mode="tensor") as on:
            await on.engine.update_weights(weights(), 5)
            victim = on.places[1]
            step = asyncio.ensure_future(on.step(5))
            await on.busy(step)
            scheduler(pair[1]).kill()
            whole(await step, version=5)
            assert not victim.health.serves(5)
            await until(lambda: victim.revival is None)
            whole(await on.step(5), version=5)
            assert not victim.health.serves(5)
            assert victim.health.state in (State.DEAD, State.RESTARTING, State.STALE)
            on.asked.clear()
            await on.engine.update_weights(weights(by=MORE), 6)
            assert [place.health.serves(6) for place in on.places] == [True, True]
            await on.says(6)
            whole(await on.step(6), version=6)
            assert set(on.asked) == {place.url for place in on.places}

    play(work())


def test_a_stopped_server_loses_its_turns_to_the_other_and_comes_back_stale(
    pair: tuple[Server, Server], tmp_path: Path
) -> None:
    """SIGSTOP: all connections stay open and nothing comes. It is another's, which we cannot start again."""

    async def work() -> None:
        async with stage(pair, tmp_path, restarts=False) as on:
            await on.engine.update_weights(weights(), 7)
            victim, step = on.places[1], asyncio.ensure_future(on.step(7))
            await on.busy(step)
            frozen = processes(pair[1])
            for process in frozen:
                process.suspend()
            try:
                whole(await step, version=7)
                assert victim.health.state is State.DEAD
                assert any(f"{victim.url}: healthy -> suspect" in line for line in on.said)
                await on.engine.update_weights(weights(by=MORE), 8)
                on.asked.clear()
                whole(await on.step(8), version=8)
                assert victim.url not in on.asked
            finally:
                for process in frozen:
                    process.resume()
            await again_in_use(on, victim, version=8)
            assert any(f"{victim.url}: dead -> stale" in line for line in on.said)
            await on.says(8)
            await on.idle(on.places)  # also what it was at when it was stopped

    play(work())


def test_a_server_that_dies_in_mid_sync_keeps_no_other_from_the_weights(
    pair: tuple[Server, Server], tmp_path: Path
) -> None:
    """Broadcast to both, one is killed after the first buckets: what the other has got is no version; the next pass,
    which a run makes at once, brings it all of them."""

    async def work() -> None:
        async with stage(pair, tmp_path, mode="distributed", restarts=False) as on:
            await on.engine.update_weights(weights(), 11)

            def deadly() -> Iterator[Any]:
                for number, item in enumerate(weights(by=MORE)):
                    if number == 100:
                        kill(pair[1])
                    yield item

            with pytest.raises(EngineError, match="no server took the weights of version 12"):
                await on.engine.update_weights(deadly(), 12)
            assert await on.places[0].client.version() == "half-12"
            assert not any(place.health.serves(12) or place.health.serves(11) for place in on.places)
            assert on.pusher.last is not None
            assert on.pusher.last.again == {on.places[0].url}
            await on.engine.update_weights(weights(by=MORE), 12)
            assert [place.health.serves(12) for place in on.places] == [True, False]
            whole(await on.step(12), version=12)

    play(work())


def test_nothing_listens_beyond_loopback_and_no_key_is_seen(pair: tuple[Server, Server], tmp_path: Path) -> None:
    """While both serve, and share a process group with us for their weights."""

    async def work() -> None:
        async with stage(pair, tmp_path, mode="distributed") as on:
            await on.engine.update_weights(weights(), 13)
            ours = [psutil.Process(), *processes(pair[0]), *processes(pair[1])]
            found = [address for process in ours for address in listening(process)]
            assert {f"http://{address.ip}:{address.port}" for address in found} >= {server.url for server in pair}
            assert len(found) > 2, "the group's store listens too"
            assert [address for address in found if not ipaddress.ip_address(address.ip).is_loopback] == []
            await on.step(13)
            files = [
                path for folder in (tmp_path, pair[0].log.parent, pair[1].log.parent) for path in folder.rglob("*")
            ]
            texts = {str(path): path.read_bytes() for path in files if path.is_file()}
            texts |= {f"{process.pid}: {kind}": seen(process, kind) for process in psutil.process_iter()
                      for kind in ("cmdline", "environ")}  # fmt: skip
            texts["said"] = repr((on, on.said, on.engine, on.places, on.engine.metrics(), pair)).encode()
            for server in pair:
                assert [name for name, text in texts.items() if server.key.encode() in text] == []

    play(work())


def listening(process: psutil.Process) -> list[Any]:
    return [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]


def seen(process: psutil.Process, kind: str) -> bytes:
    """``cmdline`` or ``environ`` of a process, as everybody with its rights sees it."""
    try:
        return Path(f"/proc/{process.pid}/{kind}").read_bytes()
    except OSError:
        return b""  # it has ended, or is another user's


class Broken:
    """Breaks the contract of environments in its second answer: an error of the plug-in's, which ends the step."""

    def __init__(self, prompt: Prompt, *, seed: int) -> None:
        self.prompt, self.answers = prompt, 0

    def opening(self) -> tuple[Message, ...]:
        return self.prompt.messages

    def observe(self, messages: Sequence[Message]) -> Observation:
        self.answers += 1
        if self.answers == 2:
            raise UserError("the environment is broken")
        return Observation((Message("user", "And then?"),))


def test_nothing_of_ours_runs_on_after_a_step_that_was_given_up(pair: tuple[Server, Server], tmp_path: Path) -> None:
    """Cancelled by a signal, aborted, or ended by an error in one of its conversations; the servers are asked."""

    async def work() -> None:
        async with stage(pair, tmp_path, environment=Broken) as on:
            await on.engine.update_weights(weights(), 9)
            step = asyncio.ensure_future(on.step(9))
            await on.busy(step)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            await on.idle(on.places)
            step = asyncio.ensure_future(on.step(9))
            await on.busy(step)
            await on.engine.abort()  # all conversations end with what they have
            await on.idle(on.places)
            await step
            step = asyncio.ensure_future(on.step(9))
            await on.busy(step)
            with pytest.raises(UserError, match="the environment is broken"):
                await step
            await on.idle(on.places)
            assert on.engine.metrics()["engine/in_flight"] == 0

    play(work())


def test_both_servers_killed_with_no_restart_left_is_one_clear_error_in_time(
    pair: tuple[Server, Server], tmp_path: Path
) -> None:
    async def work() -> None:
        async with stage(pair, tmp_path, limits=HealthLimits(restarts=0)) as on:
            await on.engine.update_weights(weights(), 10)
            step = asyncio.ensure_future(on.step(10))
            await on.busy(step)
            for one in pair:
                kill(one)
            async with asyncio.timeout(120):
                with pytest.raises(EngineError, match="no server can answer") as caught:
                    await step
            said = str(caught.value)
            for place in on.places:
                assert f"{place.url} is retired (" in said
            assert "after 0 restarts" in said

    play(work())
