"""Rank 0's side of a run: prompts, engine, environments and rewards behind one object, or recorded groups instead."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from mdapo.data.chat import ChatFormat
from mdapo.data.prompts import Kind, PromptStream, load_prompts
from mdapo.data.wire import load_groups_file, save_groups_file
from mdapo.environments.aside import Aside
from mdapo.environments.calling import load_environment
from mdapo.errors import UserError
from mdapo.rewards.runner import RewardRunner, told
from mdapo.rollout.ahead import AheadBatch
from mdapo.rollout.dynamic_batch import Collected, DynamicBatch, Held
from mdapo.rollout.engine import EngineError, SamplingParams
from mdapo.rollout.lengths import Lengths
from mdapo.rollout.sglang_engine import SGLangEngine
from mdapo.rollout.short_prompts import short_prompts
from mdapo.sync.compare import PROMPT_TOKENS, PROMPTS, TOKENS, Probed, probe
from mdapo.tracking.recorder import replay_path
from mdapo.tracking.run_folder import SERVERS
from mdapo.trainer.engines import open_engine
from mdapo.trainer.signals import RESUMES, Interrupted, StopSignal
from mdapo.trainer.sync_check import askable

if TYPE_CHECKING:
    from mdapo.config.schema import Config
    from mdapo.environments.base import EnvironmentFactory
    from mdapo.rollout.engine import Engine
    from mdapo.rollout.event_loop import EventLoop
    from mdapo.sync.push import Pusher
    from mdapo.trainer.journal import Journal
    from mdapo.types import Episode, Prompt

CARRIED, UNFINISHED = "carried.safetensors", "unfinished.safetensors"
T = TypeVar("T")


class Rollout(Protocol):
    """Where a step's groups come from. ``pusher``: how its engine's servers get weights, where there are servers."""

    engine: Engine | None

    @property
    def pusher(self) -> Pusher | None: ...

    @property
    def lengths(self) -> Lengths: ...

    def collect(self, *, version: int, stop: StopSignal) -> Collected: ...
    def evaluate(self, *, step: int, stop: StopSignal) -> dict[str, float]: ...
    def trained(self, collected: Collected) -> None: ...
    def make_room(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def probe(self, *, version: int) -> Probed: ...
    def save(self, folder: Path) -> dict[str, Any]: ...
    def restore(self, folder: Path, state: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


def build_rollout(config: Config, *, loop: EventLoop, journal: Journal, stop: StopSignal) -> Rollout:
    """``debug.mode: train`` reads recorded groups; all else talks to an engine. ``UserError`` as their parts say;
    ``Interrupted`` when ``stop`` comes while the data is read."""
    if config.debug.mode == "train":
        return Replay(config)
    return LiveRollout(config, loop=loop, journal=journal, stop=stop)


class LiveRollout:
    """An engine, a dynamic batch and the validation prompts."""

    def __init__(self, config: Config, *, loop: EventLoop, journal: Journal, stop: StopSignal) -> None:
        self.config, self.loop, self.journal = config, loop, journal
        self._boundary: Held | None = None  # while a step is under way
        self.chat = ChatFormat.from_folder(config.model.tokenizer_path or config.model.path, config.model.chat_template)
        for line in self.chat.check().lines:
            journal.say(line)
        loading = Aside()
        self.environments = self._run(loading.call(lambda: load_environment(config.environment)), stop)
        loading.close()
        self.calls, make = self.environments.calls(config.environment), self.environments
        self.train = self._prompts(config.data.train_files, "training", make, stop)
        val = config.data.val_files
        self.val = self._prompts(val, "validation", make, stop)[: config.data.val_limit or None] if val else []
        stream = PromptStream(self.train, seed=config.run.seed, shuffle=config.data.shuffle)
        self.rewards = RewardRunner(
            config.reward, default=config.environment.name, every_turn=config.algorithm.advantage.credit == "turn"
        )
        self.opened = self._run(open_engine(config, logs=journal.path / SERVERS, say=journal.say), stop)
        self.engine: Engine | None = self.opened.engine
        self.batch = (AheadBatch if config.rollout.mode == "async" else DynamicBatch)(
            self.engine,
            self.chat,
            make,
            self.rewards,
            stream,
            config,
            calls=self.calls,
            notify=journal.say,
            progress=journal.doing,
        )

    @property
    def pusher(self) -> Pusher | None:
        return self.opened.pusher

    @property
    def lengths(self) -> Lengths:
        return self.batch.talks.lengths

    def _prompts(self, files: list[str], kind: Kind, make: EnvironmentFactory, stop: StopSignal) -> list[Prompt]:
        prompts = load_prompts(files, self.config.data)
        work = short_prompts(kind, prompts, make, self.chat, self.config, seed=0, calls=self.calls)
        kept, dropped = self._run(work, stop)
        longer = f", {dropped} longer than {self.config.data.max_prompt_len} tokens left out" if dropped else ""
        self.journal.say(f"{kind} prompts: {len(kept)}{longer}")
        return kept

    def collect(self, *, version: int, stop: StopSignal) -> Collected:
        if self.config.rollout.mode != "async":  # there, a step takes what there is at any time
            self._boundary = self.loop.run(self.batch.held())
        collected = self._run(self.batch.collect(version), stop)
        return replace(collected, stats={**collected.stats, **self.opened.engine.metrics()})

    def evaluate(self, *, step: int, stop: StopSignal) -> dict[str, float]:
        """``eval/success`` (the mean outcome), ``eval/reward``, lengths, the reward's parts, on validation prompts."""
        if not self.val:
            return {}
        episodes = self._run(self.batch.evaluate(self.val), stop)
        failures = self.rewards.end_evaluation()
        self.journal.note_evaluation(step, episodes)
        found = evaluation(episodes, failures, broken=self.batch.told())
        lost, why = unscored(episodes, failures, broken=self.batch.told())
        if lost:
            self.journal.say(
                f"evaluation: {lost} of {len(episodes)} conversations could not be scored: {'; '.join(why)}"
            )
        success, reward = found["eval/success"], found["eval/reward"]
        self.journal.say(
            f"evaluated after step {step}: success {success:.3f}, reward {reward:.3f}, {len(episodes)} conversations"
        )
        return found

    def trained(self, collected: Collected) -> None:
        self.loop.call(lambda: self.batch.trained(collected))
        self._boundary = None

    def make_room(self) -> None:
        """The actor trains next, and then brings new weights."""
        engine, pusher = self.opened.engine, self.opened.pusher
        if pusher is not None and pusher.occupation.shared and isinstance(engine, SGLangEngine):
            try:
                self.loop.run(engine.give_back(pusher.give_back))
            except EngineError as error:
                self.journal.say(f"the servers keep their memory while the actor trains: {error}")

    def pause(self) -> None:
        """Before the engine's weights change: no conversation is under way until ``resume``."""
        self.loop.run(self.batch.pause())

    def resume(self) -> None:
        self.loop.run(self.batch.resume())

    def probe(self, *, version: int) -> Probed:
        """A few tokens of every server, for ``sync.check``; while nothing is under way. No signal cuts it short: it
        comes within a step, which is whole or has not happened."""

        async def work() -> Probed:
            found = await probe(
                askable(self.opened.engine),
                self._probes(),
                params=SamplingParams(
                    min(TOKENS, self.config.rollout.max_response_len),
                    temperature=self.config.rollout.temperature,
                    ignore_eos=True,
                ),
                version=version,
                deadline_s=self.config.sync.timeout_s,
            )
            await self.opened.engine.abort()  # nothing of it runs on or lends its cache
            return found

        return self.loop.run(work())

    def _probes(self) -> list[list[int]]:
        """The ends of the first prompts."""
        return [self.chat.prompt_ids(prompt.messages)[-PROMPT_TOKENS:] for prompt in self.train[:PROMPTS]]

    def save(self, folder: Path) -> dict[str, Any]:
        """Between steps, what there is; within one, what there was before it, so that it begins again as it was."""
        held = self._boundary or self.loop.run(self.batch.held())
        save_groups_file(folder / CARRIED, held.carried)
        if held.unfinished:
            save_groups_file(folder / UNFINISHED, held.unfinished)
        return held.state

    def restore(self, folder: Path, state: Mapping[str, Any]) -> None:
        unfinished = load_groups_file(folder / UNFINISHED) if state.get("unfinished") else []
        held = Held(dict(state), tuple(load_groups_file(folder / CARRIED)), tuple(unfinished))
        self.loop.call(lambda: self.batch.restore(held))

    def close(self) -> None:
        self.loop.run(self.batch.close())  # first, while what its conversations use is there
        self.rewards.close()
        self.calls.close()
        self.environments.close()
        self.loop.run(self.opened.close())

    def _run(self, work: Coroutine[Any, Any, T], stop: StopSignal) -> T:
        """Run in the event loop; a signal cancels it, and what was under way is forgotten (its prompts come again)."""
        if stop.requested:
            work.close()
            raise Interrupted(RESUMES)
        try:
            return self.loop.run(work, cancels=lambda cancel: setattr(stop, "on_stop", cancel))
        except asyncio.CancelledError:
            raise Interrupted(RESUMES) from None
        finally:
            stop.on_stop = None


