"""Promises 2, 3 and 4: no bad sample, a deadline for everything, and no token without the version that made it."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mdapo.config.model_facts import require_facts
from mdapo.errors import UserError
from mdapo.rollout.engine import Completion, EngineError
from mdapo.rollout.health import State
from mdapo.rollout.sglang_servers import Address
from mdapo.rollout.sglang_timing import Timing
from mdapo.sync.memory import Colocated

from .engines import MODEL, QUICK, WEIGHTS, engine_over, is_right, request
from .hostile_server import ABORTED, KEY, REFUSED, RETRIED, VOCAB, HostileServer

SLOW = ("silent", "dripping", "dripping header")  # they take an attempt's whole deadline


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(120):
            return await work

    return asyncio.run(bounded())


@pytest.mark.parametrize("misdeed", [*RETRIED, *ABORTED])
def test_what_one_server_does_wrong_another_makes_good(misdeed: str) -> None:
    """One server is hostile in every reply, the other is not: every turn comes out right."""

    async def work() -> None:
        async with HostileServer(lambda _: misdeed) as bad, HostileServer() as good:
            timing = quick(attempt_s=3.0) if misdeed in SLOW else QUICK
            async with engine_over([bad.url, good.url], timing=timing) as engine:
                asked = [request(i) for i in range(24)]
                found = await asyncio.gather(*map(engine.generate, asked))
                assert all(map(is_right, asked, found))
                assert bad.deeds[misdeed] >= 1

    run(work())


def quick(**changes: float) -> Timing:
    return replace(QUICK, **changes)


@pytest.mark.parametrize("misdeed", [*RETRIED, *ABORTED])
def test_where_all_is_wrong_a_turn_fails_within_its_attempts(misdeed: str) -> None:
    async def work() -> None:
        async with HostileServer(lambda _: misdeed) as bad:
            timing = quick(attempt_s=0.2) if misdeed in SLOW else QUICK
            async with engine_over([bad.url], timing=timing) as engine:
                with pytest.raises(EngineError):
                    await engine.generate(request())
                assert 1 <= bad.requests["/generate"] <= QUICK.attempts

    run(work())


@pytest.mark.parametrize("misdeed", REFUSED)
def test_a_refused_turn_is_not_asked_again_anywhere(misdeed: str) -> None:
    async def work() -> None:
        async with (
            HostileServer(lambda _: misdeed) as one,
            HostileServer(lambda _: misdeed) as two,
            engine_over([one.url, two.url]) as engine,
        ):
            with pytest.raises(EngineError):
                await engine.generate(request())
            assert one.requests["/generate"] + two.requests["/generate"] == 1
            assert engine.metrics()["engine/retries"] == 0
            assert {s.health.state for s in engine.fleet.servers} == {State.HEALTHY}  # the request was at fault

    run(work())


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_a_share_of_hostile_replies_costs_time_only(share: float) -> None:
    """Every misdeed in turn, at 1 % and at 30 % of replies of both servers."""
    rng = random.Random(5)
    kinds = [name for name in [*RETRIED, *ABORTED] if name not in SLOW]

    def script(_: int) -> str:
        return rng.choice(kinds) if rng.random() < share else ""

    async def work() -> None:
        async with HostileServer(script) as one, HostileServer(script) as two:
            timing = quick(attempts=12)
            async with engine_over([one.url, two.url], timing=timing) as engine:
                asked = [request(i) for i in range(400)]
                found = []
                for start in range(0, 400, 40):
                    found += await asyncio.gather(*map(engine.generate, asked[start : start + 40]))
                assert all(map(is_right, asked, found))
                bad = sum((one.deeds + two.deeds).values()) - (one.deeds + two.deeds)[""]
                assert bad >= 400 * share / 2

    run(work())


def test_a_killed_server_costs_its_turns_a_retry() -> None:
    """In mid-generation, with turns open at both: all come out right, from the other one."""

    async def work() -> None:
        async with (
            HostileServer(token_s=0.05) as one,
            HostileServer(token_s=0.05) as two,
            engine_over([one.url, two.url]) as engine,
        ):
            asked = [request(i) for i in range(40)]
            turns = [asyncio.ensure_future(engine.generate(r)) for r in asked]
            while not (len(one.running) > 5 and len(two.running) > 5):
                await asyncio.sleep(0.005)
            await one.kill()
            found = await asyncio.gather(*turns)
            assert all(map(is_right, asked, found))
            assert engine.metrics()["engine/retries"] >= 5
            assert [s.health.state for s in engine.fleet.servers] == [State.DEAD, State.HEALTHY]

    run(work())


def test_all_servers_killed_is_a_clear_error_soon_and_at_once_from_then_on() -> None:
    async def work() -> None:
        async with (
            HostileServer(token_s=0.2) as one,
            HostileServer(token_s=0.2) as two,
            engine_over([one.url, two.url]) as engine,
        ):
            turns = [asyncio.ensure_future(engine.generate(request(i))) for i in range(8)]
            while len(one.running) + len(two.running) < 8:
                await asyncio.sleep(0.005)
            await one.kill()
            await two.kill()
            for outcome in await asyncio.gather(*turns, return_exceptions=True):
                assert isinstance(outcome, EngineError)
                assert f"{one.url} is dead" in str(outcome)
                assert f"{two.url} is dead" in str(outcome)
            engine._pause = None  # type: ignore[assignment, method-assign] - it was waited for once
            with pytest.raises(EngineError, match="no server can answer"):
                await engine.generate(request())

    run(work())


def test_without_a_way_to_catch_up_nobody_waits_for_a_restart() -> None:
    async def work() -> None:
        async with (
            HostileServer() as one,
            engine_over([one.url], resync=False, timing=quick(down_s=1000.0)) as engine,
        ):
            await one.kill()
            with pytest.raises(EngineError, match="no server can answer"):
                await engine.generate(request())

    run(work())


def test_a_restarted_server_serves_again_only_with_the_weights() -> None:
    """Killed, started anew by the callable with the version of its folder, brought the newest from disk, serving."""

    async def work() -> None:
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(HostileServer(token_s=0.02))
            second: list[HostileServer] = []

            async def restart(address: Address) -> Address:
                assert address.url == first.url
                second.append(await stack.enter_async_context(HostileServer(version="default", token_s=0.02)))
                return Address(second[0].url, address.key)

            async with engine_over([first.url], version=7, restart=restart) as engine:
                asked = [request(i) for i in range(12)]
                turns = [asyncio.ensure_future(engine.generate(r)) for r in asked]
                while len(first.running) < 6:
                    await asyncio.sleep(0.005)
                await first.kill()
                found = await asyncio.gather(*turns)
                assert all(is_right(a, f, version=7) for a, f in zip(asked, found, strict=True))
                assert second[0].version == "7"
                assert engine.metrics()["engine/restarts"] == 1

    run(work())


def test_a_server_that_cannot_be_restarted_is_retired_after_its_budget() -> None:
    tries = 0

    async def restart(address: Address) -> Address:
        nonlocal tries
        tries += 1
        raise RuntimeError("no GPU left")

    async def work() -> None:
        async with HostileServer() as one, engine_over([one.url], restart=restart) as engine:
            await one.kill()
            with pytest.raises(EngineError, match=r"retired \(its restart failed: no GPU left \(after 3 restarts"):
                await engine.generate(request())
            assert tries == 3
            with pytest.raises(EngineError, match="no server is there to take the weights"):
                await engine.update_weights(WEIGHTS, 1)

    run(work())


def test_a_server_that_refused_the_weights_serves_nothing() -> None:
    async def work() -> None:
        async with (
            HostileServer() as one,
            HostileServer() as two,
            engine_over([one.url, two.url], resync=False) as engine,
        ):
            one.refuse_weights = True
            await engine.update_weights(WEIGHTS, 1)
            asked = [request(i) for i in range(16)]
            found = await asyncio.gather(*map(engine.generate, asked))
            assert all(is_right(a, f, version=1) for a, f in zip(asked, found, strict=True))
            assert one.requests["/generate"] == 0
            one.refuse_weights = False
            await engine.update_weights(WEIGHTS, 2)
            await asyncio.gather(*(engine.generate(request(i)) for i in range(100, 116)))
            assert one.requests["/generate"] > 0

    run(work())


def test_an_update_that_breaks_half_way_leaves_nothing_serving() -> None:
    async def work() -> None:
        async with HostileServer() as one, engine_over([one.url], resync=False) as engine:

            def half() -> Any:
                yield WEIGHTS[0]
                raise RuntimeError("a rank died")

            with pytest.raises(RuntimeError, match="a rank died"):
                await engine.update_weights(half(), 1)
            with pytest.raises(EngineError, match=r"stale \(an update to version 1 began and was not finished"):
                await engine.generate(request())
            assert one.requests["/generate"] == 0

    run(work())


def test_a_server_that_says_it_took_the_weights_and_has_others_is_found_out() -> None:
    async def work() -> None:
        async with HostileServer() as one, engine_over([one.url], version=None, resync=False) as engine:

            async def liar(*_: object) -> dict[str, str]:
                return {}

            engine.sync = liar
            with pytest.raises(EngineError, match="it says that it has version '0'"):
                await engine.update_weights(WEIGHTS, 3)

    run(work())


def test_before_any_weights_nothing_is_served() -> None:
    async def work() -> None:
        async with HostileServer() as one, engine_over([one.url], version=None, resync=False) as engine:
            with pytest.raises(EngineError, match="no weights of this run yet"):
                await engine.generate(request())
            assert one.requests["/generate"] == 0

    run(work())


@pytest.mark.parametrize("at", ["its turns", "its groups' prompts"])
def test_a_stopped_process_is_left_and_taken_back(at: str) -> None:
    """SIGSTOP: connections stay open and nothing comes. Its turns move; after SIGCONT it is stale, then serves."""
    program = Path(__file__).parent / "hostile_server.py"
    process = subprocess.Popen([sys.executable, str(program), "0", "0.02"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = f"http://127.0.0.1:{int(process.stdout.readline())}"

    async def work() -> None:
        async with HostileServer(token_s=0.02) as good:
            timing = quick(attempt_s=60.0, turn_s=60.0, probe_s=1.0)
            async with engine_over([url, good.url], timing=timing, share_prompts=at != "its turns") as engine:
                frozen = engine.fleet.servers[0]
                asked = [request(i) for i in range(40)]
                turns = [asyncio.ensure_future(engine.generate(r)) for r in asked]
                while len(frozen.flights) < 5 and not (at != "its turns" and frozen.flights):
                    await asyncio.sleep(0)
                process.send_signal(signal.SIGSTOP)
                found = await asyncio.gather(*turns)
                assert all(map(is_right, asked, found))
                assert frozen.health.state is State.DEAD
                assert not frozen.flights
                process.send_signal(signal.SIGCONT)
                turn = 100
                while frozen.health.state is not State.HEALTHY:
                    assert is_right(request(turn), await engine.generate(request(turn)))
                    turn += 1
                    await asyncio.sleep(0.01)

    try:
        run(work())
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        process.stdout.close()


def test_an_abort_reaches_the_servers_and_nothing_of_ours_runs_after_it() -> None:
    """Case 25."""

    async def work() -> None:
        async with (
            HostileServer(token_s=5.0) as one,
            HostileServer(token_s=5.0) as two,
            engine_over([one.url, two.url]) as engine,
        ):
            turns = [asyncio.ensure_future(engine.generate(request(i))) for i in range(20)]
            while len(one.running) + len(two.running) < 20:
                await asyncio.sleep(0.005)
            session = request(0).session
            await engine.abort(session)
            assert (await turns[0]).finish == "abort"
            assert len(one.running) + len(two.running) == 19
            await engine.abort()
            assert not one.running
            assert not two.running
            found = await asyncio.gather(*turns)
            assert {f.finish for f in found} == {"abort"}
            assert len(one.aborted) + len(two.aborted) == 20
            assert engine.metrics()["engine/in_flight"] == 0

    run(work())


def test_a_turn_whose_caller_has_gone_is_ended_at_its_server() -> None:
    """An episode's deadline cancels the caller; nobody needs to call abort for that."""

    async def work() -> None:
        async with HostileServer(token_s=5.0) as one, engine_over([one.url]) as engine:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await engine.generate(request())
            while one.running:
                await asyncio.sleep(0.01)
            assert one.aborted == one.rids

    run(work())


