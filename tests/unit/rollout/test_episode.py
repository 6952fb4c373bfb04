"""One conversation: what is appended, what is masked, how each limit ends it. The engine is a script: not the point."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdapo.environments.aside import Aside
from mdapo.environments.base import Environment, Observation
from mdapo.rollout.engine import EngineError, SamplingParams
from mdapo.rollout.episode import Limits, run_episode
from mdapo.rollout.local_engine import LocalEngine
from mdapo.types import Episode, Message, Prompt

from .fakes import ASK, SEPARATOR, STOP, ScriptedEngine, ScriptedEnv, WordChat, replies

PROMPT = Prompt("p", 0, (Message("user", "10 11"),))


def say(text: str) -> Observation:
    return Observation((Message("user", text),))


def talk(
    engine: Any,
    answers: Sequence[Observation | Exception],
    *,
    chat: WordChat | None = None,
    seed: int = 0,
    make: Callable[[], Environment] | None = None,
    calls: Aside | None = None,
    **limits: Any,
) -> Episode:
    env = ScriptedEnv(PROMPT, answers)
    defaults: dict[str, Any] = {"max_turns": 5, "max_response_len": 100, "max_context": 200, "timeout_s": 5.0}
    return asyncio.run(
        run_episode(
            engine,
            make or (lambda: env),
            chat or WordChat(),
            PROMPT,
            0,
            limits=Limits(**defaults | limits),
            sampling=SamplingParams(1, temperature=0.9, top_p=0.8),
            session="s",
            group="g",
            seed=seed,
            calls=calls or Aside(),
        )
    )


def test_a_dialogue_is_the_engines_ids_and_the_templates_with_exact_masks() -> None:
    """Cases 17 and 18: the separator is there with mask 0, and the engine's ids are kept to the letter."""
    engine = ScriptedEngine(replies(([20, 21, STOP], "stop"), ([22, STOP], "stop")))
    episode = talk(engine, [say("30 31")])
    assert episode.ids.tolist() == [10, 11, ASK, 20, 21, STOP, SEPARATOR, 30, 31, ASK, 22, STOP]
    assert episode.response_mask.astype(int).tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]
    assert (episode.end, episode.num_agent_turns, episode.truncated) == ("done", 2, False)
    assert [m.content for m in episode.messages] == ["10 11", "20 21", "30 31", "22"]
    assert list(engine.requests[1].ids) == episode.ids.tolist()[:10]
    assert episode.versions.tolist() == [-1] * 3 + [0] * 3 + [-1] * 4 + [0] * 2
    assert episode.rollout_logps.tolist() == [0, 0, 0, -0.5, -0.5, -0.5, 0, 0, 0, 0, -0.5, -0.5]
    params = engine.requests[0].params
    assert (params.temperature, params.top_p, params.stop_ids) == (0.9, 0.8, (STOP,))
    assert engine.released == ["s"]


def test_an_observation_that_just_fills_the_budget_is_kept() -> None:
    """Case 19: budget 4, two model tokens and two of the environment."""
    engine = ScriptedEngine(replies(([20, STOP], "stop")))
    episode = talk(engine, [say("30 31")], chat=WordChat(bare=True), max_response_len=4)
    assert episode.ids[len(episode.prompt_ids) :].tolist() == [20, STOP, 30, 31]
    assert episode.response_mask[len(episode.prompt_ids) :].astype(int).tolist() == [1, 1, 0, 0]
    assert episode.end == "token_limit"


def test_an_observation_one_token_too_long_is_left_out_whole() -> None:
    engine = ScriptedEngine(replies(([20, STOP], "stop")))
    episode = talk(engine, [say("30 31 32")], chat=WordChat(bare=True), max_response_len=4)
    assert episode.ids[len(episode.prompt_ids) :].tolist() == [20, STOP]
    assert (episode.end, episode.truncated) == ("token_limit", True)


def test_a_cut_turn_is_closed_unmasked_and_the_dialogue_goes_on() -> None:
    engine = ScriptedEngine(replies(([20, 21], "length"), ([22, STOP], "stop")))
    episode = talk(engine, [say("30")], max_turn_len=2)
    assert episode.ids.tolist() == [10, 11, ASK, 20, 21, STOP, SEPARATOR, 30, ASK, 22, STOP]
    assert episode.response_mask.astype(int).tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]
    assert episode.turns[0].finish == "length" and math.isnan(episode.turns[0].logps[2])
    assert episode.end == "done"
    assert [r.params.max_new_tokens for r in engine.requests] == [2, 2]


def test_a_turn_ends_after_a_stop_text_and_is_closed_unmasked() -> None:
    engine = ScriptedEngine(replies(([20, 21], "stop"), ([22, STOP], "stop")))
    episode = talk(engine, [say("30")], stop=("21", "23"))
    assert engine.requests[0].params.stop_ids == (STOP, 21, 23)
    assert episode.ids.tolist() == [10, 11, ASK, 20, 21, STOP, SEPARATOR, 30, ASK, 22, STOP]
    assert episode.response_mask.astype(int).tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]
    assert episode.turns[0].finish == "stop" and episode.messages[1].content == "20 21"