class Replay:
    """Groups recorded by an earlier run, step by step: the training half of a run without an engine."""

    engine: Engine | None = None
    pusher: Pusher | None = None

    def __init__(self, config: Config) -> None:
        """Raises ``UserError`` when ``debug.replay`` (a run's folder, or its ``replay/``) holds no recorded steps."""
        assert config.debug.replay is not None
        given = Path(config.debug.replay)
        self.root, self.step = given.parent if given.name == "replay" else given, 0
        self.lengths = Lengths(config)
        if not self._path(1).exists():
            raise UserError(f"debug.replay={given}: no recorded steps, {self._path(1)} is missing")

    def _path(self, step: int) -> Path:
        return replay_path(self.root, step)

    def collect(self, *, version: int, stop: StopSignal) -> Collected:
        groups = load_groups_file(self._path(self.step + 1))
        stats = self.lengths.measure([episode for group in groups for episode in group.episodes])
        return Collected(groups=tuple(groups), stats=stats, exhausted=not self._path(self.step + 2).exists())

    def evaluate(self, *, step: int, stop: StopSignal) -> dict[str, float]:
        return {}

    def trained(self, collected: Collected) -> None:
        self.step += 1
        self.lengths.trained()

    def make_room(self) -> None:
        pass

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def probe(self, *, version: int) -> Probed:
        return Probed({}, {})

    def save(self, folder: Path) -> dict[str, Any]:
        return {"step": self.step, "lengths": self.lengths.state()}

    def restore(self, folder: Path, state: Mapping[str, Any]) -> None:
        self.step = int(state["step"])
        if "lengths" in state:  # not in checkpoints of earlier versions
            self.lengths.restore(state["lengths"])

    def close(self) -> None:
        pass