def test_a_turn_that_waits_for_a_server_is_aborted_at_once() -> None:
    async def work() -> Completion:
        async with (
            HostileServer() as one,
            engine_over([one.url], timing=quick(down_s=100.0, turn_s=100.0)) as engine,
        ):
            await one.kill()
            turn = asyncio.ensure_future(engine.generate(request()))
            while engine.fleet.servers[0].health.state is not State.DEAD:
                await asyncio.sleep(0.01)
            await engine.abort(request().session)
            return await turn

    assert run(work()) == Completion((), (), "abort", 0)


def test_a_server_deaf_to_aborts_is_cut_off() -> None:
    """A router without an abort route, say. The connection is closed, which SGLang notices; it is counted and told."""

    async def work() -> None:
        async with HostileServer(token_s=30.0) as one, engine_over([one.url]) as engine:
            turn = asyncio.ensure_future(engine.generate(request()))
            while not one.running:
                await asyncio.sleep(0.01)
            one.deaf = True
            await engine.abort()
            assert (await turn).finish == "abort"
            assert engine.metrics()["engine/cut_off"] == 1

    run(work())


def test_weights_wait_for_no_turn_and_none_runs_on() -> None:
    async def work() -> None:
        async with HostileServer(token_s=5.0) as one, engine_over([one.url]) as engine:
            turn = asyncio.ensure_future(engine.generate(request()))
            while not one.running:
                await asyncio.sleep(0.01)
            with pytest.raises(EngineError, match="1 requests still run on the old weights"):
                await engine.update_weights(WEIGHTS, 1)
            await engine.abort()
            await turn
            await engine.update_weights(WEIGHTS, 1)

    run(work())


