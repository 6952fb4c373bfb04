"""The quality of finished dialogues, measured in a process of its own while others are still generated.

What waits is measured together: one batch is with the process, all dialogues that come meanwhile are the next.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mdapo.config.schema import QualityCfg
from mdapo.errors import UserError
from mdapo.rewards.coherence import Quality
from mdapo.rewards.processes import Worker
from mdapo.types import Message

MAX_BATCH = 64  # dialogues
OF_TIMEOUT = 0.8  # share of a batch's deadline that an endpoint has: what it says is told, not that it was killed
_Waiting = tuple[Sequence[Message], int, "asyncio.Future[Quality]"]


class NoQuality(Exception):
    """A dialogue could not be measured; the text is the reason that is counted."""


class QualityScorer:
    """Asks the process of `quality_worker.py`, which is killed at ``quality.timeout_s`` a batch, and replaced.

    For one event loop at a time.
    """

    def __init__(self, cfg: QualityCfg) -> None:
        """Raises ``UserError``: an embedder that cannot be loaded or asked, or tells nothing apart."""
        assert cfg.embeddings is not None
        self.cfg = cfg
        self._settings: Mapping[str, Any] = {
            "embeddings": cfg.embeddings,
            "model": cfg.model,
            "key_file": cfg.key_file,
            "timeout_s": OF_TIMEOUT * cfg.timeout_s,
            "threads": cfg.threads,
            "cache": cfg.cache,
        }
        self.measured = 0
        self.seconds = 0.0  # in which a batch was with the process
        self._waiting: list[_Waiting] = []
        self._busy: asyncio.Task[None] | None = None
        self._closing = False
        self._worker = self._new_worker()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quality")
        try:
            self._worker.wait_ready()
        except BaseException:
            self.close()
            raise

    async def score(self, messages: Sequence[Message], *, opening: int) -> Quality:
        """Raises ``NoQuality``: the embedder failed, hung, or gave what is no vector."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Quality] = loop.create_future()
        self._waiting.append((messages, opening, future))
        if self._busy is None or self._busy.done():
            self._busy = loop.create_task(self._work())
        return await future

    async def _work(self) -> None:
        """Until nothing waits. Whoever has gone meanwhile is left out."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)  # those that come in the same moment belong to the batch
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            batch = [waiting for waiting in batch if not waiting[2].done()]
            if not batch:
                continue
            talks = [([(m.role, m.content) for m in messages], opening) for messages, opening, _ in batch]
            started = loop.time()
            try:
                answer = await loop.run_in_executor(self._thread, self._ask, {"talks": talks})
            except BaseException:  # the loop ends, or the scorer was closed
                for _, _, future in [*batch, *self._waiting]:
                    if not future.done():
                        future.set_exception(NoQuality("was ended"))
                self._waiting = []
                raise
            self.measured += len(batch)
            self.seconds += loop.time() - started
            self._tell(batch, answer)

    def _tell(self, batch: Sequence[_Waiting], answer: Mapping[str, Any]) -> None:
        """Each one its quality, or why there is none."""
        found, why = answer.get("qualities"), answer.get("error", "answered nonsense")
        if not isinstance(found, list) or len(found) != len(batch) or not all(map(_is_quality, found)):
            found = [None] * len(batch)
        for (_, _, future), quality in zip(batch, found, strict=True):
            if future.done():
                continue
            if quality is None:
                future.set_exception(NoQuality(str(why)))
            else:
                future.set_result(Quality(*quality))

    def _ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """In the one thread."""
        if not self._worker.alive:
            self._worker.kill()
            if self._closing:
                return {"error": "was ended"}
            self._worker = self._new_worker()
        try:
            self._worker.wait_ready()
        except UserError as error:  # it could at the start: an endpoint that is gone, say, and may come back
            self._worker.kill()
            return {"error": "; ".join(error.problems)}
        return self._worker.ask_one(request, timeout_s=self.cfg.timeout_s)

    def _new_worker(self) -> Worker:
        return Worker([self._settings], module="mdapo.rewards.quality_worker", key="quality.embeddings")

    def metrics(self) -> dict[str, float]:
        """Since the last call: dialogues measured, and the seconds in which some were, beside what else went on."""
        found = {"quality/measured": float(self.measured), "time/quality": self.seconds}
        self.measured, self.seconds = 0, 0.0
        return found

    def close(self) -> None:
        """Ends the process."""
        self._closing = True
        self._worker.interrupt()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._worker.kill()


def _is_quality(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(v, int | float) and math.isfinite(v) and 0.0 <= v <= 1.0 for v in value)
    )
