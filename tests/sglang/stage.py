"""Steps of a run over real servers: the quickstart's prompts, customers and limits, the engine and the sync that a run
has, and no trainer."""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors import safe_open

from mdapo.config.load import load
from mdapo.config.model_facts import require_facts
from mdapo.config.schema import Config
from mdapo.data.chat import ChatFormat
from mdapo.data.prompts import PromptStream, load_prompts
from mdapo.device import Device
from mdapo.environments.base import EnvironmentFactory
from mdapo.environments.calling import load_environment
from mdapo.rollout.dynamic_batch import Collected, DynamicBatch
from mdapo.rollout.engine import Completion, SamplingParams
from mdapo.rollout.health import HealthLimits
from mdapo.rollout.sglang_client import open_session
from mdapo.rollout.sglang_engine import SGLangEngine
from mdapo.rollout.sglang_server import Server
from mdapo.rollout.sglang_servers import Address, Timing
from mdapo.rollout.sglang_servers import Server as Place
from mdapo.sync.build import build_pusher
from mdapo.sync.push import Pusher

from ..unit.rollout.fakes import IndexRewards
from .conftest import MODEL, ROOT, START_S

GROUPS, N = 4, 4
GREEDY = SamplingParams(8, temperature=0.0, ignore_eos=True)
PROMPT = [1, 504, 3575, 282, 4649, 314]  # <|im_start|>The capital of France is
WORK_S = 900.0  # a test's work, on a machine that is busy with other things
PATIENCE = Timing(
    turn_s=600.0, attempt_s=600.0, probe_every_s=1.0, probe_s=8.0, down_s=60.0, start_s=START_S, abort_s=60.0
)


def weights(*, by: float = 0.0) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's, each larger by this share."""
    for file in sorted(MODEL.glob("*.safetensors")):
        with safe_open(file, framework="pt") as held:
            for name in held.keys():  # noqa: SIM118 - not a dict
                tensor = held.get_tensor(name)
                yield name, tensor * (1.0 + by) if by else tensor


def settings(folder: Path, *, mode: str, groups: int, n: int) -> Config:
    """The quickstart's, for fewer conversations."""
    changes = {
        "model.path": str(MODEL),
        "model.dtype": "float32",
        "rollout.engine": "sglang",
        "rollout.n_resp_per_prompt": str(n),
        "rollout.max_running": "32",
        "data.train_prompt_bsz": str(groups),
        "data.gen_batch_size": str(groups),
        "actor.ppo_mini_batch_size": str(groups),
        "algorithm.advantage.credit": "episode",
        "sync.mode": mode,
        "sync.dir": str(folder / "weights"),
        "sync.timeout_s": "300",
        "sync.bucket_mb": "32",  # a good part of a dozen
    }
    if mode != "disk":
        del changes["sync.dir"]
    loaded = load(ROOT / "configs" / "quickstart.yaml", [f"{key}={value}" for key, value in changes.items()])
    return loaded.config


@dataclass
class Stage:
    """``asked`` counts the turns that each server was sent; ``said`` has what the engine told."""

    engine: SGLangEngine
    batch: DynamicBatch
    pusher: Pusher
    asked: dict[str, int] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    @property
    def places(self) -> list[Place]:
        return self.engine.fleet.servers

    async def step(self, version: int) -> Collected:
        return await self.batch.collect(version)

    async def says(self, version: int) -> Completion:
        """What each server makes of a prompt, greedily, by these weights: all of them the same."""
        first, *others = [
            await place.client.generate(
                PROMPT, GREEDY, rid=uuid.uuid4().hex, seed=0, version=version, deadline_s=PATIENCE.attempt_s
            )
            for place in self.places
        ]
        for other in others:
            assert other.ids == first.ids
            assert other.logps == pytest.approx(first.logps, abs=1e-4)
        return first

    async def busy(self, step: asyncio.Future[Any], *, least: int = 3) -> None:
        """Until each server has so many turns of ours; ``step`` would end it too early."""
        while min(len(place.flights) for place in self.places) < least:
            assert not step.done(), "the step was over before anything could be done to it"
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # some tokens are there

    async def idle(self, places: Sequence[Place]) -> None:
        """No request at these servers, who are asked. Their own count is some forward passes old."""
        end = time.monotonic() + 20.0
        while counts := {place.url: n for place in places if (n := await place.client.running(deadline_s=60.0))}:
            assert time.monotonic() < end, f"requests still run: {counts}"
            await asyncio.sleep(0.1)