def test_servers_that_gave_their_memory_back_serve_nothing_until_the_next_weights() -> None:
    """A server that keeps its memory is told, and is brought the next weights all the same. What is really freed, only
    a GPU can show."""

    async def work() -> None:
        occupation, said = Colocated(timeout_s=10.0), []
        async with HostileServer() as one, HostileServer() as two:
            two.refuse_weights = True
            urls = [one.url, two.url]
            async with engine_over(
                urls, resync=False, version=None, occupation=occupation, notify=said.append
            ) as engine:
                two.refuse_weights = False
                await engine.update_weights(WEIGHTS, 1)
                two.refuse_weights = True
                await engine.give_back(engine.sync.__self__.give_back)  # type: ignore[attr-defined] - the pusher's
                assert one.away == {"kv_cache", "weights", "cuda_graph"} and not two.away
                assert [line for line in said if two.url in line and "did not give its memory back" in line]
                with pytest.raises(EngineError, match="it gave its memory back while the actor trains"):
                    await engine.generate(request())
                two.refuse_weights = False
                await engine.update_weights(WEIGHTS, 2)
                assert not one.away
                asked = [request(i) for i in range(16)]
                found = await asyncio.gather(*map(engine.generate, asked))
                assert all(is_right(a, f, version=2) for a, f in zip(asked, found, strict=True))
                assert one.requests["/generate"] > 0 and two.requests["/generate"] > 0

    run(work())