def unscored(episodes: Sequence[Episode], failures: Counter[str], *, broken: Sequence[str]) -> tuple[int, list[str]]:
    """How many conversations have no score, and why: the reward's failures, and ``broken``, those of environment and
    engine."""
    lost = sum(episode.score is None or not episode.score.valid for episode in episodes)
    return lost, [*told(failures), *broken]


def evaluation(episodes: Sequence[Episode], failures: Counter[str], *, broken: Sequence[str]) -> dict[str, float]:
    """Means over the episodes that could be scored. ``UserError`` with the reasons where there is none."""
    scores = [episode.score for episode in episodes if episode.score is not None and episode.score.valid]
    if not scores:
        lost, why = unscored(episodes, failures, broken=broken)
        raise UserError(
            [f"evaluation: not one of {lost} conversations could be scored:", *(f"  {line}" for line in why)]
        )
    found = {"eval/success": sum(s.outcome for s in scores) / len(scores)}
    found["eval/reward"] = sum(s.value for s in scores) / len(scores)
    for name in scores[0].parts:
        found[f"eval/parts/{name}"] = sum(s.parts.get(name, 0.0) for s in scores) / len(scores)
    found["eval/turns"] = sum(episode.num_agent_turns for episode in episodes) / len(episodes)
    found["eval/response_tokens"] = sum(episode.num_model_tokens for episode in episodes) / len(episodes)
    return found
