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
from transformers import AutoModelForCausalLM

from mdapo.config.model_facts import require_facts
from mdapo.errors import UserError
from mdapo.rollout.engine import Completion, Engine, EngineError, Request, SamplingParams
from mdapo.rollout.local_engine import LocalEngine
from mdapo.rollout.sglang_client import open_session
from mdapo.rollout.sglang_engine import SGLangEngine
from mdapo.rollout.sglang_server import Server
from mdapo.rollout.sglang_servers import Address
from mdapo.rollout.sglang_timing import Timing
from mdapo.sync.disk import DiskTransport
from mdapo.sync.push import Pusher

from .conftest import CONTEXT, MODEL
from .stage import play, stage, weights

pytestmark = [pytest.mark.sglang, pytest.mark.model, pytest.mark.timeout(1200)]
VOCAB = 49152
GREEDY = SamplingParams(16, temperature=0.0)
PROMPTS, TIE = 32, 1e-5  # of random ids; log-probs nearer than this are equal
WARM = SamplingParams(24, temperature=0.7, stop_ids=(2,))
MORE = 0.05  # by which weights differ where others are brought
Use = Callable[[SGLangEngine], Coroutine[Any, Any, Any]]


@pytest.fixture(scope="module")
def local() -> LocalEngine:
    return LocalEngine(MODEL, dtype="float32", max_running=16, max_context=1024, threads=1)


def use(server: Server, work: Use, *, version: int = 1) -> Any:
    """``work`` with an engine that has brought the server the model's weights as ``version``."""

    async def run() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            transport = DiskTransport(Path(folder), timeout_s=120.0)
            pusher = Pusher(transport, require_facts(MODEL), bucket_bytes=128 << 20, timeout_s=120.0)
            engine = SGLangEngine(
                [Address(server.url, server.key)],
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


def test_greedy_tokens_and_logprobs_are_those_of_the_local_engine_and_of_transformers(
    server: Server, local: LocalEngine
) -> None:
    """fp32, of 32 prompts together. Where two tokens are so close that rounding decides, either may stand."""
    greedy = replace(GREEDY, ignore_eos=True)
    theirs: list[Completion] = use(server, lambda engine: all_of(engine, greedy, PROMPTS))
    ours = asyncio.run(all_of(local, greedy, PROMPTS))
    reference = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    ties = 0
    for prompt, remote, near in zip(prompts(PROMPTS), theirs, ours, strict=True):
        assert remote.version == 1
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *remote.ids]])).logits[0, len(prompt) - 1 : -1]
        logps = logits.log_softmax(-1)
        best = logps.max(-1)
        chosen = logps.gather(-1, torch.tensor(remote.ids)[:, None])[:, 0]
        assert (best.values - chosen).max() < TIE, "transformers would not have written this"
        assert (chosen - torch.tensor(remote.logps)).abs().max() < 1e-4
        ties += best.indices.tolist() != list(remote.ids)
        if near.ids == remote.ids:
            assert gap(near, remote) < 1e-4
        else:  # of the local engine: up to where they part, which must be such a tie
            at = next(i for i, (a, b) in enumerate(zip(near.ids, remote.ids, strict=True)) if a != b)
            assert abs(near.logps[at] - remote.logps[at]) < TIE
            ties += 1
    print(f"{ties} ties in {PROMPTS} prompts")
    assert ties <= 1


def test_logprobs_at_a_temperature_are_those_of_the_local_engine(server: Server, local: LocalEngine) -> None:
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


def test_turns_of_a_dialogue_find_their_prefix_in_the_cache(server: Server) -> None:
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


def test_an_abort_in_mid_generation_returns_what_there_is_and_leaves_nothing_running(server: Server) -> None:
    async def work(engine: SGLangEngine) -> list[Completion]:
        client = engine.fleet.servers[0].client
        long = SamplingParams(900, temperature=0.0, ignore_eos=True)
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
    assert all(0 < len(c.ids) == len(c.logps) < 900 for c in found)


def test_an_abort_that_follows_at_once_is_not_lost(server: Server) -> None:
    """SGLang does not hear an abort that overtakes its request."""

    async def work(engine: SGLangEngine) -> list[Completion]:
        long = SamplingParams(900, temperature=0.0, ignore_eos=True)
        turns = [asyncio.ensure_future(ask(engine, prompt, long, i)) for i, prompt in enumerate(prompts(8))]
        await asyncio.sleep(0)
        await engine.abort()
        assert await engine.fleet.servers[0].client.running() == 0
        return await asyncio.gather(*turns)

    assert {c.finish for c in use(server, work)} == {"abort"}


def test_new_weights_change_the_tokens_and_their_version(server: Server) -> None:
    async def work(engine: SGLangEngine) -> tuple[Completion, Completion, Completion]:
        prompt = prompts(1)[0]
        before = await ask(engine, prompt, GREEDY, 0)
        await engine.update_weights(weights(by=MORE), 8)
        changed = await ask(engine, prompt, GREEDY, 0)
        await engine.update_weights(weights(), 9)
        return before, changed, await ask(engine, prompt, GREEDY, 0)

    before, changed, after = use(server, work, version=7)
    assert (before.version, changed.version, after.version) == (7, 8, 9)
    assert changed.logps[0] != pytest.approx(before.logps[0], abs=1e-3)
    assert after.ids == before.ids
    assert gap(before, after) < 1e-5