def test_one_server_can_be_asked_alone_and_only_once() -> None:
    async def work() -> None:
        async with HostileServer() as one, HostileServer() as two, engine_over([one.url, two.url]) as engine:
            for client in engine.clients:
                assert is_right(request(), await engine.ask(client, request()))
            assert (one.requests["/generate"], two.requests["/generate"]) == (1, 1)
            two.script = lambda _: "500"
            with pytest.raises(EngineError, match="500"):
                await engine.ask(engine.clients[1], request())
            assert (one.requests["/generate"], two.requests["/generate"]) == (1, 2)

    run(work())


def test_turns_and_groups_keep_to_their_server() -> None:
    async def work() -> None:
        async with HostileServer() as one, HostileServer() as two, engine_over([one.url, two.url]) as engine:
            for _turn in range(3):
                await asyncio.gather(*(engine.generate(request(i)) for i in range(64)))
            homes = engine.routes._session
            for group in range(16):
                assert len({homes[request(4 * group + i).session] for i in range(4)}) == 1
            assert one.requests["/generate"] % 3 == 0
            assert min(one.requests["/generate"], two.requests["/generate"]) >= 3 * 4 * 6
            found = engine.metrics()
            assert (found["engine/turns"], found["engine/retries"]) == (192.0, 0.0)
            assert found["engine/cached_share"] == 0.5

    run(work())


