"""The engine against the real SGLang server on a CPU, beside the local engine with the same weights."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from mdapo.config.model_facts import require_facts
from mdapo.errors import UserError
from mdapo.rollout.engine import Completion, Engine, EngineError, Request, SamplingParams
from mdapo.rollout.local_engine import LocalEngine
from mdapo.rollout.sglang_client import Client, open_session
from mdapo.rollout.sglang_engine import SGLangEngine
from mdapo.rollout.sglang_replies import Refused
from mdapo.rollout.sglang_servers import Address, Timing
from mdapo.sync.disk import DiskTransport
from mdapo.sync.push import Pusher

from .real_server import CONTEXT, MODEL, real_server

pytestmark = [pytest.mark.sglang, pytest.mark.model, pytest.mark.timeout(1200)]
VOCAB = 49152
GREEDY = SamplingParams(16, temperature=0.0)
WARM = SamplingParams(24, temperature=0.7, stop_ids=(2,))
Use = Callable[[SGLangEngine], Coroutine[Any, Any, Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with real_server(tmp_path_factory.mktemp("sglang") / "server.log") as found:
        yield found


@pytest.fixture(scope="module")
def local() -> LocalEngine:
    return LocalEngine(MODEL, dtype="float32", max_running=16, max_context=1024, threads=1)


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(MODEL.glob("*.safetensors")):
        with safe_open(file, framework="pt") as held:
            for name in held.keys():  # noqa: SIM118 - not a dict
                yield name, held.get_tensor(name)


def use(server: tuple[str, str], work: Use, *, version: int = 1) -> Any:
    """``work`` with an engine that has brought the server the model's weights as ``version``."""

    async def run() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            transport = DiskTransport(Path(folder), timeout_s=120.0)
            pusher = Pusher(transport, require_facts(MODEL), bucket_bytes=128 << 20, timeout_s=120.0)
            engine = SGLangEngine(
                [Address(*server)],
                session=open_session(),
                vocab_size=VOCAB,
                sync=pusher.send,
                resync=pusher.again,
                timing=Timing(turn_s=300.0, attempt_s=300.0, probe_s=60.0, abort_s=60.0),
            )
            try:
                async with asyncio.timeout(600):
                    await engine.update_weights(weights(), version)
                    return await work(engine)
            finally:
                await engine.close()
                await pusher.close()

    return asyncio.run(run())


def prompts(count: int, length: int = 40, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, 40000) for _ in range(length)] for _ in range(count)]


def ask(engine: Engine, prompt: Sequence[int], params: SamplingParams, number: int, seed: int = 0) -> Any:
    return engine.generate(Request(prompt, params, f"g/{number}", "g", seed))


async def all_of(engine: Engine, params: SamplingParams, count: int) -> list[Completion]:
    return await asyncio.gather(*(ask(engine, p, params, i) for i, p in enumerate(prompts(count))))


def gap(ours: Completion, theirs: Completion) -> float:
    return max(abs(a - b) for a, b in zip(ours.logps, theirs.logps, strict=True))


def test_greedy_tokens_and_logprobs_are_the_local_engines(server: tuple[str, str], local: LocalEngine) -> None:
    theirs = use(server, lambda engine: all_of(engine, GREEDY, 4))
    ours = asyncio.run(all_of(local, GREEDY, 4))
    assert [c.ids for c in theirs] == [c.ids for c in ours]
    assert {c.version for c in theirs} == {1}
    assert max(map(gap, ours, theirs)) < 1e-4


def test_logprobs_at_a_temperature_are_those_of_the_local_engine(server: tuple[str, str], local: LocalEngine) -> None:
    """Before top-p and top-k, whatever else is in the batch: the server samples, the local engine scores its tokens one
    by one, as the first token of a longer prompt."""

    async def mixed(engine: SGLangEngine) -> list[Completion]:
        params = [WARM, replace(WARM, top_p=0.8, top_k=40), GREEDY]
        asked = zip(params, prompts(3), strict=True)
        return await asyncio.gather(*(ask(engine, prompt, p, i) for i, (p, prompt) in enumerate(asked)))

    found: list[Completion] = use(server, mixed)
    for prompt, completion, temperature in zip(prompts(3), found, (0.7, 0.7, 1.0), strict=True):
        logps = scored(local, prompt, completion.ids, temperature)
        assert len(completion.ids) >= 1
        assert max(abs(a - b) for a, b in zip(logps, completion.logps, strict=True)) < 1e-4


def scored(local: LocalEngine, prompt: Sequence[int], ids: Sequence[int], temperature: float) -> list[float]:
    """Log-probs of given tokens by the local model's own forward over the whole sequence."""
    asyncio.run(local.abort())  # what is written to its cache here is none of its dialogues
    tokens = [*prompt, *ids]
    plan, _ = local.model.plan([(0, 0, tokens[:1])])
    rows = [local.model.forward(plan)[0]]
    for at in range(1, len(tokens) - 1):
        plan, _ = local.model.plan([(0, at, tokens[at : at + 1])])
        rows.append(local.model.forward(plan)[0].clone())
    logps = torch.log_softmax(torch.stack(rows).float() / temperature, -1)
    start = len(prompt) - 1
    return [float(logps[start + i, token]) for i, token in enumerate(ids)]


