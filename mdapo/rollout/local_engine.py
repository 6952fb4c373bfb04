"""The in-process engine: continuous batching over all live dialogues, KV caches kept over turns, prompts shared.

One driver task runs while there is work. Each step admits waiting requests, feeds every running one the tokens that its
cache lacks (one: decode; more: prefill, within a budget) in a single forward, samples, and yields to the event loop.
Scheduling depends on the order of arrival only, so equal inputs and weights give equal tokens, bit for bit.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from mdapo.config.model_facts import require_facts
from mdapo.config.weight_files import require_weights
from mdapo.rollout.engine import Completion, EngineError, Request
from mdapo.rollout.local_cache import SlotTable
from mdapo.rollout.local_model import LocalModel, packing_available
from mdapo.rollout.local_sampling import sample
from mdapo.rollout.local_weights import read_weights
from mdapo.rollout.seeds import uniform

STEP_TOKENS = 1024  # prefill tokens of one step
SPREAD = 1.25  # slots that decoding may read for each running dialogue
SETTLE = 3  # turns of the event loop in which answered dialogues may ask again before the next step


@dataclass(eq=False)
class _Running:
    request: Request
    answer: asyncio.Future[Completion]
    slot: int = -1
    tokens: list[int] = field(default_factory=list)  # the request's and those generated since
    cached: int = 0  # of ``tokens``, how many the cache had at the start
    logps: list[float] = field(default_factory=list)

    @property
    def new_ids(self) -> list[int]:
        return self.tokens[len(self.request.ids) :]


class LocalEngine:
    """``Engine`` in this process. ``model_path`` is a Hugging Face folder (dense Llama, Qwen2, Qwen3).

    ``max_running`` dialogues are decoded together, each with at most ``max_context`` tokens. Its own work runs on
    ``threads`` CPU threads (0: every core, since the other ranks wait meanwhile). ``UserError`` when the folder cannot
    be used.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        dtype: Literal["float32", "bfloat16"] = "bfloat16",
        max_running: int = 64,
        max_context: int = 4096,
        device: str = "cpu",
        threads: int = 0,
    ) -> None:
        folder = Path(model_path)
        self.version = 0
        self.max_context = max_context
        self._threads = threads or len(os.sched_getaffinity(0))
        self._slots = SlotTable(max_running)
        self._waiting: list[_Running] = []
        self._running: list[_Running] = []
        self._driver: asyncio.Task[None] | None = None
        self._broken = ""  # why no request can be answered
        facts = require_facts(folder)
        self.model = LocalModel(
            facts,
            read_weights(require_weights(folder, facts)),
            dtype=getattr(torch, dtype),
            device=torch.device(device),
            slots=max_running,
            max_context=max_context,
        )

    @property
    def description(self) -> str:
        """One line for the start of a run: what was chosen."""
        model = self.model
        kind = "oneDNN packed weights" if packing_available(model.dtype, model.device) else "plain weights"
        dtype = str(model.dtype).removeprefix("torch.")
        return (
            f"local, in-process: {dtype} on {model.device}, {kind}, {self._threads} threads, "
            f"{self._slots.count} dialogues x {self.max_context} tokens"
        )

    @property
    def lost(self) -> str:
        return self._broken

    async def generate(self, request: Request) -> Completion:
        """One turn. ``EngineError`` when it cannot fit the context, the engine is closed or its weights are broken."""
        room = self.max_context - len(request.ids)
        if self._broken:
            raise EngineError(self._broken)
        if not request.ids or room < request.params.max_new_tokens or request.params.max_new_tokens < 1:
            raise EngineError(
                f"{request.session}: {len(request.ids)} prompt tokens and {request.params.max_new_tokens} new ones "
                f"do not fit a context of {self.max_context}"
            )
        running = _Running(request, asyncio.get_running_loop().create_future(), tokens=list(request.ids))
        self._waiting.append(running)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return await running.answer

    def metrics(self) -> dict[str, float]:
        return {}

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Stream new weights in. ``ValueError`` names an unknown, misshapen or missing one; after it no request is
        answered until a complete set has come."""
        if self._running or self._waiting:
            raise EngineError(f"{len(self._running) + len(self._waiting)} requests still run on the old weights")
        self._broken = "the last weight update failed; the engine holds a mixture of versions"
        self._slots.clear()
        with cpu_threads(self._threads):
            self.model.load(weights)
        self._broken, self.version = "", version

    async def abort(self, session: str | None = None) -> None:
        for running in [*self._running, *self._waiting]:
            if session in (None, running.request.session):
                self._finish(running, "abort")
        if session is None:
            self._slots.clear()
        else:
            self._slots.drop(session)

    async def release(self, session: str) -> None:
        if not any(r.request.session == session for r in self._running):
            self._slots.drop(session)

    async def close(self) -> None:
        await self.abort()
        self._broken = "the engine is closed"
        if self._driver is not None:
            await asyncio.gather(self._driver, return_exceptions=True)

    async def _drive(self) -> None:
        await self._settle()
        while self._waiting or self._running:
            try:
                with cpu_threads(self._threads):
                    self._step()
            except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for ever
                self._fail(error)
            await self._settle()

    async def _settle(self) -> None:
        """Let answered dialogues speak; forget requests whose caller has gone."""
        for _ in range(SETTLE):
            await asyncio.sleep(0)
        for running in [*self._running, *self._waiting]:
            if running.answer.cancelled():
                self._finish(running, "abort")
                self._slots.drop(running.request.session)

    def _step(self) -> None:
        self._admit()
        self._compact()
        fed = self._feed()
        plan, order = self.model.plan([(r.slot, len(self._slots.ids(r.slot)), ids) for r, ids in fed])
        logits = self.model.forward(plan)
        for running, ids in fed:
            self._slots.ids(running.slot).extend(ids)
        rows = [(row, fed[i][0]) for row, i in enumerate(order) if self._complete(fed[i][0])]
        if not rows:
            return
        picked = [running for _, running in rows]
        ids, logps = sample(
            logits if len(rows) == len(order) else logits[[row for row, _ in rows]],
            [r.request.params for r in picked],
            [uniform(r.request.seed, len(r.logps)) for r in picked],
        )
        for running, token, logp in zip(picked, ids, logps, strict=True):
            self._append(running, token, logp)

    def _complete(self, running: _Running) -> bool:
        return len(self._slots.ids(running.slot)) == len(running.tokens)

    def _feed(self) -> list[tuple[_Running, list[int]]]:
        """The tokens each running request puts into this step, prefill cut to the budget."""
        fed, budget = [], STEP_TOKENS
        for running in self._running:
            start = len(self._slots.ids(running.slot))
            left = len(running.tokens) - start
            take = min(left, budget) if left > 1 else 1
            budget -= take if left > 1 else 0
            if take:
                fed.append((running, running.tokens[start : start + take]))
        return fed

    def _admit(self) -> None:
        """Give slots to waiting requests in the order of arrival, those that have one already first. A request that
        shares more with a prompt now being computed than with any cache waits for it."""
        own = [w for w in self._waiting if self._slots.slot_of(w.request.session) is not None]
        busy = {r.request.session for r in self._running}
        wanted = {w.request.session for w in self._waiting}
        prompts = [r.tokens for r in self._running if not self._complete(r)]
        for waiting in [*own, *(w for w in self._waiting if w not in own)]:
            if waiting.request.session in busy:
                continue
            found = self._slots.place(waiting.request.session, waiting.tokens, keep=busy | wanted, coming=prompts)
            if found is None:
                continue
            waiting.slot, donor, waiting.cached = found
            if donor != waiting.slot:
                self.model.copy_prefix(donor, waiting.slot, waiting.cached)
            busy.add(waiting.request.session)
            prompts.append(waiting.tokens)
            self._waiting.remove(waiting)
            self._running.append(waiting)

    def _compact(self) -> None:
        """Move running dialogues from high slots into free lower ones: decoding reads the whole range of slots."""
        lowest = min(r.slot for r in self._running)
        for running in sorted(self._running, key=lambda r: -r.slot):
            target = self._slots.free_between(lowest, running.slot)
            if target is None or running.slot - lowest < SPREAD * len(self._running):
                return
            self.model.copy_prefix(running.slot, target, len(self._slots.ids(running.slot)))
            self._slots.move(running.slot, target)
            running.slot = target

    def _append(self, running: _Running, token: int, logp: float) -> None:
        running.tokens.append(token)
        running.logps.append(logp)
        params = running.request.params
        if token in params.stop_ids and not params.ignore_eos:
            self._finish(running, "stop")
        elif len(running.logps) >= params.max_new_tokens:
            self._finish(running, "length")

    def _finish(self, running: _Running, reason: str) -> None:
        (self._running if running in self._running else self._waiting).remove(running)
        if not running.answer.done():
            running.answer.set_result(
                Completion(
                    ids=tuple(running.new_ids),
                    logps=tuple(running.logps),
                    finish=reason,
                    version=self.version,
                    cached_tokens=running.cached,
                )
            )

    def _fail(self, error: Exception) -> None:
        for running in [*self._running, *self._waiting]:
            if not running.answer.done():
                running.answer.set_exception(EngineError(f"{running.request.session}: {error}"))
        self._running.clear()
        self._waiting.clear()
        self._slots.clear()


@contextmanager
def cpu_threads(count: int) -> Generator[None]:
    """Run with so many intra-op threads. Changing the number costs under a microsecond; only other work pays for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