def test_no_task_and_no_connection_is_left_behind() -> None:
    async def work() -> None:
        async with (
            HostileServer() as one,
            engine_over([one.url]) as engine,
        ):
            await asyncio.gather(*(engine.generate(request(i)) for i in range(8)))
            await asyncio.sleep(0)
            own = asyncio.current_task()
            left = [
                t for t in asyncio.all_tasks() if t is not own and "_serve" not in repr(t) and "work" not in repr(t)
            ]
            assert not [t for t in left if "sglang" in repr(t)]

    run(work())


def test_behind_a_router_weights_and_aborts_go_to_the_workers() -> None:
    """A stand-in for SGLang's router, which passes on neither: it answers turns itself here."""

    async def work() -> None:
        async with AsyncExitStack() as stack:
            router = await stack.enter_async_context(HostileServer(version="5", token_s=5.0))
            workers = [await stack.enter_async_context(HostileServer()) for _ in range(2)]
            for worker in workers:
                worker.running = router.running  # whoever is told, the request ends
            urls = [worker.url for worker in workers]
            engine = await stack.enter_async_context(engine_over(urls, version=5, router=Address(router.url, KEY)))
            assert [worker.version for worker in workers] == ["5", "5"]
            turns = [asyncio.ensure_future(engine.generate(request(i))) for i in range(4)]
            while len(router.running) < 4:
                await asyncio.sleep(0.01)
            await engine.abort()
            assert {(await turn).finish for turn in turns} == {"abort"}
            assert router.requests["/abort_request"] == router.requests["/update_weights_from_disk"] == 0
            assert [worker.requests["/generate"] for worker in workers] == [0, 0]
            workers[1].refuse_weights = True
            with pytest.raises(EngineError, match="no such folder"):
                await engine.update_weights(WEIGHTS, 6)

    run(work())


def test_the_start_says_all_that_is_wrong_with_the_servers() -> None:
    async def work() -> None:
        async with HostileServer() as one, HostileServer() as two, engine_over([one.url, two.url]) as engine:
            await engine.check(max_context=4096, model=MODEL)
            assert engine.description == f"SGLang: {one.url}, {two.url}; seeds honoured; contexts of 4096 tokens"
            two.original_logprobs = True
            with pytest.raises(UserError) as caught:
                await engine.check(max_context=5000, model=replace(MODEL, architecture="B"))
            said = str(caught.value)
            assert (
                f"{one.url}: takes 4096 tokens, model.max_context is 5000; start it with --context-length 5006" in said
            )
            assert f"{one.url}: serves A, model.path is B" in said
            assert f"{two.url}: its log-probs are not those at the temperature" in said

    run(work())


def test_a_server_with_a_smaller_vocabulary_is_told_before_the_run() -> None:
    async def work() -> None:
        async with HostileServer() as one, engine_over([one.url]) as engine:
            await engine.check(max_context=100)
            one.vocab = VOCAB - 1
            with pytest.raises(UserError, match=f"a vocabulary of {VOCAB} ids: it serves another model"):
                await engine.check(max_context=100)

    run(work())


