"""A conversation that is put off and goes on: the same tokens, within the same limits, each with its own version."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.data.batching import _uncredited
from mdapo.data.wire import dump_groups, load_groups
from mdapo.environments.aside import Aside
from mdapo.environments.base import Observation
from mdapo.environments.resuming import NotTheSame, catch_up
from mdapo.rollout.engine import Completion, Request, SamplingParams
from mdapo.rollout.episode import Limits, run_episode
from mdapo.rollout.pause import Pause
from mdapo.rollout.seeds import mix
from mdapo.types import Episode, Group, Message, Prompt

from .fakes import STOP, ScriptedEngine, ScriptedEnv, WordChat

PROMPT = Prompt("p", 0, (Message("user", "10 11"),))


class CutEngine(ScriptedEngine):
    """Writes what follows from the ids so far; a call that ``cuts`` has a number for is aborted after so many tokens.
    The log-prob tells the version."""

    def __init__(self, seed: int, cuts: Sequence[int | None], *, stops: bool = True) -> None:
        super().__init__(lambda _: ([], "stop"))
        self.seed_, self.cuts, self.stops, self.pause = seed, list(cuts), stops, Pause()

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        ids = list(request.ids)
        while (last := ids[len(request.ids) :]) == [] or (
            last[-1] != STOP and len(last) < request.params.max_new_tokens
        ):
            drawn = mix(self.seed_ ^ mix(len(ids) * 1000 + ids[-1])) % 9
            ids.append(STOP if drawn == 0 and self.stops else 20 + drawn)
        new, finish = ids[len(request.ids) :], "stop" if ids[-1] == STOP else "length"
        cut = self.cuts.pop(0) if self.cuts else None
        if cut is not None:
            self.pause.request()
            new, finish = new[:cut], "abort"
        return Completion(tuple(new), (-1.0 - self.version,) * len(new), finish, self.version)


def through_the_wire(episode: Episode) -> Episode:
    (group,) = load_groups(dump_groups([Group(PROMPT, (episode,), 0)]))
    return group.episodes[0]


def talk(engine: CutEngine, answers: int, limits: Limits, begun: Episode | None = None) -> Episode:
    said = [Observation((Message("user", f"{30 + i} 31"),)) for i in range(answers)]
    return asyncio.run(
        run_episode(
            engine, lambda: ScriptedEnv(PROMPT, said), WordChat(), PROMPT, 0, limits=limits,
            sampling=SamplingParams(1), session="s", group="g", seed=5, calls=Aside(), begun=begun, pause=engine.pause,
        )
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    answers=st.integers(0, 4),
    max_turns=st.integers(1, 5),
    max_response_len=st.integers(1, 40),
    max_context=st.integers(4, 40),
    max_turn_len=st.none() | st.integers(1, 12),
    cuts=st.lists(st.none() | st.integers(0, 12), max_size=8),
)
def test_what_is_cut_and_goes_on_ends_as_what_was_not_within_every_limit(
    seed: int,
    answers: int,
    max_turns: int,
    max_response_len: int,
    max_context: int,
    max_turn_len: int | None,
    cuts: list[int | None],
) -> None:
    limits = Limits(max_turns, max_response_len, max_context, max_turn_len)
    whole = talk(CutEngine(seed, []), answers, limits)
    engine = CutEngine(seed, cuts)
    episode = talk(engine, answers, limits)
    while episode.end == "unfinished":
        check(episode, limits)
        engine.version += 1
        engine.pause.lift()
        episode = talk(engine, answers, limits, begun=through_the_wire(episode))
    check(episode, limits)
    assert episode.ids.tolist() == whole.ids.tolist()
    assert episode.response_mask.tolist() == whole.response_mask.tolist()
    assert (episode.messages, episode.end, episode.num_agent_turns) == (
        whole.messages,
        whole.end,
        whole.num_agent_turns,
    )
    assert [t.finish for t in episode.turns] == [t.finish for t in whole.turns]


def check(episode: Episode, limits: Limits) -> None:
    ids, mask = episode.ids, episode.response_mask
    assert len(ids) == len(mask) == len(episode.rollout_logps) == len(episode.versions)
    assert len(ids) - len(episode.prompt_ids) <= limits.max_response_len
    assert len(ids) <= max(limits.max_context, len(episode.prompt_ids))
    assert episode.num_agent_turns <= limits.max_turns
    for turn in episode.turns:
        assert sum(tokens for _, tokens in turn.runs) == len(turn.ids)
        if turn.role == "assistant" and limits.max_turn_len is not None:
            assert turn.mask.sum() <= limits.max_turn_len
    assert (episode.rollout_logps[mask] == -1.0 - episode.versions[mask]).all()  # no token without its version
    assert (episode.versions[~mask] == -1).all()
    samples = _uncredited([episode], np.zeros(1, np.int64))
    assert (samples.fields["versions"] == episode.versions).all()


def test_the_rest_of_a_turn_has_random_numbers_of_its_own() -> None:
    """Drawn by token number within a request: with the turn's seed again, the rest would repeat its beginning."""
    limits = Limits(1, 30, 60)
    engine = CutEngine(3, [2, 3], stops=False)
    first = talk(engine, 0, limits)
    engine.pause.lift()
    second = talk(engine, 0, limits, begun=first)
    engine.pause.lift()
    talk(engine, 0, limits, begun=second)
    assert len({request.seed for request in engine.requests}) == 3
    again = CutEngine(3, [2], stops=False)
    talk(again, 0, limits)
    again.pause.lift()
    talk(again, 0, limits, begun=first)
    assert [r.seed for r in again.requests] == [r.seed for r in engine.requests][:2]


