"""Scores episodes: weighted parts, their breakdown, and errors that are counted and never pass for a reward of 0."""

from __future__ import annotations

import asyncio
import queue
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from mdapo.config.quality import MEASURES
from mdapo.config.schema import QualityCfg, RewardCfg, RewardPart
from mdapo.errors import UserError
from mdapo.rewards import BUILTIN
from mdapo.rewards.calling import BadReward, load_function
from mdapo.rewards.processes import Worker, as_json
from mdapo.rewards.quality import NoQuality, QualityScorer
from mdapo.types import Episode, Message, Score

NOT_MEASURED = QualityCfg()
_UNSCORED = Score(value=0.0, outcome=0.0, valid=False)


class RewardRunner:
    """Calls every reward part on a finished episode and adds up.

    ``Score.value`` is the weighted sum; ``parts`` holds each part's value under its name and its breakdown under
    ``name/key``; ``outcome`` is that of the first part that tells one (``acc``, ``success``, ``Score.outcome``), else
    the first part's value cut to [0, 1].
    With ``reward.workers`` the parts run in processes that are killed at ``reward.timeout_s`` a part and replaced;
    without, in this process, which is for mdapo's own rewards only.
    With ``quality.embeddings`` coherence and relevance are measured too (`QualityScorer`); ``coherence`` and
    ``relevance`` may then be parts. An episode whose quality cannot be had has its score without it, and is counted
    as a failure all the same.
    A part that raises, hangs, dies or returns no number, or one beyond 1e6 in size, makes the score invalid;
    ``errors`` counts why, each episode once.
    """

    def __init__(
        self,
        cfg: RewardCfg,
        *,
        default: str | None = None,
        every_turn: bool = False,
        quality: QualityCfg = NOT_MEASURED,
    ) -> None:
        """``default``: the environment's name, whose reward is used where ``reward.functions`` is empty.

        ``every_turn``: also score the conversation as it stood before each agent turn (``Score.before``).

        Raises ``UserError``: functions that cannot be loaded or called, none at all, no embedder for ``quality``.
        """
        self.cfg, self.every_turn = cfg, every_turn
        self.parts = list(cfg.functions) or _default_part(default)
        self.names = _part_names(self.parts)
        self._plain = [part for part in self.parts if part.name not in MEASURES]  # the others need no function
        self._measures = any(part.name in MEASURES for part in self.parts)
        self.errors: Counter[str] = Counter()  # "part: reason", since the start
        self._step_errors: Counter[str] = Counter()
        self._step_scored = 0
        self._functions = []
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._workers: set[Worker] = set()
        self._threads: ThreadPoolExecutor | None = None
        self._closing = False
        self.quality = None if quality.embeddings is None else QualityScorer(quality)
        try:
            if self._measures and self.quality is None:
                raise UserError(f"reward.functions: {' and '.join(MEASURES)} need quality.embeddings")
            if cfg.workers and self._plain:
                self._start_workers()
            else:
                self._functions = _load_here(self._plain)
        except UserError:
            self.close()
            raise

    async def score(self, episode: Episode) -> Score:
        """Never raises for what a function does. An episode that ended in an infrastructure error is not scored."""
        if episode.end == "error":
            return _UNSCORED
        answers, quality = await self._answers(episode, episode.messages, measure=True)
        self._count(answers, quality)
        score = self._combine(answers)
        if score.valid and "error" not in quality:
            score = replace(score, **quality)
        if self.every_turn and score.valid:
            score = replace(score, before=await self._before_turns(episode))
        return score

    async def _before_turns(self, episode: Episode) -> tuple[float, ...]:
        """The value before each agent turn: 0 before the first, then that of the conversation so far.

        Where the reward has none for an unfinished conversation, that before the earlier turn stands: what the two
        turns gained is then the later one's. It is no failure; only the whole episode's is.
        """
        said = [i for i, m in enumerate(episode.messages) if m.role == "assistant" and i >= _opening(episode)]
        values = [0.0] * len(said[:1])
        for start in said[1:]:
            answers, _ = await self._answers(episode, episode.messages[:start], measure=self._measures)
            earlier = self._combine(answers)
            values.append(earlier.value if earlier.valid else values[-1])
        return tuple(values)

    async def _answers(
        self, episode: Episode, messages: Sequence[Message], *, measure: bool
    ) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
        """What each part says, and the measures by name, or why there are none (``error``); empty without them."""
        if self.quality is None or not measure:
            return await self._said(episode, messages), {}
        said, quality = await asyncio.gather(
            self._said(episode, messages), self._measured(self.quality, episode, messages)
        )
        plain = iter(said)  # a lost process leaves the last ones out
        answers: list[Mapping[str, Any]] = []
        for part in self.parts:
            if part.name not in MEASURES:
                answer = next(plain, None)
                if answer is None:
                    break
                answers.append(answer)
            elif "error" in quality:
                answers.append(quality)
            else:
                answers.append({"value": quality[part.name], "outcome": None, "parts": {}})
        return answers, quality

    async def _measured(self, scorer: QualityScorer, episode: Episode, messages: Sequence[Message]) -> dict[str, Any]:
        try:
            return vars(await scorer.score(messages, opening=_opening(episode)))
        except NoQuality as error:
            return {"error": str(error)}

    async def _said(self, episode: Episode, messages: Sequence[Message]) -> list[Mapping[str, Any]]:
        """What each function says."""
        call: dict[str, Any] = {
            "messages": messages,
            "prompt": episode.prompt,
            "end": episode.end,
            "opening": _opening(episode),
        }
        if self._threads is None:
            return [_answer_here(function, call) for function in self._functions]
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._ask, as_json(**call))

    def check_step(self, *, at_least: int = 0) -> None:
        """Raises ``UserError`` when a larger share than ``reward.max_error_rate`` of the step's episodes so far, of
        which there are ``at_least`` so many, had no reward; the count starts anew then."""
        scored, failed = self._step_scored, self._step_errors.total()
        if scored >= at_least and failed > self.cfg.max_error_rate * scored:
            why = [f"  {line}" for line in told(self.end_evaluation())]
            limit = f"reward.max_error_rate={self.cfg.max_error_rate}"
            raise UserError([f"{failed} of {scored} episodes of this step got no reward, more than {limit}:", *why])

    def end_step(self) -> Counter[str]:
        """The step's errors by "part: reason"; starts the next count. Raises as ``check_step`` does."""
        self.check_step()
        return self.end_evaluation()

    def end_evaluation(self) -> Counter[str]:
        """The errors since the last count by "part: reason"; starts the next one, so that a step's rate is its own."""
        errors = self._step_errors
        self._step_errors, self._step_scored = Counter(), 0
        return errors

    def metrics(self) -> dict[str, float]:
        """What measuring quality took since the last call; nothing where it is not measured."""
        return self.quality.metrics() if self.quality is not None else {}

    def close(self) -> None:
        """Ends all processes."""
        self._closing = True
        if self.quality is not None:
            self.quality.close()
        for worker in list(self._workers):
            worker.interrupt()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    # ---- workers -----------------------------------------------------------------------------------------------------

    def _start_workers(self) -> None:
        workers = [self._new_worker() for _ in range(self.cfg.workers)]
        try:
            for worker in workers:
                worker.wait_ready()
                self._idle.put(worker)
        except UserError:
            for worker in workers:
                worker.kill()
            raise
        self._threads = ThreadPoolExecutor(self.cfg.workers, thread_name_prefix="reward")

    def _new_worker(self) -> Worker:
        worker = Worker([{"name": p.name, "args": p.args} for p in self._plain])
        self._workers.add(worker)
        return worker

    def _ask(self, episode: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """In one of as many threads as there are workers: one is idle, and whatever happens here, one is afterwards."""
        worker = self._idle.get()
        try:
            if not worker.alive:  # died while idle
                worker = self._replace(worker)
            worker.wait_ready()
            return worker.ask(episode, timeout_s=self.cfg.timeout_s)
        finally:  # without it the other threads, and so the end of the run, would wait for ever
            self._idle.put(worker if worker.alive else self._replace(worker))

    def _replace(self, lost: Worker) -> Worker:
        lost.kill()
        self._workers.discard(lost)
        return lost if self._closing else self._new_worker()

    # ---- scores ------------------------------------------------------------------------------------------------------

    def _count(self, answers: Sequence[Mapping[str, Any]], quality: Mapping[str, Any]) -> None:
        """One episode more, and why it has no score or quality, if so: the first part that failed."""
        self._step_scored += 1
        for name, answer in [*zip(self.names, answers, strict=False), ("quality", quality)]:
            if "error" in answer:  # a lost process leaves the last parts out
                self.errors[f"{name}: {answer['error']}"] += 1
                self._step_errors[f"{name}: {answer['error']}"] += 1
                return

    def _combine(self, answers: Sequence[Mapping[str, Any]]) -> Score:
        """``answers``: ``value``, ``outcome``, ``parts`` of each part, or ``error``."""
        if any("error" in answer for answer in answers):
            return _UNSCORED
        parts: dict[str, float] = {}
        for name, answer in zip(self.names, answers, strict=True):
            parts[name] = answer["value"]
            parts |= {f"{name}/{key}": value for key, value in answer["parts"].items()}
        value = sum(part.weight * answer["value"] for part, answer in zip(self.parts, answers, strict=True))
        told = [a["outcome"] for a in answers if a["outcome"] is not None]
        outcome = told[0] if told else min(max(answers[0]["value"], 0.0), 1.0)
        return Score(value=value, outcome=outcome, parts=parts)


def told(errors: Counter[str]) -> list[str]:
    """Counted errors for people, the most frequent first."""
    return [f"{n} x {reason}" for reason, n in errors.most_common(10)]


def _answer_here(function: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        verdict = function(**call)
    except BadReward as error:
        return {"error": str(error)}
    return {"value": verdict.value, "outcome": verdict.outcome, "parts": verdict.parts}


def _opening(episode: Episode) -> int:
    """How many messages stood before the policy's first turn; a prompt may hold assistant messages as examples."""
    said = [i for i, m in enumerate(episode.messages) if m.role == "assistant"]
    turns = episode.num_agent_turns
    return said[-turns] if turns else len(episode.messages)


def _default_part(environment: str | None) -> list[RewardPart]:
    if environment not in BUILTIN:
        raise UserError(
            f"reward.functions: none given, and the environment {environment} brings none; "
            f"built-in rewards are {', '.join(sorted(BUILTIN))}"
        )
    return [RewardPart(name=environment)]


def _part_names(parts: Sequence[RewardPart]) -> list[str]:
    """The functions' names, numbered where one comes twice."""
    names: list[str] = []
    for part in parts:
        short = part.name.rpartition(":")[2]
        names.append(short if short not in names else f"{short}.{len(names) + 1}")
    return names


def _load_here(parts: Sequence[RewardPart]) -> list[Any]:
    foreign = [p.name for p in parts if not BUILTIN.get(p.name, p.name).startswith("mdapo.")]
    if foreign:
        why = "rewards that are not mdapo's own run in processes of their own; set reward.workers=1 or more"
        raise UserError([f"reward.functions: {name}: {why}" for name in foreign])
    return [load_function(p.name, p.args) for p in parts]
