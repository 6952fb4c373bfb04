"""One conversation between the policy and an environment: tokens in, tokens out, every limit named.

The episode's ids are the engine's own. What the environment says is appended as the template renders it, with mask 0.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from mdapo.config.schema import Config
from mdapo.environments.aside import Aside
from mdapo.environments.base import Environment, Observation, Tools
from mdapo.errors import UserError, shortened
from mdapo.rollout.engine import Completion, Engine, EngineError, Request, SamplingParams
from mdapo.rollout.seeds import mix
from mdapo.types import EndReason, Episode, Message, Prompt, Turn

log = logging.getLogger(__name__)


class Chat(Protocol):
    """What an episode needs of ``data/chat.py``."""

    @property
    def stop_ids(self) -> Sequence[int]: ...

    @property
    def close_ids(self) -> Sequence[int]: ...

    def ids_with(self, texts: tuple[str, ...]) -> Sequence[int]: ...

    def prompt_ids(self, messages: Sequence[Message], *, tools: Tools = ()) -> list[int]: ...

    def observation_ids(self, messages: Sequence[Message], *, after_stop: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Limits:
    """``max_response_len`` counts all tokens after the prompt, ``max_context`` those of the prompt too.

    ``stop``: a turn ends after a token with one of these texts in it, as after the template's own stop tokens.
    """

    max_turns: int
    max_response_len: int
    max_context: int
    max_turn_len: int | None = None
    stop: tuple[str, ...] = ()
    timeout_s: float = 600.0

    @classmethod
    def of(cls, cfg: Config) -> Limits:
        rollout = cfg.rollout
        return cls(
            max_turns=rollout.max_turns,
            max_response_len=rollout.max_response_len,
            max_context=cfg.model.max_context,
            max_turn_len=rollout.max_turn_len,
            stop=tuple(rollout.stop),
            timeout_s=rollout.episode_timeout_s,
        )


class EnvironmentFailed(RuntimeError):
    """The environment raised: infrastructure, never a property of the sample."""


async def run_episode(
    engine: Engine,
    make_env: Callable[[], Environment],
    chat: Chat,
    prompt: Prompt,
    index: int,
    *,
    limits: Limits,
    sampling: SamplingParams,
    session: str,
    group: str,
    seed: int,
    calls: Aside,
    failed: Callable[[str], object] = lambda _: None,
) -> Episode:
    """Talk until the environment ends it or a limit is met; the episode is not scored yet.

    ``make_env`` makes this episode's own environment. ``sampling`` gives temperature and cuts; its token count and stop
    ids are set here for each turn. ``session`` is unique among live episodes. ``calls`` is where the environment runs:
    one that hangs is left to itself. An environment or engine that fails ends the episode with ``error`` (``failed``
    hears why), the deadline with ``aborted``; neither raises. ``UserError`` when the chat template refuses the
    conversation or the environment breaks its contract.
    """
    talk = _Talk(engine, make_env, chat, limits, sampling, session, group, seed, calls)
    try:
        async with asyncio.timeout(limits.timeout_s):
            end = await talk.run()
    except TimeoutError:
        log.warning("%s: no end after %g s (rollout.episode_timeout_s): aborted", session, limits.timeout_s)
        await engine.abort(session)
        end = "aborted"
    except (EngineError, EnvironmentFailed) as error:
        log.warning("%s: %s", session, error)
        failed(f"{session}: {error}")
        end = "error"
    except asyncio.CancelledError:
        await engine.abort(session)
        raise
    finally:
        await engine.release(session)
    return Episode(
        prompt=prompt,
        index=index,
        prompt_ids=np.array(talk.prompt_ids, np.int32),
        turns=tuple(talk.turns),
        messages=tuple(talk.messages),
        end=end,
    )


class _Talk:
    """The conversation so far."""

    def __init__(
        self,
        engine: Engine,
        make_env: Callable[[], Environment],
        chat: Chat,
        limits: Limits,
        sampling: SamplingParams,
        session: str,
        group: str,
        seed: int,
        calls: Aside,
    ) -> None:
        self.engine, self.make_env, self.chat, self.limits = engine, make_env, chat, limits
        self.sampling, self.session, self.group, self.seed, self.calls = sampling, session, group, seed, calls
        self.messages: list[Message] = []
        self.prompt_ids: list[int] = []
        self.ids: list[int] = []
        self.turns: list[Turn] = []

    @property
    def budget(self) -> int:
        """Tokens that may still be appended."""
        spent = len(self.ids) - len(self.prompt_ids)
        return min(self.limits.max_response_len - spent, self.limits.max_context - len(self.ids))

    @property
    def limit_met(self) -> EndReason:
        """Which limit ``budget`` is up against."""
        context = self.limits.max_context - len(self.prompt_ids)
        return "context_limit" if context < self.limits.max_response_len else "token_limit"

    async def run(self) -> EndReason:
        def begin() -> tuple[Environment, tuple[Message, ...], Tools]:
            env = self.make_env()
            return env, env.opening(), getattr(env, "tools", ())

        try:
            env, opening, tools = await self.calls.call(begin)
        except UserError:
            raise
        except Exception as error:
            raise EnvironmentFailed(f"the environment's opening failed: {shortened(repr(error))}") from error
        self.messages = list(opening)
        self.prompt_ids = self.chat.prompt_ids(self.messages, tools=tools)
        self.ids = list(self.prompt_ids)
        for turn in range(self.limits.max_turns):
            if self.budget <= 0:
                return self.limit_met
            completion = await self._speak(turn)
            if completion.finish == "abort":
                return "aborted"
            if completion.finish == "length" and self.budget <= 0:
                return self.limit_met
            observation = await self._listen(env)
            if observation.end is not None:
                return observation.end
            if turn + 1 == self.limits.max_turns:
                return "turn_limit"
            closed = bool(completion.ids) and completion.ids[-1] in self.chat.stop_ids
            if not self._append(observation, closed=closed):
                return self.limit_met
        return "turn_limit"

    async def _speak(self, turn: int) -> Completion:
        room = min(self.budget, self.limits.max_turn_len or self.budget)
        stop_ids = (*self.chat.stop_ids, *self.chat.ids_with(self.limits.stop))
        params = replace(self.sampling, max_new_tokens=room, stop_ids=stop_ids)
        seed = mix(mix(self.seed) ^ turn)
        completion = await self.engine.generate(Request(self.ids, params, self.session, self.group, seed))
        ids = np.array(completion.ids, np.int32)
        self.turns.append(
            Turn(
                role="assistant",
                ids=ids,
                mask=np.ones(len(ids), bool),
                logps=np.array(completion.logps, np.float32),
                version=completion.version,
                finish=completion.finish,
            )
        )
        self.ids = [*self.ids, *completion.ids]
        self.messages.append(Message("assistant", self.chat.decode(completion.ids)))
        return completion

    async def _listen(self, env: Environment) -> Observation:
        try:
            said = tuple(self.messages)
            observation = await self.calls.call(lambda: env.observe(said))  # a coroutine is awaited there
            assert isinstance(observation, Observation)
        except UserError:
            raise
        except Exception as error:
            why = shortened(repr(error))
            raise EnvironmentFailed(f"the environment failed in turn {len(self.turns)}: {why}") from error
        self.messages += observation.messages
        return observation

    def _append(self, observation: Observation, *, closed: bool) -> bool:
        """Append the observation's tokens, after the close of a turn that has none. False when they do not all fit."""
        close = [] if closed else list(self.chat.close_ids)
        said = self.chat.observation_ids(observation.messages, after_stop=True)
        if len(close) + len(said) > self.budget:
            return False
        if close:
            turn = self.turns[-1]
            self.turns[-1] = replace(
                turn,
                ids=np.concatenate([turn.ids, np.array(close, np.int32)]),
                mask=np.concatenate([turn.mask, np.zeros(len(close), bool)]),
                logps=np.concatenate([turn.logps, np.full(len(close), np.nan, np.float32)]),
            )
        role = observation.messages[0].role if observation.messages else "user"
        self.turns.append(
            Turn(role, np.array(said, np.int32), np.zeros(len(said), bool), np.full(len(said), np.nan, np.float32))
        )
        self.ids = [*self.ids, *close, *said]
        return True
