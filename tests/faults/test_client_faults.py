"""One client against a server that does everything wrong: each call ends by its deadline with the right error."""

from __future__ import annotations

import asyncio
import logging
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mdapo.errors import UserError
from mdapo.rollout.engine import Completion, EngineError, SamplingParams
from mdapo.rollout.sglang_client import Client, open_session
from mdapo.rollout.sglang_replies import BadReply, NothingListens, Refused, Unavailable, WrongVersion

from .hostile_server import KEY, REFUSED, RETRIED, STOP, VOCAB, HostileServer, logp_of, tokens_of

PARAMS = SamplingParams(20, stop_ids=(STOP,))
PROMPT = list(range(2, 12))
LONG = 60.0  # no test waits so long
Use = Callable[[HostileServer, Client], Awaitable[Any]]


def use(server: HostileServer, work: Use, *, key: str = KEY, max_in_flight: int = 8) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(LONG), server, open_session() as session:
            client = Client(server.url, key, session=session, vocab_size=VOCAB, max_in_flight=max_in_flight)
            return await work(server, client)

    return asyncio.run(run())


def ask(client: Client, *, deadline_s: float = 20.0, rid: str = "a" * 32, seed: int = 3) -> Awaitable[Completion]:
    return client.generate(PROMPT, PARAMS, rid=rid, seed=seed, version=0, deadline_s=deadline_s)


def test_a_good_answer_is_taken_whole() -> None:
    async def work(server: HostileServer, client: Client) -> Completion:
        return await ask(client)

    expected = tokens_of(PROMPT, 3, 20)
    found = use(HostileServer(), work)
    assert found == Completion(tuple(expected), tuple(map(logp_of, expected)), "stop", 0, len(PROMPT) // 2)


@pytest.mark.parametrize("misdeed", [*RETRIED, *REFUSED])
def test_every_misdeed_ends_in_time_with_its_error(misdeed: str) -> None:
    """One that sends nothing, or never ends, at the deadline; all others long before it."""
    never_ends = misdeed in ("silent", "dripping", "dripping header")
    deadline_s = 0.5 if never_ends else LONG

    async def work(server: HostileServer, client: Client) -> EngineError:
        with pytest.raises(EngineError) as caught:
            await ask(client, deadline_s=deadline_s)
        assert server.requests["/generate"] == 1  # whether to ask again is the engine's to decide
        return caught.value

    error = use(HostileServer(lambda _: misdeed), work)
    assert isinstance(error, Refused) == (misdeed in REFUSED)
    assert isinstance(error, Unavailable | BadReply) == (misdeed in RETRIED)
    assert isinstance(error, WrongVersion) == (misdeed in ("wrong version", "mixed versions"))
    assert "127.0.0.1" in str(error)
    assert len(str(error)) < 400
    if never_ends:
        assert "within 0.5 s" in str(error)


def test_a_gigabyte_is_not_held_in_memory() -> None:
    async def work(server: HostileServer, client: Client) -> int:
        tracemalloc.start()
        with pytest.raises(BadReply, match="make sense"):
            await ask(client)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert use(HostileServer(lambda _: "a gigabyte unannounced"), work) < 16 << 20


def test_the_deadline_counts_the_wait_for_a_place() -> None:
    async def work(server: HostileServer, client: Client) -> None:
        first = asyncio.ensure_future(ask(client, rid="a" * 32, deadline_s=30.0))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match=r"within 0\.2 s"):
            await ask(client, rid="b" * 32, deadline_s=0.2)
        first.cancel()
        assert server.requests["/generate"] == 1  # the second one was never sent

    use(HostileServer(token_s=30.0), work, max_in_flight=1)


def test_an_abort_returns_what_there_is() -> None:
    async def work(server: HostileServer, client: Client) -> Completion:
        turn = asyncio.ensure_future(ask(client))
        while not server.running:
            await asyncio.sleep(0.01)
        await client.abort("a" * 32)
        return await turn

    assert use(HostileServer(token_s=20.0), work).finish == "abort"


def test_nothing_listening_is_known_at_once() -> None:
    async def work(server: HostileServer, client: Client) -> None:
        await server.kill()
        with pytest.raises(NothingListens):
            await ask(client, deadline_s=LONG)

    use(HostileServer(), work)


def test_the_key_is_told_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Not when the server repeats it, not by repr, not in a log of any level."""
    caplog.set_level(logging.DEBUG)

    async def work(server: HostileServer, client: Client) -> str:
        with pytest.raises(Refused) as caught:
            await ask(client)
        assert "***" in str(caught.value)
        return f"{caught.value!r} {client!r} {caught.value.__cause__!r}"

    assert KEY not in use(HostileServer(lambda _: "401"), work) + caplog.text


def test_a_wrong_key_is_refused_by_name() -> None:
    async def work(server: HostileServer, client: Client) -> None:
        with pytest.raises(Refused, match=r"401 .*is this the key"):
            await ask(client)

    use(HostileServer(), work, key="another")


@pytest.mark.parametrize("url", ["", "localhost:3000", "ftp://a:1", "http://u:secret@a:1", "http://a:1/x?y", "http://"])
def test_what_is_no_url_is_an_error_for_people(url: str) -> None:
    async def run() -> None:
        async with open_session() as session:
            with pytest.raises(UserError, match=r"http://host:port"):
                Client(url, "", session=session, vocab_size=9)

    asyncio.run(run())


@pytest.mark.parametrize("key", ["a b", "a\r\nX: y", "ü"])
def test_what_is_no_key_is_an_error_that_does_not_show_it(key: str) -> None:
    async def run() -> str:
        async with open_session() as session:
            with pytest.raises(UserError) as caught:
                Client("http://a:1", key, session=session, vocab_size=9)
            return str(caught.value)

    assert key not in asyncio.run(run())