def test_turns_of_a_dialogue_find_their_prefix_in_the_cache(server: tuple[str, str]) -> None:
    """Three turns of four samples: from the second turn on at least 80 % of the prompt comes from the cache."""

    async def talk(engine: SGLangEngine) -> list[float]:
        shares = []

        async def dialogue(number: int) -> None:
            ids = list(prompts(1, length=100)[0])
            for turn in range(3):
                done = await ask(engine, ids, replace(WARM, max_new_tokens=16), number, seed=turn)
                if turn:
                    shares.append(done.cached_tokens / len(ids))
                ids += [*done.ids, *prompts(1, length=10, seed=turn + 7)[0]]

        await asyncio.gather(*map(dialogue, range(4)))
        return shares

    shares = use(server, talk)
    assert len(shares) == 8
    assert sum(shares) / len(shares) >= 0.8


def test_an_abort_in_mid_generation_returns_what_there_is_and_leaves_nothing_running(server: tuple[str, str]) -> None:
    async def work(engine: SGLangEngine) -> list[Completion]:
        client = engine.fleet.servers[0].client
        long = SamplingParams(1500, temperature=0.0, ignore_eos=True)
        turns = [asyncio.ensure_future(ask(engine, prompt, long, i)) for i, prompt in enumerate(prompts(3))]
        while await client.running() < 3:
            await asyncio.sleep(0.1)
        await asyncio.sleep(2.0)
        await engine.abort("g/0")
        first = await turns[0]
        assert not turns[1].done()
        await engine.abort()
        assert await client.running() == 0
        assert engine.metrics()["engine/cut_off"] == 0
        return [first, *await asyncio.gather(*turns[1:])]

    found = use(server, work)
    assert {c.finish for c in found} == {"abort"}
    assert all(0 < len(c.ids) == len(c.logps) < 1500 for c in found)


def test_an_abort_that_follows_at_once_is_not_lost(server: tuple[str, str]) -> None:
    """SGLang does not hear an abort that overtakes its request."""

    async def work(engine: SGLangEngine) -> list[Completion]:
        long = SamplingParams(1500, temperature=0.0, ignore_eos=True)
        turns = [asyncio.ensure_future(ask(engine, prompt, long, i)) for i, prompt in enumerate(prompts(8))]
        await asyncio.sleep(0)
        await engine.abort()
        assert await engine.fleet.servers[0].client.running() == 0
        return await asyncio.gather(*turns)

    assert {c.finish for c in use(server, work)} == {"abort"}


def test_new_weights_change_the_tokens_and_their_version(server: tuple[str, str]) -> None:
    def noisy() -> Iterator[tuple[str, torch.Tensor]]:
        torch.manual_seed(0)
        for name, tensor in weights():
            yield name, tensor + 0.02 * torch.randn_like(tensor)

    async def work(engine: SGLangEngine) -> tuple[Completion, Completion, Completion]:
        prompt = prompts(1)[0]
        before = await ask(engine, prompt, GREEDY, 0)
        await engine.update_weights(noisy(), 8)
        changed = await ask(engine, prompt, GREEDY, 0)
        await engine.update_weights(weights(), 9)
        return before, changed, await ask(engine, prompt, GREEDY, 0)

    before, changed, after = use(server, work, version=7)
    assert (before.version, changed.version, after.version) == (7, 8, 9)
    assert changed.logps[0] != pytest.approx(before.logps[0], abs=1e-3)
    assert (after.ids, after.cached_tokens) == (before.ids, 0)
    assert gap(before, after) < 1e-5


def test_a_version_that_somebody_else_set_makes_the_server_stale(server: tuple[str, str]) -> None:
    """And, with the weights on disk, it is brought back."""

    async def work(engine: SGLangEngine) -> Completion:
        client = engine.fleet.servers[0].client
        await client.post("/update_weight_version", {"new_version": "99"}, deadline_s=30.0)
        return await ask(engine, prompts(1)[0], GREEDY, 0)

    assert use(server, work, version=4).version == 4


def test_what_a_server_is_is_checked_before_a_run(server: tuple[str, str]) -> None:
    async def work(engine: SGLangEngine) -> str:
        await engine.check(max_context=1024, architecture="LlamaForCausalLM")
        assert f"contexts of {CONTEXT - 6} tokens" in engine.description
        with pytest.raises(UserError) as caught:
            await engine.check(max_context=CONTEXT - 5, architecture="Qwen2ForCausalLM")
        return str(caught.value)

    said = use(server, work)
    assert f"--context-length {CONTEXT + 1}" in said
    assert "serves LlamaForCausalLM, model.path is Qwen2ForCausalLM" in said


def test_a_prompt_and_a_turn_fill_the_context_to_the_last_token(server: tuple[str, str]) -> None:
    """What ``check`` lets through is served, whatever the shares of prompt and turn."""
    longest = CONTEXT - 6

    async def work(engine: SGLangEngine) -> Completion:
        prompt = prompts(1, length=longest - 1)[0]
        found = await ask(engine, prompt, replace(GREEDY, max_new_tokens=1, ignore_eos=True), 0)
        assert len(found.ids) == 1
        with pytest.raises(EngineError, match="maximum allowed length"):
            await ask(engine, [*prompt, 5], replace(GREEDY, max_new_tokens=1), 1)
        return found

    assert use(server, work).finish == "length"


def test_a_wrong_key_is_refused(server: tuple[str, str]) -> None:
    async def run() -> None:
        async with open_session() as session:
            client = Client(server[0], "another-key", session=session, vocab_size=VOCAB)
            with pytest.raises(Refused, match="401"):
                await client.info()

    asyncio.run(run())
