"""The promises as a step sees them: its batch is the one that it would be without faults, or it ends with an error."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from mdapo.config.schema import Config
from mdapo.data.prompts import PromptStream
from mdapo.environments.base import Observation
from mdapo.errors import UserError
from mdapo.rollout.dynamic_batch import Collected, DynamicBatch
from mdapo.rollout.engine import EngineError
from mdapo.rollout.health import State
from mdapo.rollout.sglang_engine import SGLangEngine
from mdapo.types import Message, Prompt

from ..unit.rollout.fakes import IndexRewards, ScriptedEnv, WordChat
from .engines import QUICK, engine_over
from .hostile_server import MISDEEDS, REFUSED, HostileServer, Script, logp_of

GROUPS, N, TURNS = 8, 4, 3


def batch_over(engine: SGLangEngine, *, timeout_s: float = 60.0) -> DynamicBatch:
    config = Config.model_validate(
        {
            "model": {"path": "x", "max_context": 400},
            "data": {"train_files": ["x"], "train_prompt_bsz": GROUPS},
            "rollout": {
                "n_resp_per_prompt": N,
                "max_turns": TURNS,
                "max_response_len": 200,
                "episode_timeout_s": timeout_s,
            },
        }
    )
    prompts = [Prompt(f"p{i}", i, (Message("user", f"{10 + i}"),)) for i in range(64)]
    says = [Observation((Message("user", str(50 + turn)),)) for turn in range(TURNS)]
    return DynamicBatch(
        engine,
        WordChat(),
        lambda prompt, *, seed, **_: ScriptedEnv(prompt, list(says)),
        IndexRewards(),
        PromptStream(prompts, seed=0, shuffle=False),
        config,
    )


@dataclass
class Step:
    collected: Collected | None = None
    error: Exception | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    states: list[State] = field(default_factory=list)
    running: int = 0  # at the servers, after the next step has begun


def step(
    scripts: Sequence[Script],
    *,
    token_s: float = 0.0,
    timeout_s: float = 60.0,
    meanwhile: Callable[[Sequence[HostileServer]], Any] | None = None,
    **timing: Any,
) -> Step:
    """One step over so many servers."""

    async def work() -> Step:
        found = Step()
        async with AsyncExitStack() as stack:
            servers = [
                await stack.enter_async_context(HostileServer(script, version="3", token_s=token_s))
                for script in scripts
            ]
            more = {"timing": QUICK} | timing
            engine = await stack.enter_async_context(engine_over([s.url for s in servers], version=3, **more))
            batch = batch_over(engine, timeout_s=timeout_s)
            beside = asyncio.ensure_future(meanwhile(servers)) if meanwhile else None
            try:
                found.collected = await batch.collect(3)
            except (UserError, EngineError) as error:
                found.error = error
            if beside is not None:
                await beside
            found.metrics = engine.metrics()
            found.states = [server.health.state for server in engine.fleet.servers]
            await engine.abort()
            found.running = sum(len(server.running) for server in servers)
        return found

    async def bounded() -> Step:
        async with asyncio.timeout(120):
            return await work()

    return asyncio.run(bounded())


def clean(_: int) -> str:
    return ""


def content(collected: Collected | None) -> list[Any]:
    """All that is trained on, in comparable form."""
    assert collected is not None
    return [
        (g.prompt.uid, e.index, e.prompt_ids.tolist(), [(t.role, t.ids.tolist(), t.version) for t in e.turns], e.end)
        for g in collected.groups
        for e in g.episodes
    ]


def all_good(collected: Collected | None) -> bool:
    assert collected is not None
    for turn in (t for g in collected.groups for e in g.episodes for t in e.turns if t.role == "assistant"):
        expected = np.array([logp_of(int(token)) for token in turn.ids], np.float32)
        assert np.array_equal(turn.logps[turn.mask], expected[turn.mask])
        assert turn.version == 3
    return True


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    found = step([clean, clean])
    assert all_good(found.collected)
    assert len(content(found.collected)) == GROUPS * N
    return content(found.collected)


def test_with_one_hostile_reply_in_a_hundred_the_batch_is_the_same(undisturbed: list[Any]) -> None:
    """Every misdeed that may be retried, the silent and the endless ones too, from both servers."""
    rng = random.Random(11)
    kinds = [name for name in MISDEEDS if name not in REFUSED]

    def script(_: int) -> str:
        return rng.choice(kinds) if rng.random() < 0.01 else ""

    bad = 0.0
    for _round in range(4):
        found = step([script, script], timing=replace(QUICK, attempt_s=3.0, attempts=8))
        assert all_good(found.collected)
        assert content(found.collected) == undisturbed
        bad += found.metrics["engine/failures"]
    assert bad >= 1


def test_a_server_killed_in_mid_generation_leaves_the_exact_batch(undisturbed: list[Any]) -> None:
    """Promise 2."""

    async def kill(servers: Sequence[HostileServer]) -> None:
        while len(servers[0].running) < 4 or servers[0].requests["/generate"] < 20:
            await asyncio.sleep(0.002)
        await servers[0].kill()

    found = step([clean, clean], token_s=0.01, meanwhile=kill)
    assert all_good(found.collected)
    assert content(found.collected) == undisturbed
    assert found.states == [State.DEAD, State.HEALTHY]
    assert found.metrics["engine/retries"] >= 4


@pytest.mark.parametrize(
    "misdeed", ["500", "reset in the body", "NaN", "wrong version", "400", "401", "redirect", "HTML"]
)
def test_where_every_reply_is_bad_a_step_ends_with_an_error_and_no_sample(misdeed: str) -> None:
    found = step([lambda _: misdeed] * 2)
    assert found.collected is None
    assert "conversations of this step failed" in str(found.error)
    assert "127.0.0.1" in str(found.error)
    assert found.running == 0


@pytest.mark.parametrize("requests", [8, GROUPS * N + 4])
def test_all_servers_killed_ends_the_step_with_an_error(requests: int) -> None:
    """At once, also where some conversations were complete: no prompt is given up for what servers did."""

    async def kill(servers: Sequence[HostileServer]) -> None:
        while sum(server.requests["/generate"] for server in servers) < requests:
            await asyncio.sleep(0.002)
        for server in servers:
            await server.kill()

    found = step([clean, clean], token_s=0.02, meanwhile=kill)
    assert found.collected is None
    assert isinstance(found.error, EngineError) and "is dead" in str(found.error)


def test_conversations_past_their_deadline_are_aborted_at_the_servers() -> None:
    """Case 25: they come back aborted, and nothing of ours runs on."""
    found = step([clean, clean], token_s=3.0, timeout_s=0.5)
    assert found.running == 0
    assert found.metrics["engine/in_flight"] == 0
    assert found.metrics["engine/aborts"] >= GROUPS * N
    assert found.metrics["engine/cut_off"] == 0
