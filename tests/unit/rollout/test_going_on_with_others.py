"""A conversation with tools, or with a model as its user, that is put off and goes on: in the middle of a turn, between
a call and its answer, as a turn ends. The environments are the real ones; what the policy writes is a script."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.config.schema import EnvironmentCfg
from mdapo.data.chat import ChatFormat
from mdapo.data.wire import dump_groups, load_groups
from mdapo.environments.aside import Aside
from mdapo.environments.base import Observation
from mdapo.environments.calling import Environments, load_environment
from mdapo.rollout.engine import Completion, Request, SamplingParams
from mdapo.rollout.episode import Limits, run_episode
from mdapo.rollout.event_loop import EventLoop
from mdapo.rollout.pause import Pause
from mdapo.types import Episode, Group, Message, Prompt

from ..data import templates as t
from ..environments.test_llm_user import Server, reply_of
from .fakes import STOP, ScriptedEngine, ScriptedEnv, WordChat
from .test_ahead_of_steps import build, outcome
from .test_ahead_of_steps import check as check_books
from .test_dynamic_batch import TableRewards
from .test_going_on import check

TOOLS = Path(__file__).parents[1] / "environments" / "tools_for_tests.py"
CHAT = ChatFormat.from_tokenizer(t.small_tokenizer(t.WITH_TOOLS))
WIDE = Limits(max_turns=6, max_response_len=4000, max_context=8000)
CFG = EnvironmentCfg(timeout_s=60.0)


class Written:
    """Writes ``turns`` one after the other, also in pieces; a request that ``cuts`` has a number for is aborted after
    so many tokens. ``ends``: the numbers of turns at whose end a pause is asked for."""

    def __init__(self, turns: Sequence[str], *, cuts: Sequence[int | None] = (), ends: Sequence[int] = ()) -> None:
        self.turns = [[*CHAT.tokenizer(text, add_special_tokens=False).input_ids, CHAT.stop_ids[0]] for text in turns]
        self.left, self.cuts, self.ends = [list(turn) for turn in self.turns], list(cuts), list(ends)
        self.version, self.pause = 0, Pause()

    async def generate(self, request: Request) -> Completion:
        turn, most = self.left[0], request.params.max_new_tokens
        new, finish = turn[:most], "stop" if len(turn) <= most else "length"
        cut = self.cuts.pop(0) if self.cuts else None
        if cut is not None:
            new, finish = new[:cut], "abort"
        self.left[0] = turn[len(new) :]
        if not self.left[0] or len(new) >= most:
            del self.left[0]
        number = len(self.turns) - len(self.left)
        if cut is not None or number in self.ends:
            self.ends = [end for end in self.ends if end != number]
            self.pause.request()
        return Completion(tuple(new), (-1.0 - self.version,) * len(new), finish, self.version)

    async def update_weights(self, weights: Any, version: int) -> None: ...
    async def abort(self, session: str | None = None) -> None: ...
    async def release(self, session: str) -> None: ...
    async def close(self) -> None: ...


def talk(
    engine: Written,
    environments: Environments,
    prompt: Prompt,
    begun: Episode | None = None,
    *,
    limits: Limits = WIDE,
    pause_when: Callable[[], bool] | None = None,
) -> Episode:
    """As far as it goes; ``pause_when``: put off once this holds."""

    async def main() -> Episode:
        calls, failures = environments.calls(CFG), []
        task = asyncio.create_task(
            run_episode(
                engine, lambda: environments(prompt, seed=7), CHAT, prompt, 0, limits=limits,
                sampling=SamplingParams(1), session="s", group="g", seed=5, calls=calls, failed=failures.append,
                begun=begun, pause=engine.pause,
            )
        )  # fmt: skip
        async with asyncio.timeout(120):
            while pause_when is not None and not task.done() and not pause_when():
                await asyncio.sleep(0.01)
            if pause_when is not None:
                engine.pause.request()
            episode = await task
        calls.close()
        assert failures == []
        return episode

    return asyncio.run(main())


def go_on(engine: Written, environments: Environments, prompt: Prompt, begun: Episode, **more: Any) -> Episode:
    """To its end, each time as from a checkpoint, with new weights."""
    while begun.end == "unfinished":
        check(begun, more.get("limits", WIDE))
        engine.version += 1
        engine.pause.lift()
        (group,) = load_groups(dump_groups([Group(prompt, (begun,), 0)]))
        begun = talk(engine, environments, prompt, group.episodes[0], **more)
    check(begun, more.get("limits", WIDE))
    return begun


def is_the_same(episode: Episode, whole: Episode, engine: Written) -> None:
    assert episode.prompt_ids.tolist() == whole.prompt_ids.tolist()
    assert episode.ids.tolist() == whole.ids.tolist()
    assert episode.response_mask.tolist() == whole.response_mask.tolist()
    assert (episode.messages, episode.end) == (whole.messages, whole.end)
    said = [turn for turn in episode.turns if turn.role == "assistant"]
    for turn, script in zip(said, engine.turns, strict=False):
        written = turn.ids[turn.mask].tolist()
        assert written == script[: len(written)], "not what the engine wrote"
    for turn in episode.turns:
        if turn.role != "assistant":
            assert not turn.mask.any() and np.isnan(turn.logps).all()


# ---- tools -----------------------------------------------------------------------------------------------------------


def call(name: str, **arguments: object) -> str:
    """JSON as a policy writes it and no template would."""
    return f'<tool_call>{{"arguments" :{json.dumps(arguments)} ,"name":"{name}"}}</tool_call>'


SUM = Prompt("p", 0, (Message("system", "Compute."), Message("user", "6 * 7?")), ground_truth="42")
SUMS = [
    f"Well. {call('calculator', expression='6 * 7')}",
    call("calculator", expression="1 / 0") + call("calculator", expression="2 + 2"),
    "I think it is 42.",
    call("calculator", expression="1 + 1"),
    "#### 42",
]


@settings(max_examples=80, deadline=None)
@given(
    cuts=st.lists(st.none() | st.integers(0, 60), max_size=8),
    ends=st.sets(st.integers(1, 5)),
    max_turns=st.integers(1, 5),
    max_response_len=st.integers(20, 700),
    max_turn_len=st.none() | st.integers(30, 90),
    max_tool_calls=st.integers(1, 5),
)
def test_a_task_with_tools_ends_as_if_it_had_not_been_put_off_within_every_limit(
    cuts: list[int | None],
    ends: set[int],
    max_turns: int,
    max_response_len: int,
    max_turn_len: int | None,
    max_tool_calls: int,
) -> None:
    args = {"tools": ["calculator"], "answer": "####", "max_tool_calls": max_tool_calls}
    environments = load_environment(EnvironmentCfg(name="tool_use", args=args))
    limits = Limits(max_turns, max_response_len, 2000, max_turn_len)
    whole = talk(Written(SUMS), environments, SUM, limits=limits)
    engine = Written(SUMS, cuts=cuts, ends=sorted(ends))
    episode = go_on(engine, environments, SUM, talk(engine, environments, SUM, limits=limits), limits=limits)
    is_the_same(episode, whole, engine)
    assert "calculator" in CHAT.decode(episode.prompt_ids.tolist())


def test_what_was_called_and_told_counts_when_it_goes_on() -> None:
    args = {"tools": ["calculator"], "answer": "####", "max_tool_calls": 2}
    env: Any = load_environment(EnvironmentCfg(name="tool_use", args=args))(SUM, seed=0)
    assert not hasattr(load_environment(EnvironmentCfg(name="gsm8k"))(SUM, seed=0), "resume")
    one = call("calculator", expression="1 + 1")
    said = [*SUM.messages, Message("assistant", "Hm."), Message("user", "Call a function, ...")]
    said += [Message("assistant", one), Message("tool", "2")]
    env.resume(tuple(said))
    both = env.observe((*said, Message("assistant", one + one)))
    assert [m.content for m in both.messages] == ["2", json.dumps({"error": "no function calls are left; answer now"})]
    again: Any = load_environment(EnvironmentCfg(name="tool_use", args=args))(SUM, seed=0)
    again.resume((*said, Message("assistant", one + one), *both.messages))
    assert again.observe((*said, Message("assistant", one))).end == "gave_up"
    assert again.observe((*said, Message("assistant", "Hm."))).end == "gave_up"  # it was reminded before
    with pytest.raises(RuntimeError, match="does not begin with the row's messages"):
        again.resume((Message("user", "Another row"),))


WORDS = ("one", "two")


def waiting_prompt(folder: Path) -> Prompt:
    return Prompt("p", 0, (Message("user", "Go."),), extra={"folder": str(folder)})


def calls_made(folder: Path) -> list[str]:
    log = folder / "log"
    return log.read_text().split() if log.exists() else []


@pytest.mark.parametrize(
    ("where", "number"), [("turn", 1), ("turn", 2), ("call", 1), ("call", 2), ("end", 1), ("end", 2)]
)
def test_no_tool_is_called_twice_but_the_one_that_had_not_answered(tmp_path: Path, where: str, number: int) -> None:
    """The tool runs in a process of its own, tells each call, and answers when a file is there."""
    environments = load_environment(EnvironmentCfg(name="tool_use", args={"tools": [f"{TOOLS}:slowly"], "workers": 2,
                                                                          "timeout_s": 60.0}))  # fmt: skip
    turns = [*(call("slowly", word=word) for word in WORDS), "Done."]
    try:
        for folder in ("whole", "put_off"):
            (tmp_path / folder).mkdir()
        for word in WORDS:
            (tmp_path / "whole" / word).touch()
            if (where, word) != ("call", WORDS[number - 1]):
                (tmp_path / "put_off" / word).touch()
        whole = talk(Written(turns), environments, waiting_prompt(tmp_path / "whole"))
        assert (whole.end, calls_made(tmp_path / "whole")) == ("done", list(WORDS))
        folder = tmp_path / "put_off"
        prompt = waiting_prompt(folder)
        cuts = [*[None] * (number - 1), 9] if where == "turn" else []
        engine = Written(turns, cuts=cuts, ends=[number] if where == "end" else [])
        waits = (lambda: len(calls_made(folder)) == number) if where == "call" else None
        begun = talk(engine, environments, prompt, pause_when=waits)
        assert begun.end == "unfinished"
        assert len(calls_made(folder)) == (number if where == "call" else number - 1)
        assert (begun.messages[-1].role == "assistant") == (where != "turn")
        (folder / WORDS[number - 1]).touch()
        episode = go_on(engine, environments, prompt, begun)
        is_the_same(episode, whole, engine)
        expected = [*WORDS, WORDS[number - 1]] if where == "call" else list(WORDS)
        assert sorted(calls_made(folder)) == sorted(expected)
        assert "slowly" in CHAT.decode(episode.prompt_ids.tolist())
    finally:
        environments.close()


# ---- a model as the user ---------------------------------------------------------------------------------------------

LATE = Prompt("p", 0, (Message("user", "My order is late."),), extra={"goal": "a refund"})
ANSWERS = ("It is 55.", "When?", "Thank you. [END]")
AGENT = ("Which number?", "You get a refund.", "Tomorrow.")


@pytest.mark.parametrize(
    ("where", "number"), [("turn", 1), ("turn", 2), ("call", 1), ("call", 3), ("end", 2), ("turn", 3)]
)
def test_a_user_that_is_a_model_is_asked_again_only_for_what_it_had_not_said(where: str, number: int) -> None:
    answered, held = [reply_of(text) for text in ANSWERS], threading.Event()
    first, second = Server(*answered), Server(*answered)
    if where == "call":
        second.behaviours.insert(number - 1, lambda _: held.wait(60))
    loaded = [
        load_environment(EnvironmentCfg(name="llm_user", args={"base_url": s.url, "model": "m", "max_replies": 3}))
        for s in (first, second)
    ]
    try:
        whole = talk(Written(AGENT), loaded[0], LATE)
        assert whole.end == "done" and whole.messages[-1].content == "Thank you."
        cuts = [*[None] * (number - 1), 2] if where == "turn" else []
        engine = Written(AGENT, cuts=cuts, ends=[number] if where == "end" else [])
        waits = (lambda: len(second.asked) == number) if where == "call" else None
        begun = talk(engine, loaded[1], LATE, pause_when=waits)
        assert begun.end == "unfinished"
        held.set()
        is_the_same(go_on(engine, loaded[1], LATE, begun), whole, engine)
        if where == "call":  # what had not been answered: the same words and the same seed once more
            assert second.asked[number - 1] == second.asked[number]
            del second.asked[number]
        assert second.asked == first.asked
    finally:
        held.set()
        first.close()
        second.close()


# ---- any environment -------------------------------------------------------------------------------------------------


class Late(Aside):
    """Taken for one that answers on the spot, and does not."""

    begun = 0

    async def call(self, work: Callable[[], Any]) -> Any:
        found = work()
        if isinstance(found, Observation):
            self.begun += 1
            await asyncio.Event().wait()
        return found


def test_a_call_that_begins_after_the_pause_is_not_waited_for() -> None:
    async def main() -> None:
        pause, calls = Pause(), Late()
        prompt = Prompt("p", 0, (Message("user", "10"),))

        def reply(_: Request) -> tuple[list[int], str]:
            pause.request()
            return [20, STOP], "stop"

        work = run_episode(
            ScriptedEngine(reply), lambda: ScriptedEnv(prompt, []), WordChat(), prompt, 0, limits=Limits(2, 50, 90),
            sampling=SamplingParams(1), session="s", group="g", seed=5, calls=calls, pause=pause,
        )  # fmt: skip
        episode = await asyncio.wait_for(work, 60)
        assert (episode.end, episode.num_agent_turns, calls.begun) == ("unfinished", 1, 1)

    asyncio.run(main())


class Says:
    """The same to everybody."""

    def __init__(self, prompt: Prompt, *, seed: int) -> None:
        self.prompt, self.said = prompt, 0

    def opening(self) -> tuple[Message, ...]:
        return self.prompt.messages

    def observe(self, messages: Sequence[Message]) -> Observation:
        self.said += 1
        assert self.said == sum(m.role == "assistant" for m in messages), "out of order, or heard twice"
        return Observation((Message("user", "30 31"),))


class SaysSlowly(Says):
    waits = True

    def resume(self, messages: Sequence[Message]) -> None:
        self.said = sum(m.role == "assistant" for m in messages)

    def observe(self, messages: Sequence[Message]) -> Observation:
        time.sleep(0.02)
        return super().observe(messages)


class SaysLater(Says):
    """A coroutine, asked anew for all that it has said."""

    async def observe(self, messages: Sequence[Message]) -> Observation:  # type: ignore[override]
        await asyncio.sleep(0.02)
        return super().observe(messages)


class TakesUpLater(SaysLater):
    async def resume(self, messages: Sequence[Message]) -> None:
        await asyncio.sleep(0.02)
        self.said = sum(m.role == "assistant" for m in messages)


@pytest.mark.parametrize(
    ("kind", "pace"),
    [(Says, "inline"), (Says, "quick"), (SaysSlowly, "waits"), (SaysLater, "waits"), (TakesUpLater, "waits")],
)
def test_an_asynchronous_run_keeps_its_books_with_an_environment_of_any_pace(kind: type[Says], pace: str) -> None:
    """In a thread of its own and on a real clock, with fewer places for calls than conversations."""
    environments = load_environment(EnvironmentCfg(name=f"{__name__}:{kind.__name__}"))
    if pace == "inline":  # mdapo's own alone are
        environments.pace = "inline"
    assert environments.pace == pace
    batch, engine = build("async")
    engine.token_s = 0.0005
    loop, found = EventLoop(background=True), []
    calls = environments.calls(EnvironmentCfg(timeout_s=60.0, max_running=4))
    batch.talks.environment, batch.talks.calls, batch.talks.rewards = environments, calls, TableRewards(outcome)
    try:
        for version in range(5):
            collected = loop.run(batch.collect(version))
            time.sleep(0.05)  # the actor trains
            loop.run(batch.pause())
            loop.run(engine.update_weights((), version + 1))
            loop.run(batch.resume())
            loop.call(lambda collected=collected: batch.trained(collected))
            found.append(collected)
        assert batch.talks.failures == []
        loop.run(batch.close())
    finally:
        calls.close()
        loop.close()
    check_books(found, max_staleness=1)
    assert [len(collected.groups) for collected in found] == [4] * 5
    episodes = [episode for collected in found for group in collected.groups for episode in group.episodes]
    assert {episode.end for episode in episodes} <= {"turn_limit", "token_limit", "done"}
