"""One conversation between the policy and an environment: tokens in, tokens out, every limit named.

The episode's ids are the engine's own. What the environment says is appended as the template renders it, with mask 0.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

import numpy as np

from mdapo.config.lengths import scaled
from mdapo.config.schema import Config
from mdapo.environments.aside import Aside
from mdapo.environments.base import Environment, Observation, Tools
from mdapo.environments.resuming import NotTheSame, catch_up
from mdapo.errors import UserError, shortened
from mdapo.rollout.engine import Completion, Engine, EngineError, Request, SamplingParams
from mdapo.rollout.pause import Pause
from mdapo.rollout.seeds import mix
from mdapo.types import UNFINISHED, EndReason, Episode, Message, Prompt, Turn

log = logging.getLogger(__name__)
T = TypeVar("T")


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
    def of(cls, cfg: Config, length_scale: float = 1.0) -> Limits:
        """Those of the configuration, budgets times ``length_scale``; the context stays."""
        rollout = cfg.rollout
        return cls(
            max_turns=rollout.max_turns,
            max_response_len=scaled(rollout.max_response_len, length_scale),
            max_context=cfg.model.max_context,
            max_turn_len=None if rollout.max_turn_len is None else scaled(rollout.max_turn_len, length_scale),
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
    begun: Episode | None = None,
    pause: Pause | None = None,
) -> Episode:
    """Talk until the environment ends it or a limit is met; the episode is not scored yet.

    ``make_env`` makes this episode's own environment. ``sampling`` gives temperature and cuts; its token count and stop
    ids are set here for each turn. ``session`` is unique among live episodes. ``calls`` is where the environment runs:
    one that hangs is left to itself. An environment or engine that fails ends the episode with ``error`` (``failed``
    hears why), the deadline with ``aborted``; neither raises. ``UserError`` when the chat template refuses the
    conversation or the environment breaks its contract.

    When ``pause`` is requested (and the engine aborts), the episode is ``unfinished``, with all tokens that the engine
    wrote. ``begun`` is such a one, to go on with: every limit counts what it has; each token keeps its version.
    """
    talk = _Talk(engine, make_env, chat, limits, sampling, session, group, seed, calls, pause or Pause())
    end: EndReason | Literal["unfinished"]
    try:
        async with asyncio.timeout(limits.timeout_s):
            end = await talk.run(begun)
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
        if not talk.pause.took():
            raise
        end = UNFINISHED
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
        pause: Pause,
    ) -> None:
        self.engine, self.make_env, self.chat, self.limits = engine, make_env, chat, limits
        self.sampling, self.session, self.group, self.seed, self.calls = sampling, session, group, seed, calls
        self.pause = pause
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

    @property
    def cut_turn(self) -> Turn | None:
        """The policy's turn at hand, where a pause has cut it."""
        return self.turns[-1] if self.turns and self.turns[-1].finish == "abort" else None

    @property
    def unheard(self) -> bool:
        """Whether the last turn is a whole one of the policy's, which waits for its answer."""
        return bool(self.turns) and self.turns[-1].role == "assistant" and self.cut_turn is None

    @property
    def answered(self) -> int:
        """Turns of the policy that the environment has answered."""
        return sum(t.role == "assistant" for t in self.turns) - (self.unheard or self.cut_turn is not None)

    async def run(self, begun: Episode | None) -> EndReason | Literal["unfinished"]:
        env = await self._begin() if begun is None or not begun.messages else await self._go_on(begun)
        for turn in range(self.answered, self.limits.max_turns):
            if not self.unheard:
                if self.budget <= 0:
                    return self.limit_met
                if self.pause.requested:
                    return UNFINISHED
                finish = await self._speak(turn)
                if finish == "abort":
                    return UNFINISHED if self.pause.requested else "aborted"
                if finish == "length" and self.budget <= 0:
                    return self.limit_met
            if self.pause.requested and not self.calls.at_once:
                return UNFINISHED  # the call would be given up at once, and made again
            observation = await self._listen(env)
            if observation.end is not None:
                return observation.end
            if turn + 1 == self.limits.max_turns:
                return "turn_limit"
            said = self.turns[-1].ids
            if not self._append(observation, closed=len(said) > 0 and int(said[-1]) in self.chat.stop_ids):
                return self.limit_met
        return "turn_limit"

    async def _begin(self) -> Environment:
        def begin() -> tuple[Environment, tuple[Message, ...], Tools]:
            env = self.make_env()
            return env, env.opening(), getattr(env, "tools", ())

        env, opening, tools = await self._call(begin, "the environment's opening failed")
        self.messages = list(opening)
        self.prompt_ids = self.chat.prompt_ids(self.messages, tools=tools)
        self.ids = list(self.prompt_ids)
        return env

    async def _go_on(self, begun: Episode) -> Environment:
        """Nothing is rendered again: the ids are those that the policy saw, tools included."""
        self.messages, self.turns = list(begun.messages), list(begun.turns)
        self.prompt_ids, self.ids = begun.prompt_ids.tolist(), begun.ids.tolist()
        what = "the environment could not go on"
        env = await self._call(self.make_env, what)
        try:
            await catch_up(
                env,
                begun.messages,
                answered=self.answered,
                unheard=self.unheard,
                call=lambda work: self._call(work, what),
            )
        except NotTheSame as error:
            raise EnvironmentFailed(f"{what}: {shortened(str(error))}") from error
        return env

    async def _speak(self, turn: int) -> str:
        """One turn of the policy, or the rest of one that was cut; how it ended."""
        cut = self.cut_turn
        already = len(cut.ids) if cut is not None else 0
        room = min(self.budget, (self.limits.max_turn_len or self.budget + already) - already)
        stop_ids = (*self.chat.stop_ids, *self.chat.ids_with(self.limits.stop))
        params = replace(self.sampling, max_new_tokens=room, stop_ids=stop_ids)
        seed = mix(mix(self.seed) ^ turn)
        if already:  # its random numbers are not drawn a second time
            seed = mix(seed ^ mix(already))
        completion = await self.engine.generate(Request(self.ids, params, self.session, self.group, seed))
        finish = completion.finish
        if finish == "abort" and self.pause.requested:
            if not completion.ids:
                return finish
            finish = "stop" if completion.ids[-1] in stop_ids else "length" if len(completion.ids) >= room else finish
        self.ids = [*self.ids, *completion.ids]
        written = _written(completion, finish)
        if cut is None:
            self.turns.append(written)
        else:
            self.turns[-1] = written = _joined(cut, written)
        if finish != "abort" or not self.pause.requested:
            self.messages.append(Message("assistant", self.chat.decode(written.ids.tolist())))
        return finish

    async def _listen(self, env: Environment) -> Observation:
        said = tuple(self.messages)
        observation = await self._call(lambda: env.observe(said), f"the environment failed in turn {len(self.turns)}")
        assert isinstance(observation, Observation)
        self.messages += observation.messages
        return observation

    async def _call(self, work: Callable[[], T], what: str) -> T:
        """What the environment's ``work()`` returns, or the coroutine that it returns does. ``EnvironmentFailed``: it
        raised."""
        try:
            with self.pause.listening():
                return await self.calls.call(work)
        except UserError:
            raise
        except Exception as error:
            raise EnvironmentFailed(f"{what}: {shortened(repr(error))}") from error

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


def _written(completion: Completion, finish: str) -> Turn:
    ids = np.array(completion.ids, np.int32)
    logps = np.array(completion.logps, np.float32)
    return Turn("assistant", ids, np.ones(len(ids), bool), logps, version=completion.version, finish=finish)


def _joined(cut: Turn, rest: Turn) -> Turn:
    """One turn of a cut one and its rest, each token with the version that wrote it."""
    pieces = list(cut.pieces)
    if cut.version != rest.version:
        pieces.append(cut.runs[-1])
    return replace(
        rest,
        ids=np.concatenate([cut.ids, rest.ids]),
        mask=np.concatenate([cut.mask, rest.mask]),
        logps=np.concatenate([cut.logps, rest.logps]),
        pieces=tuple(pieces),
    )