def test_each_limit_is_named() -> None:
    long = ([20, 21, 22, 23], "length")
    assert talk(ScriptedEngine(replies(long)), [], max_response_len=4).end == "token_limit"
    assert talk(ScriptedEngine(replies(long)), [], max_context=7).end == "context_limit"
    one = ([20, STOP], "stop")
    assert talk(ScriptedEngine(replies(one, one)), [say("30")] * 9, max_turns=2).end == "turn_limit"
    assert talk(ScriptedEngine(replies()), [], max_context=3).end == "context_limit"  # no room for one token


def test_the_environment_hears_the_last_turn_too_and_its_end_wins_over_the_turn_limit() -> None:
    env_end = [say("30"), Observation((Message("user", "31"),), end="gave_up")]
    one = ([20, STOP], "stop")
    episode = talk(ScriptedEngine(replies(one, one)), env_end, max_turns=2)
    assert episode.end == "gave_up"
    assert episode.messages[-1].content == "31"  # in the transcript, not among the tokens
    assert episode.ids.tolist()[-2:] == [20, STOP]


@pytest.mark.parametrize("failure", ["engine", "environment"])
def test_a_failure_ends_the_episode_with_error_and_keeps_what_was_said(
    failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    second = EngineError("dead") if failure == "engine" else ([21, STOP], "stop")
    answers = [say("30"), RuntimeError("bug in the environment" * 1000)] if failure == "environment" else [say("30")]
    engine = ScriptedEngine(replies(([20, STOP], "stop"), second))
    episode = talk(engine, answers)
    assert episode.end == "error"
    assert all(len(line.getMessage()) < 300 for line in caplog.records) and caplog.records
    assert episode.turns[0].ids.tolist() == [20, STOP]
    assert engine.released == ["s"]


def test_past_its_deadline_an_episode_is_aborted_in_the_engine() -> None:
    """Case 25: the abort reaches the engine."""
    engine = ScriptedEngine(replies(), hang=True)
    episode = talk(engine, [], timeout_s=0.02)
    assert (episode.end, engine.aborted, engine.released) == ("aborted", ["s"], ["s"])


@pytest.mark.parametrize("where", ["make", "opening", "observe"])
def test_past_its_deadline_an_episode_is_aborted_though_its_environment_hangs(where: str) -> None:
    free = threading.Event()

    class Hangs(ScriptedEnv):
        def __init__(self) -> None:
            super().__init__(PROMPT, [])
            self.at("make")

        def at(self, here: str) -> None:
            if here == where:
                free.wait()

        def opening(self) -> tuple[Message, ...]:
            self.at("opening")
            return super().opening()

        def observe(self, messages: Sequence[Message]) -> Observation:
            self.at("observe")
            return super().observe(messages)

    engine = ScriptedEngine(replies(([20, STOP], "stop")))
    episode = talk(engine, [], make=Hangs, calls=Aside(patience_s=0.01), timeout_s=0.05)
    free.set()
    assert (episode.end, episode.num_agent_turns, engine.released) == ("aborted", where == "observe", ["s"])


def test_an_aborted_turn_ends_the_episode_with_its_tokens() -> None:
    episode = talk(ScriptedEngine(replies(([20], "abort"))), [])
    assert (episode.end, episode.turns[0].ids.tolist(), episode.truncated) == ("aborted", [20], True)


def test_turns_have_seeds_of_their_own() -> None:
    one = ([20, STOP], "stop")
    seeds = []
    for seed in (0, 1, 0):
        engine = ScriptedEngine(replies(one, one, one))
        talk(engine, [say("30"), say("31")], seed=seed)
        seeds.append([r.seed for r in engine.requests])
    assert seeds[0] == seeds[2]
    assert len({*seeds[0], *seeds[1]}) == 6


def test_a_dialogue_with_the_real_engine_has_its_tokens_and_logps(tiny_model: Path) -> None:
    """The engine's log-probs of a three-turn dialogue are those of one pass over the finished ids."""
    engine = LocalEngine(tiny_model, dtype="float32", max_running=4, max_context=200, threads=1)
    episode = talk(engine, [say("30 31"), say("32")], max_turn_len=9, seed=5)
    assert episode.num_agent_turns == 3
    ids = episode.ids.tolist()
    logps = [0.0]
    for t in range(1, len(ids)):
        plan, _ = engine.model.plan([(0, t - 1, ids[t - 1 : t])])
        logps.append(float((engine.model.forward(plan)[0] / 0.9).log_softmax(-1)[ids[t]]))
    mask = episode.response_mask
    assert mask.sum() == episode.num_model_tokens > 3
    assert episode.rollout_logps[mask] == pytest.approx(np.array(logps)[mask], abs=2e-5)