@asynccontextmanager
async def stage(
    servers: Sequence[Server | Address],
    folder: Path,
    *,
    mode: str = "disk",
    groups: int = GROUPS,
    n: int = N,
    limits: HealthLimits | None = None,
    restarts: bool = True,
    environment: EnvironmentFactory | None = None,
) -> AsyncGenerator[Stage]:
    """``restarts``: the servers are ours to start again, as a run's own are; an ``Address`` is somebody else's."""
    config = settings(folder, mode=mode, groups=groups, n=n)
    facts = require_facts(MODEL)
    pusher = build_pusher(
        config, facts, device=Device("cpu"), servers_on="cpu", urls=[s.url for s in servers], ranks=1, colocated=False
    )
    said: list[str] = []
    asked: dict[str, int] = {}

    async def restart(address: Address) -> Address:
        server = next(server for server in servers if server.url == address.url)
        assert isinstance(server, Server)
        await server.stop()
        await server.start(START_S)
        return Address(server.url, server.key)

    engine = SGLangEngine(
        [Address(server.url, server.key) for server in servers],
        session=open_session(),
        vocab_size=facts.vocab,
        sync=pusher.send,
        resync=pusher.again if mode == "disk" else None,
        restart=restart if restarts else None,
        max_running=config.rollout.max_running,
        timing=PATIENCE,
        limits=limits,
        notify=said.append,
    )
    take_off = engine.take_off

    def counted(request: Any, place: Place) -> Any:
        asked[place.url] = asked.get(place.url, 0) + 1
        return take_off(request, place)

    engine.take_off = counted  # type: ignore[method-assign] - which server is asked is nobody else's business
    prompts = load_prompts(config.data.train_files, config.data)
    batch = DynamicBatch(
        engine,
        ChatFormat.from_folder(str(MODEL)),
        environment or load_environment(config.environment),
        IndexRewards(),
        PromptStream(prompts, seed=0, shuffle=True),
        config,
    )
    try:
        yield Stage(engine, batch, pusher, asked, said)
    finally:
        await engine.close()
        await pusher.close()


def play(work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(WORK_S):
            return await work

    return asyncio.run(bounded())


def processes(server: Server) -> list[psutil.Process]:
    """SGLang's, without the guard; the first leads their group."""
    assert server._guard is not None
    return psutil.Process(server._guard.pid).children(recursive=True)


def scheduler(server: Server) -> psutil.Process:
    """The one that computes, and so the largest by far, of those that the first one has made."""
    leader, *others = processes(server)
    return max((p for p in others if p.ppid() == leader.pid), key=lambda p: p.memory_info().rss)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def traces() -> set[str]:
    """What SGLang leaves in shared memory, the guard's folders, and a sync's."""
    shared = {str(p) for pattern in ("sglang_*", "sem.mp-*", "sgl_*") for p in Path("/dev/shm").glob(pattern)}
    return shared | {str(p) for name in ("sgl", "sync") for p in Path(tempfile.gettempdir()).glob(f"mdapo-{name}-*")}


def whole(collected: Collected, *, version: int, groups: int = GROUPS, n: int = N) -> None:
    """The exact batch, nothing of which failed, every token of these weights."""
    assert len(collected.groups) == groups
    assert {len(group.episodes) for group in collected.groups} == {n}
    for episode in (e for g in collected.groups for e in g.episodes):
        assert episode.end not in ("error", "aborted")
        assert {t.version for t in episode.turns if t.role == "assistant"} == {version}
        assert episode.num_model_tokens > 0


async def until(check: Callable[[], bool]) -> None:
    """``play`` ends it."""
    while not check():
        await asyncio.sleep(0.05)
