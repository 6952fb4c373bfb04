"""Quality beside the reward: measured in a process, in batches, and what fails is counted, never made up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mdapo.config.schema import QualityCfg, RewardCfg, RewardPart
from mdapo.data.wire import dump_groups, load_groups
from mdapo.environments import chat_api
from mdapo.environments.chat_api import Api
from mdapo.errors import UserError
from mdapo.rewards.embeddings import Cached, EmbeddingError, Lexical
from mdapo.rewards.embeddings_endpoint import Endpoint
from mdapo.rewards.runner import RewardRunner
from mdapo.types import Episode, Group, Score

from ..environments.test_llm_user import Behaviour, Server, raw, reset
from .test_runner import episode

LEXICAL = QualityCfg(embeddings="lexical")
KEY = "sk-secret-1234"


@pytest.fixture
def make() -> Iterator[Callable[..., RewardRunner]]:
    made: list[RewardRunner] = []

    def runner(quality: QualityCfg = LEXICAL, **cfg: Any) -> RewardRunner:
        more = {"every_turn": cfg.pop("every_turn", False)}
        made.append(RewardRunner(RewardCfg(**cfg), default="gsm8k", quality=quality, **more))
        return made[-1]

    yield runner
    for one in made:
        one.close()


def scores(runner: RewardRunner, *episodes: Episode) -> list[Score]:
    async def all_of_them() -> list[Score]:
        return list(await asyncio.gather(*map(runner.score, episodes)))

    return asyncio.run(all_of_them())


def test_quality_comes_with_the_score_and_survives_a_checkpoint(make: Callable[..., RewardRunner]) -> None:
    runner = make()
    good, bad = scores(runner, episode("3 + 4 is 7. #### 7"), episode("Octopuses have three hearts. #### 8"))
    assert (good.value, good.outcome, bad.value) == (1.0, 1.0, 0.0)
    assert good.relevance is not None and bad.relevance is not None and good.relevance > bad.relevance
    assert good.coherence is not None and 0.0 <= good.coherence <= 1.0
    assert runner.metrics()["quality/measured"] == 2.0 and runner.metrics()["quality/measured"] == 0.0
    assert runner.end_step() == {}
    whole = episode("7")
    group = Group(whole.prompt, (Episode(**{**vars(whole), "score": good}),), 0)
    assert load_groups(dump_groups([group]))[0].episodes[0].score == good


def test_measures_are_rewards_by_name(make: Callable[..., RewardRunner]) -> None:
    measures = [RewardPart(name="relevance", weight=0.5), RewardPart(name="coherence", weight=0.25)]
    runner = make(functions=[RewardPart(name="gsm8k"), *measures])
    (got,) = scores(runner, episode("3 + 4 is 7. #### 7"))
    assert got.parts["relevance"] == got.relevance and got.parts["coherence"] == got.coherence
    assert got.relevance is not None and got.coherence is not None
    assert got.value == pytest.approx(1.0 + 0.5 * got.relevance + 0.25 * got.coherence)
    assert got.outcome == 1.0


def test_a_turn_is_credited_with_what_the_measure_gained(make: Callable[..., RewardRunner]) -> None:
    (got,) = scores(make(functions=[RewardPart(name="coherence")], every_turn=True), episode("3 + 4 is 7.", "It is 7."))
    assert len(got.before) == 2 and got.before[0] == 0.0 and 0.0 < got.before[1] <= 1.0


def test_a_measure_as_reward_needs_embeddings() -> None:
    with pytest.raises(UserError, match=r"coherence and relevance need quality\.embeddings"):
        RewardRunner(RewardCfg(functions=[RewardPart(name="coherence")]))


def test_an_embedder_that_cannot_be_had_is_told_at_the_start(make: Callable[..., RewardRunner], tmp_path: Any) -> None:
    with pytest.raises(UserError, match=r"quality\.embeddings: no such folder"):
        make(QualityCfg(embeddings=str(tmp_path / "none")))


def test_a_process_that_died_is_replaced(make: Callable[..., RewardRunner]) -> None:
    runner = make()
    scores(runner, episode("7"))
    assert runner.quality is not None
    os.kill(runner.quality._worker.pid, signal.SIGKILL)
    time.sleep(0.2)
    (got,) = scores(runner, episode("7"))
    assert got.coherence is not None and runner.end_step() == {}


def test_a_process_that_hangs_costs_the_deadline_and_those_dialogues_their_quality(
    make: Callable[..., RewardRunner],
) -> None:
    runner = make(QualityCfg(embeddings="lexical", timeout_s=1.0), max_error_rate=1.0)
    assert runner.quality is not None
    os.kill(runner.quality._worker.pid, signal.SIGSTOP)
    got = scores(runner, episode("#### 7"), episode("#### 8"))
    assert [(s.value, s.valid) for s in got] == [(1.0, True), (0.0, True)]
    assert all(s.coherence is None and s.relevance is None for s in got)
    assert runner.end_step() == {"quality: timed out": 2}
    assert scores(runner, episode("#### 7"))[0].coherence is not None


def test_too_many_dialogues_without_quality_stop_the_run(make: Callable[..., RewardRunner]) -> None:
    runner = make(QualityCfg(embeddings="lexical", timeout_s=1.0))
    assert runner.quality is not None
    os.kill(runner.quality._worker.pid, signal.SIGSTOP)
    scores(runner, episode("#### 7"))
    with pytest.raises(UserError, match="1 x quality: timed out"):
        runner.end_step()


def test_closing_ends_the_process(make: Callable[..., RewardRunner]) -> None:
    runner = make()
    assert runner.quality is not None
    worker = runner.quality._worker
    runner.close()
    assert worker._reaped


# ---- an endpoint -----------------------------------------------------------------------------------------------------


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    monkeypatch.setattr(chat_api, "FIRST_PAUSE_S", 0.01)
    started: list[Server] = []

    def start(*behaviours: bytes | Behaviour) -> Server:
        started.append(Server(*behaviours))
        return started[-1]

    yield start
    for server in started:
        server.close()


def vectors(*rows: Any, order: tuple[int, ...] | None = None) -> bytes:
    places = order or tuple(range(len(rows)))
    return raw(json.dumps({"data": [{"index": i, "embedding": rows[i]} for i in places]}).encode())


def endpoint(url: str, **more: Any) -> Endpoint:
    return Endpoint(Api(url, "m", KEY, **{"timeout_s": 5.0, "retries": 2, **more}))


def test_an_endpoint_is_asked_as_the_api_says_and_its_order_is_by_index(serve: Callable[..., Server]) -> None:
    server = serve(vectors([1, 0.5], [2.0, 3], order=(1, 0)))
    found = endpoint(server.url).embed(["a", "b"])
    assert found.tolist() == [[1.0, 0.5], [2.0, 3.0]]
    assert server.asked == [{"model": "m", "input": ["a", "b"], "encoding_format": "float"}]
    assert server.heads[0].startswith("POST /v1/embeddings ") and f"Bearer {KEY}" in server.heads[0]


def silent(connection: Any) -> None:
    time.sleep(1.5)


HOSTILE: dict[str, tuple[bytes | Behaviour, str]] = {
    "silent": (silent, "no reply in 0.5 s"),
    "500": (raw(b"{}", "500 Oops"), "no reply in 3 tries, the last: status 500"),
    "reset": (reset, "no reply in 3 tries"),
    "401": (raw(f"bad {KEY}".encode(), "401 Unauthorized"), "status 401: 'bad <key>'"),
    "html": (raw(b"<html>"), "a reply that is not JSON"),
    "list": (raw(b"[]"), "a reply without data of 2 embeddings"),
    "one": (vectors([1.0, 2.0]), "a reply without data of 2 embeddings"),
    "twice": (vectors([1.0], [2.0], order=(0, 0)), "indices are not 0 to 1"),
    "text": (vectors([1.0], "abc"), "are no lists of finite numbers"),
    "null": (vectors([1.0, None], [1.0, 2.0]), "are no lists of finite numbers"),
    "empty": (vectors([], []), "are no lists of finite numbers"),
    "ragged": (vectors([1.0], [1.0, 2.0]), "vectors of different lengths"),
    "nan": (vectors([1.0, float("nan")], [1.0, 2.0]), "are no lists of finite numbers"),
    "huge": (vectors([1.0, 10**400], [1.0, 2.0]), "are no lists of finite numbers"),
    "zero": (vectors([0.0, 0.0], [1.0, 2.0]), "a vector is zero"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_an_endpoint_may_do_is_an_error_without_the_key(serve: Callable[..., Server], name: str) -> None:
    behaviour, why = HOSTILE[name]
    cached = Cached(endpoint(serve(behaviour).url, timeout_s=0.5 if name == "silent" else 5.0), size=9)
    with pytest.raises(EmbeddingError) as caught:
        cached.embed(["a", "b"])
    assert why in str(caught.value) and KEY not in str(caught.value) and len(cached) == 0


def test_an_endpoint_that_fails_later_costs_quality_and_no_score(
    make: Callable[..., RewardRunner], serve: Callable[..., Server]
) -> None:
    """First it embeds as `Lexical` does, then it is broken; each dialogue without a quality is counted."""
    healthy = [True]
    lexical = Cached(Lexical(), size=9)

    def answer(connection: Any) -> None:
        if not healthy[0]:
            connection.sendall(raw(b"no more", "400 Bad Request"))
            return
        texts = server.asked[-1]["input"]
        connection.sendall(vectors(*lexical.embed(texts).tolist()))

    server = serve(answer)
    runner = make(QualityCfg(embeddings=server.url, model="m", timeout_s=20.0), max_error_rate=1.0)
    assert scores(runner, episode("#### 7"))[0].coherence is not None
    healthy[0] = False
    got = scores(runner, episode("It is #### 7"), episode("It may be #### 9"))
    assert [(s.value, s.coherence) for s in got] == [(1.0, None), (0.0, None)]
    ((why, count),) = runner.end_step().items()
    assert count == 2 and why.startswith("quality: ") and "status 400: 'no more'" in why
