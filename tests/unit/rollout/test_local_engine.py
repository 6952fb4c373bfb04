"""The local engine end to end on tiny random models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mdapo.config.model_facts import require_facts
from mdapo.config.weight_files import require_weights
from mdapo.rollout.engine import Completion, EngineError, Request, SamplingParams
from mdapo.rollout.local_engine import LocalEngine
from mdapo.rollout.local_weights import read_weights

SaveTiny = Callable[..., Path]


def make(folder: Path, **args: Any) -> LocalEngine:
    defaults: dict[str, Any] = {"dtype": "float32", "max_running": 8, "max_context": 256, "threads": 1}
    return LocalEngine(folder, **defaults | args)


def weights_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    return read_weights(require_weights(folder, require_facts(folder)))


def ask(ids: Sequence[int], *, new: int = 12, session: str = "a", seed: int = 1, **params: Any) -> Request:
    return Request(ids=list(ids), params=SamplingParams(new, **params), session=session, group="g", seed=seed)


def run(engine: LocalEngine, *requests: Request) -> list[Completion]:
    async def together() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(r) for r in requests)))

    return asyncio.run(together())


def prompt(count: int, seed: int) -> list[int]:
    return torch.randint(0, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_greedy_tokens_and_logps_are_those_of_transformers(tiny_model: Path) -> None:
    ids = prompt(20, 1)
    (got,) = run(make(tiny_model), ask(ids, temperature=0.0))
    reference = AutoModelForCausalLM.from_pretrained(tiny_model).float().eval()
    whole = torch.tensor([ids + list(got.ids)])
    with torch.no_grad():
        logps = reference(whole).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    assert logps.argmax(-1).tolist() == list(got.ids)
    assert list(got.logps) == pytest.approx(logps.max(-1).values.tolist(), abs=2e-5)
    assert (got.finish, got.version, len(got.ids)) == ("length", 0, 12)


def test_a_stop_token_ends_the_turn_and_stays_in_it(tiny_model: Path) -> None:
    engine, ids = make(tiny_model), prompt(20, 1)
    (free,) = run(engine, ask(ids))
    (stopped,) = run(engine, ask(ids, stop_ids=(free.ids[4],), session="b"))
    assert stopped.ids == free.ids[: free.ids.index(free.ids[4]) + 1]
    assert stopped.finish == "stop"
    (ignored,) = run(engine, ask(ids, stop_ids=(free.ids[4],), ignore_eos=True, session="c"))
    assert ignored.ids == free.ids


def test_tokens_do_not_depend_on_company_slots_or_prefix_sharing(tiny_model: Path) -> None:
    shared = prompt(40, 2)
    requests = [ask(shared + prompt(i % 3, i), session=str(i), seed=i, new=3 + i) for i in range(20)]
    alone = [run(make(tiny_model), r)[0] for r in requests]
    together = run(make(tiny_model), *requests)
    for one, other in zip(alone, together, strict=True):
        assert one.ids == other.ids
        assert one.logps == pytest.approx(other.logps, abs=2e-5)
    assert sum(c.cached_tokens for c in together) > 15 * 35


def test_the_same_requests_give_the_same_bits(tiny_model: Path) -> None:
    requests = [ask(prompt(10 + i, i), session=str(i), seed=i, new=4 + i) for i in range(20)]
    assert run(make(tiny_model), *requests) == run(make(tiny_model), *requests)


def test_a_dialogue_keeps_its_cache_over_turns(tiny_model: Path) -> None:
    engine, ids = make(tiny_model), prompt(30, 3)
    (first,) = run(engine, ask(ids))
    longer = [*ids, *first.ids, *prompt(7, 4)]
    (second,) = run(engine, ask(longer, seed=2))
    assert second.cached_tokens == len(ids) + len(first.ids) - 1  # the last token was never fed
    (fresh,) = run(make(tiny_model), ask(longer, seed=2))
    assert fresh.cached_tokens == 0
    assert second.ids == fresh.ids


def test_more_dialogues_than_slots_wait_and_all_are_served(tiny_model: Path) -> None:
    async def dialogue(engine: LocalEngine, number: int) -> list[int]:
        ids = prompt(20, number)
        for turn in range(3):
            done = await engine.generate(ask(ids, session=f"d{number}", seed=10 * number + turn, new=5))
            ids = [*ids, *done.ids, *prompt(4, turn)]
        await engine.release(f"d{number}")
        return ids

    async def all_of_them(engine: LocalEngine, count: int) -> list[list[int]]:
        return list(await asyncio.gather(*(dialogue(engine, i) for i in range(count))))

    few = asyncio.run(all_of_them(make(tiny_model, max_running=3), 11))
    many = asyncio.run(all_of_them(make(tiny_model, max_running=11), 11))
    assert few == many


def test_idle_dialogues_lose_their_slot_least_recently_used_first(tiny_model: Path) -> None:
    engine = make(tiny_model, max_running=2)
    ids = {name: prompt(30, i) for i, name in enumerate("abc")}
    for name in "abac":  # b is the one not used for longest when c needs a slot
        run(engine, ask(ids[name], session=name))
    assert run(engine, ask(ids["a"], session="a"))[0].cached_tokens == 29
    assert run(engine, ask(ids["b"], session="b"))[0].cached_tokens == 0


def test_dialogues_left_over_move_together_and_say_the_same(tiny_model: Path) -> None:
    """When the others have ended, the last ones are decoded as a small batch, not as a sparse large one."""
    requests = [ask(prompt(20, i), session=str(i), seed=i, new=60 if i in (3, 7) else 4) for i in range(8)]

    async def talk(engine: LocalEngine, request: Request) -> Completion:
        done = await engine.generate(request)
        moved.append([engine._slots.slot_of(s) for s in "37"])
        await engine.release(request.session)
        return done

    async def together() -> list[Completion]:
        engine = make(tiny_model)
        return list(await asyncio.gather(*(talk(engine, r) for r in requests)))

    moved: list[list[int | None]] = []
    completions = asyncio.run(together())
    assert moved[0] == [3, 7]
    assert moved[-2] in ([3, 4], [4, 3])
    for completion, request in zip(completions, requests, strict=True):
        assert completion.ids == run(make(tiny_model), request)[0].ids


def test_the_engine_says_what_it_chose(tiny_model: Path) -> None:
    assert make(tiny_model).description.endswith("1 threads, 8 dialogues x 256 tokens")


def test_a_long_prompt_is_fed_in_pieces_beside_decoding(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        ask(prompt(150, 1), session="long"),
        ask(prompt(60, 2), session="b"),
        ask(prompt(5, 3), session="c", new=30),
    ]
    whole = run(make(tiny_model), *requests)
    monkeypatch.setattr("mdapo.rollout.local_engine.STEP_TOKENS", 32)
    assert [c.ids for c in run(make(tiny_model), *requests)] == [c.ids for c in whole]


def test_new_weights_replace_the_old_and_clear_the_caches(
    tiny_model: Path, tmp_path: Path, save_tiny: SaveTiny
) -> None:
    other, ids = save_tiny(tmp_path / "other", seed=9), prompt(30, 5)
    engine = make(tiny_model)
    (before,) = run(engine, ask(ids))
    asyncio.run(engine.update_weights(weights_of(other), 7))
    (after,) = run(engine, ask(ids))
    (fresh,) = run(make(other), ask(ids))
    assert (after.version, after.cached_tokens) == (7, 0)
    assert (after.ids, after.logps) == (fresh.ids, fresh.logps) != (before.ids, before.logps)


def test_after_a_failed_update_nothing_is_answered_until_a_whole_one(tiny_model: Path) -> None:
    engine = make(tiny_model)
    with pytest.raises(ValueError, match="missing"):
        asyncio.run(engine.update_weights(list(weights_of(tiny_model))[:-1], 1))
    with pytest.raises(EngineError, match="mixture of versions"):
        run(engine, ask(prompt(5, 1)))
    asyncio.run(engine.update_weights(weights_of(tiny_model), 2))
    assert run(engine, ask(prompt(5, 1)))[0].version == 2


def test_broken_weights_are_an_engine_error_for_everyone_and_heal(tiny_model: Path) -> None:
    engine, ids = make(tiny_model), prompt(30, 5)
    (before,) = run(engine, ask(ids))
    broken = ((name, weight * float("nan")) for name, weight in weights_of(tiny_model))
    asyncio.run(engine.update_weights(broken, 1))
    for session in "ab":
        with pytest.raises(EngineError, match="not finite"):
            run(engine, ask(ids, session=session))
    asyncio.run(engine.update_weights(weights_of(tiny_model), 2))
    assert run(engine, ask(ids))[0].ids == before.ids


def test_too_long_a_request_names_the_lengths(tiny_model: Path) -> None:
    with pytest.raises(EngineError, match="250 prompt tokens and 12 new ones do not fit a context of 256"):
        run(make(tiny_model), ask(prompt(250, 1)))
    assert len(run(make(tiny_model), ask(prompt(244, 1)))[0].ids) == 12


def test_abort_ends_running_and_waiting_requests_with_what_they_have(tiny_model: Path) -> None:
    async def scenario() -> list[Completion]:
        engine = make(tiny_model, max_running=2)
        tasks = [asyncio.create_task(engine.generate(ask(prompt(9, i), session=str(i), new=200))) for i in range(3)]
        while not any(r.logps for r in engine._running):
            await asyncio.sleep(0)
        await engine.abort("0")
        first = await tasks[0]
        await engine.abort()
        return [first, *await asyncio.gather(*tasks[1:])]

    aborted = asyncio.run(scenario())
    assert [c.finish for c in aborted] == ["abort"] * 3
    assert 1 <= len(aborted[0].ids) < 200
    assert all(len(c.ids) == len(c.logps) for c in aborted)


def test_a_cancelled_request_stops_running(tiny_model: Path) -> None:
    """Case 25: nothing goes on decoding for a caller that has gone."""

    async def scenario() -> tuple[int, int]:
        engine = make(tiny_model)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await engine.generate(ask(prompt(9, 1), new=240, session="late"))
        await asyncio.sleep(0.05)
        return len(engine._running), len(engine._waiting)

    assert asyncio.run(scenario()) == (0, 0)


def test_threads_are_given_back(tiny_model: Path) -> None:
    before = torch.get_num_threads()
    run(make(tiny_model, threads=before + 1), ask(prompt(9, 1)))
    assert torch.get_num_threads() == before


def test_a_closed_engine_refuses(tiny_model: Path) -> None:
    async def scenario() -> None:
        engine = make(tiny_model)
        await engine.close()
        await engine.generate(ask(prompt(9, 1)))

    with pytest.raises(EngineError, match="closed"):
        asyncio.run(scenario())
