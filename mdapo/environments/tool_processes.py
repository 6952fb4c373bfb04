"""Processes in which foreign tools run: one call at a time each, killed at its deadline and started anew."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from typing import Any

from mdapo.environments.tools import KEY, Tool
from mdapo.errors import UserError
from mdapo.rewards.processes import Answer, Worker, prompt_as_json
from mdapo.types import Prompt

MAX_QUEUE_S = 600.0  # for a process that is free; each is busy for one call's deadline at most


class ToolProcesses:
    """``workers`` processes, all ``tools`` in each, for any number of threads. ``UserError``: one cannot start."""

    def __init__(self, tools: Sequence[Tool], *, workers: int) -> None:
        self._parts = [{"name": tool.source} for tool in tools]
        self._closed = False
        self._idle: queue.Queue[Worker] = queue.Queue()
        started = [self._new() for _ in range(workers)]
        try:
            for worker in started:
                worker.wait_ready()
                self._idle.put(worker)
        except UserError:
            for worker in started:
                worker.kill()
            raise
        self._all = set(started)

    def call(self, tool: Tool, arguments: Mapping[str, Any], prompt: Prompt, *, timeout_s: float, limit: int) -> Answer:
        """As ``tool_worker`` answers; ``{"error": "timed out"}`` and the like where the process was lost.

        ``TimeoutError`` when no process was free for ``MAX_QUEUE_S``.
        """
        try:
            worker = self._idle.get(timeout=MAX_QUEUE_S)
        except queue.Empty:
            raise TimeoutError(f"no process was free for a tool in {MAX_QUEUE_S:g} s: more workers?") from None
        try:
            if not worker.alive:  # died while idle
                worker = self._replace(worker)
            worker.wait_ready()
            request = {"tool": tool.source, "arguments": arguments, "prompt": prompt_as_json(prompt), "limit": limit}
            return worker.ask_one(request, timeout_s=timeout_s)
        finally:  # whatever happens here, one is idle afterwards
            self._idle.put(worker if worker.alive else self._replace(worker))

    @property
    def pids(self) -> list[int]:
        """Of the processes that run."""
        return [worker.pid for worker in self._all]

    def close(self) -> None:
        """Ends all processes; a call that waits for one finds it lost."""
        self._closed = True
        for worker in list(self._all):
            worker.interrupt()  # a thread that waits for it reaps it
        while not self._idle.empty():
            try:
                self._idle.get_nowait().kill()
            except queue.Empty:
                break  # a call was quicker

    def _new(self) -> Worker:
        return Worker(self._parts, module="mdapo.environments.tool_worker", key=KEY)

    def _replace(self, lost: Worker) -> Worker:
        lost.kill()
        if self._closed:
            return lost
        self._all.discard(lost)
        worker = self._new()
        self._all.add(worker)
        return worker