def test_a_version_that_somebody_else_set_makes_the_server_stale(server: Server) -> None:
    """And, with the weights on disk, it is brought back."""

    async def work(engine: SGLangEngine) -> Completion:
        client = engine.fleet.servers[0].client
        await client.post("/update_weight_version", {"new_version": "99"}, deadline_s=30.0)
        return await ask(engine, prompts(1)[0], GREEDY, 0)

    assert use(server, work, version=4).version == 4


@pytest.mark.parametrize("mode", ["tensor", "distributed", "disk"])
def test_half_applied_weights_serve_nothing(server: Server, tmp_path: Path, mode: str) -> None:
    """The stream breaks after some buckets; what the server has then is of no version, until all have come. From disk,
    where whole ones are kept, it gets those of before at once."""

    def half() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(weights(by=MORE)):
            if number == 100:
                raise RuntimeError("a rank died")
            yield item

    async def work() -> None:
        async with stage([server], tmp_path, mode=mode, restarts=False) as on:
            [place] = on.places
            await on.engine.update_weights(weights(), 1)
            before = await on.says(1)
            with pytest.raises(RuntimeError, match="a rank died"):
                await on.engine.update_weights(half(), 2)
            assert await place.client.version() == "half-2"
            if mode == "disk":
                assert (await ask(on.engine, prompts(1)[0], GREEDY, 0)).version == 1
                assert gap(before, await on.says(1)) < 1e-5
            else:
                with pytest.raises(EngineError, match="an update to version 2 began and was not finished"):
                    await ask(on.engine, prompts(1)[0], GREEDY, 0)
            await on.engine.update_weights(weights(by=MORE), 3)
            other = await on.says(3)
            assert other.logps[0] != pytest.approx(before.logps[0], abs=1e-3)
            await on.engine.update_weights(weights(), 4)
            assert gap(before, await on.says(4)) < 1e-5

    play(work())


def test_what_a_server_is_is_checked_before_a_run(server: Server) -> None:
    """The model that is asked for is another one than the real server has: that is what an operator mixes up."""
    facts = require_facts(MODEL)

    async def work(engine: SGLangEngine) -> None:
        client = engine.fleet.servers[0].client
        # as a run leaves it that is killed while it brings weights
        await client.post("/pause_generation", {"mode": "abort"}, deadline_s=30.0)
        await engine.check(max_context=CONTEXT - 6, model=facts)
        assert f"contexts of {CONTEXT - 6} tokens" in engine.description
        with pytest.raises(UserError) as caught:
            await engine.check(max_context=CONTEXT - 5, model=replace(facts, architecture="Qwen2ForCausalLM"))
        assert f"--context-length {CONTEXT + 1}" in str(caught.value)
        assert "serves LlamaForCausalLM, model.path is Qwen2ForCausalLM" in str(caught.value)
        with pytest.raises(UserError, match=r"num_hidden_layers 30 instead of 32, rope_theta 100000\.0 instead of"):
            await engine.check(max_context=100, model=replace(facts, layers=32, rope_theta=1e4))
        client.vocab_size = VOCAB + 1
        with pytest.raises(UserError, match=rf"\[0, {VOCAB}\).* of {VOCAB + 1} ids: it serves another model"):
            await engine.check(max_context=100)

    use(server, work)


def test_a_server_whose_matrices_are_of_another_size_takes_no_weights(server: Server, tmp_path: Path) -> None:
    """Where its folder cannot be seen from here. SGLang cuts what is too long without a word; it is read back."""
    wider = replace(require_facts(MODEL), ffn=1537)

    def rows() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights():
            more = [n - m for n, m in zip(wider.weight_shapes()[name], tensor.shape, strict=True)]
            yield name, torch.nn.functional.pad(tensor, [x for n in reversed(more) for x in (0, n)])

    async def work() -> None:
        async with stage([server], tmp_path, mode="tensor", restarts=False) as on:
            pusher = Pusher(on.pusher.transport, wider, bucket_bytes=64 << 20, timeout_s=100.0)
            client = on.places[0].client
            failed = await pusher.send([client], rows(), 2)
            assert "values came back" in failed[server.url]
            assert await client.version() == "half-2"
            await on.engine.update_weights(weights(), 3)
            await on.says(3)

    play(work())


def test_a_prompt_and_a_turn_fill_the_context_to_the_last_token(server: Server) -> None:
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


def test_a_wrong_key_is_told_before_a_run_and_not_shown(server: Server) -> None:
    async def work() -> str:
        async with stage([Address(server.url, "another-key")], Path("."), mode="tensor", restarts=False) as on:
            with pytest.raises(UserError) as caught:
                await on.engine.check(max_context=100)
            return str(caught.value)

    said = play(work())
    assert said.startswith(f"{server.url}/model_info: 401 ")
    assert said.endswith("(is this the key of that server?)")
    assert "another-key" not in said