def test_a_cut_turn_is_one_turn_with_pieces() -> None:
    engine = CutEngine(1, [3, 2], stops=False)
    episode = None
    for version in (4, 6, 7):
        engine.version = version
        engine.pause.lift()
        episode = talk(engine, 0, Limits(1, 12, 60), begun=episode)
    assert episode is not None
    (turn,) = episode.turns
    assert turn.pieces == ((4, 3), (6, 2)) and turn.version == 7
    assert episode.num_agent_turns == 1


@pytest.mark.parametrize("where", ["opening", "observe"])
def test_a_pause_does_not_wait_for_an_environment_that_takes_its_time(where: str) -> None:
    """The call is made again later; meanwhile nothing is lost and nothing said twice."""

    class Slow(Aside):
        calls = 0

        async def call(self, work: Any) -> Any:
            self.calls += 1
            if self.calls == (1 if where == "opening" else 2):
                await asyncio.Event().wait()
            return work()

    async def put_off(begun: Episode | None) -> Episode:
        pause, calls = Pause(), Slow()
        engine = ScriptedEngine(lambda _: ([20, STOP], "stop"))
        env = ScriptedEnv(PROMPT, [Observation((Message("user", "30"),))])
        work = run_episode(
            engine, lambda: env, WordChat(), PROMPT, 0, limits=Limits(2, 50, 90), sampling=SamplingParams(1),
            session="s", group="g", seed=5, calls=calls, begun=begun, pause=pause,
        )  # fmt: skip
        task = asyncio.create_task(work)
        while calls.calls < (1 if where == "opening" else 2):
            await asyncio.sleep(0)
        pause.request()
        return await asyncio.wait_for(task, 10)

    episode = asyncio.run(put_off(None))
    assert (episode.end, episode.num_agent_turns) == ("unfinished", int(where == "observe"))
    engine = CutEngine(0, [])
    ended = talk(engine, 1, Limits(2, 50, 90), begun=episode)
    assert (ended.num_agent_turns, ended.messages[0].content) == (2, "10 11")
    assert [m.content for m in ended.messages if m.role == "user"] == ["10 11", "30 31"]


def test_a_cancellation_from_outside_is_not_taken_for_a_pause() -> None:
    async def cancelled() -> None:
        engine = ScriptedEngine(lambda _: ([20, STOP], "stop"), hang=True)
        work = run_episode(
            engine, lambda: ScriptedEnv(PROMPT, []), WordChat(), PROMPT, 0, limits=Limits(2, 50, 90),
            sampling=SamplingParams(1), session="s", group="g", seed=5, calls=Aside(), pause=Pause(),
        )  # fmt: skip
        task = asyncio.create_task(work)
        while not engine.requests:
            await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def said(*pairs: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message(role, text) for role, text in pairs)  # type: ignore[arg-type]


def test_an_environment_made_again_hears_what_it_heard() -> None:
    messages = said(("user", "10 11"), ("assistant", "20"), ("user", "30"), ("assistant", "21"))
    env = ScriptedEnv(PROMPT, [Observation((Message("user", "30"),))])
    asyncio.run(catch_up(env, messages, answered=1, unheard=True, call=Aside().call))
    assert env.heard == [messages[:2]]
    assert env.observe(messages) == Observation(end="done")


def test_an_environment_that_says_something_else_is_refused_and_the_episode_an_error() -> None:
    messages = said(("user", "10 11"), ("assistant", "20"), ("user", "30"))
    other = ScriptedEnv(PROMPT, [Observation((Message("user", "31"),))])
    with pytest.raises(NotTheSame, match="its messages are not those"):
        asyncio.run(catch_up(other, messages, answered=1, unheard=False, call=Aside().call))
    with pytest.raises(NotTheSame, match="ends with done"):
        asyncio.run(catch_up(ScriptedEnv(PROMPT, []), messages, answered=1, unheard=False, call=Aside().call))
    engine = CutEngine(1, [None, 1])
    episode = talk(engine, 1, Limits(3, 50, 90))
    assert episode.end == "unfinished"
    engine.pause.lift()
    changed = replace(episode, messages=(*episode.messages[:-1], Message("user", "77 31")))
    assert talk(engine, 1, Limits(3, 50, 90), begun=changed).end == "error"


def test_an_environment_with_a_state_elsewhere_takes_the_messages_and_is_asked_for_nothing_twice() -> None:
    class Remote(ScriptedEnv):
        def resume(self, messages: Sequence[Message]) -> None:
            self.taken = tuple(messages)

    messages = said(("user", "10 11"), ("assistant", "20"), ("user", "30"), ("assistant", "21"))
    env = Remote(PROMPT, [])
    asyncio.run(catch_up(env, messages, answered=1, unheard=True, call=Aside().call))
    assert (env.taken, env.heard) == (messages[:3], [])