def test_a_server_of_another_model_of_the_same_kind_is_told_before_the_run(tmp_path: Path) -> None:
    """Its folder can be read here; a folder that cannot, or a name from a hub, tells nothing."""
    shape = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
             "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}  # fmt: skip
    for name, more in (("ours", {}), ("theirs", {"num_hidden_layers": 5, "rope_theta": 20000.0})):
        (tmp_path / name).mkdir()
        config = {"architectures": ["LlamaForCausalLM"], **shape, **more}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    ours = replace(require_facts(tmp_path / "ours"), architecture="A")  # as the scripted server says

    async def work() -> None:
        async with HostileServer() as one, engine_over([one.url]) as engine:
            for folder in (str(tmp_path / "ours"), str(tmp_path / "nowhere"), "hub/model", ""):
                one.started_from = folder
                await engine.check(max_context=100, model=ours)
            one.started_from = str(tmp_path / "theirs")
            with pytest.raises(UserError) as caught:
                await engine.check(max_context=100, model=ours)
            assert str(caught.value) == (
                f"{one.url}: the model in {tmp_path / 'theirs'} is not model.path's: num_hidden_layers 5 instead of 4, "
                "rope_theta 20000.0 instead of 10000.0"
            )

    run(work())


def test_a_stale_server_that_was_left_paused_is_not_taken_for_dead() -> None:
    """It makes no tokens, so that a question after its health has no answer; with the weights it goes on."""

    async def work() -> None:
        async with HostileServer() as one, engine_over([one.url], timing=quick(down_s=30.0)) as engine:
            one.refuse_weights = one.ill = True
            with pytest.raises(EngineError, match="no server took the weights"):
                await engine.update_weights(WEIGHTS, 1)
            one.refuse_weights = False
            assert (await engine.generate(request())).version == 1

    run(work())


def test_a_groups_prompt_is_computed_before_its_dialogues_ask_and_once_a_server() -> None:
    """By a request for one token of its own, also where that comes to nothing."""

    async def work() -> None:
        async with (
            HostileServer(lambda number: "500" if number == 0 else "", token_s=0.01) as one,
            engine_over([one.url], share_prompts=True) as engine,
        ):
            for turn in (1, 2):
                asked = [request(i) for i in range(8)]  # two groups of four
                found = await asyncio.gather(*map(engine.generate, asked))
                assert all(map(is_right, asked, found))
                assert one.requests["/generate"] == 2 + 8 * turn
            assert one.deeds["500"] == 1
            assert engine.metrics()["engine/failures"] == 0
            for i in range(8):
                await engine.release(request(i).session)
            await engine.generate(request())
            assert one.requests["/generate"] == 2 + 16 + 2
            await engine.abort()  # which drops the caches
            await engine.generate(request(1))
            assert one.requests["/generate"] == 2 + 16 + 4

    run(work())


def test_an_abort_ends_those_that_wait_for_their_groups_prompt_and_a_caller_that_goes_ends_his_own() -> None:
    async def work() -> None:
        async with HostileServer(token_s=5.0) as one, engine_over([one.url], share_prompts=True) as engine:
            turns = [asyncio.ensure_future(engine.generate(request(i))) for i in range(4)]
            while not one.running:
                await asyncio.sleep(0.005)
            await engine.abort()
            assert {f.finish for f in await asyncio.gather(*turns)} == {"abort"}
            assert (one.requests["/generate"], len(one.running)) == (1, 0)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await engine.generate(request())
            while one.running:
                await asyncio.sleep(0.01)
            assert len(one.aborted) == 2

    run(work())


def test_a_server_that_never_answers_for_a_groups_prompt_costs_its_turns_one_attempt() -> None:
    """Half of what a turn has: then another server has them, and this one answers for it."""

    async def work() -> None:
        timing = replace(QUICK, turn_s=6.0, attempt_s=3.0, abort_s=0.5)
        async with (
            HostileServer(lambda number: "silent") as mute,
            HostileServer() as good,
            engine_over([mute.url, good.url], timing=timing, share_prompts=True) as engine,
        ):
            asked = [request(i) for i in range(8)]  # two groups, a home each
            found = await asyncio.gather(*map(engine.generate, asked))
            assert all(map(is_right, asked, found))
            assert mute.requests["/generate"] == 1
            assert engine.fleet.servers[0].health.state is State.SUSPECT

    run(work())
