"""The trainer's handle on one process that runs others' code, a reward or a tool: start it, ask it within a deadline,
kill it with all that it started."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from mdapo.errors import UserError
from mdapo.types import EndReason, Message, Prompt

START_TIMEOUT_S = 120.0  # loading the functions; a reward may import a model
_MAX_ANSWER = 1 << 20  # bytes of one answer
Answer = Mapping[str, Any]


class WorkerLost(Exception):
    """The process did not answer in time, died, or answered nonsense; it is gone now. The text is the reason."""


class Worker:
    """One process in a session of its own. Not for two threads at once."""

    def __init__(
        self,
        parts: Sequence[Mapping[str, Any]],
        *,
        module: str = "mdapo.rewards.worker",
        key: str = "reward.functions",
    ) -> None:
        """``parts``: name and args of each function. Call ``wait_ready`` before the first ``ask``.

        ``module`` is what the process runs, and ``key`` the configuration's key that messages name.
        """
        search = os.pathsep.join(p or os.getcwd() for p in sys.path)  # what the trainer can import, the worker can
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": search},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._read = bytearray()
        self._ready = self._reaped = False
        self._lock = threading.Lock()
        self._parts, self._key = list(parts), key

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Returns at once when it was ready before. Raises ``UserError`` when a function cannot be loaded."""
        if self._ready:
            return
        try:
            (answer,) = self._ask(self._parts, timeouts=[START_TIMEOUT_S])
        except WorkerLost as error:
            raise UserError(f"{self._key}: the process for it did not start: {error}") from error
        if "problems" in answer:
            self.kill()
            raise UserError(answer["problems"])
        self._ready = True

    def ask(self, episode: Mapping[str, Any], *, timeout_s: float) -> list[Answer]:
        """One answer for each function, each within ``timeout_s``. Where the process is lost, the last one says why."""
        return self._answers(episode, [timeout_s] * len(self._parts))

    def ask_one(self, request: Mapping[str, Any], *, timeout_s: float) -> Answer:
        """The one answer to a request of another kind; where the process is lost, ``{"error": why}``."""
        return self._answers(request, [timeout_s])[0]

    def _answers(self, request: Mapping[str, Any], timeouts: Sequence[float]) -> list[Answer]:
        answers: list[Answer] = []
        try:
            for answer in self._ask(request, timeouts=timeouts):
                answers.append(answer)
        except WorkerLost as error:
            answers.append({"error": str(error)})
        return answers

    @property
    def alive(self) -> bool:
        """It runs. Looks without reaping: until ``kill``, nobody else can get its process number."""
        return not self._reaped and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def kill(self) -> None:
        """Ends the process and everything below it, and reaps it."""
        with self._lock:
            if not self._reaped:
                self._signal()
                self._process.wait()
                self._reaped = True

    def interrupt(self) -> None:
        """Ends the process for a thread that is waiting for its answer: that thread finds it lost and reaps it."""
        with self._lock:
            if not self._reaped:
                self._signal()

    def _signal(self) -> None:
        try:
            below = psutil.Process(self.pid).children(recursive=True)
        except psutil.Error:
            below = []
        os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        for process in below:  # those that left the session
            try:
                process.kill()
            except psutil.Error:
                continue

    def _ask(self, request: Any, *, timeouts: Sequence[float]) -> Any:
        """Yields one answer a timeout; ``WorkerLost``. On any failure the process is killed: it may answer late."""
        try:
            self._write(json.dumps(request).encode() + b"\n", deadline=time.monotonic() + timeouts[0])
            for timeout in timeouts:
                yield self._answer(deadline=time.monotonic() + timeout)
        except BaseException:
            self.kill()
            raise

    def _write(self, data: bytes, *, deadline: float) -> None:
        rest = memoryview(data)
        while rest:
            self._wait(self._in, select.POLLOUT, deadline)
            try:
                rest = rest[os.write(self._in, rest) :]
            except BrokenPipeError as error:
                raise WorkerLost("died") from error

    def _answer(self, *, deadline: float) -> Answer:
        while b"\n" not in self._read:
            self._wait(self._out, select.POLLIN, deadline)
            data = os.read(self._out, 1 << 16)
            if not data:
                raise WorkerLost("died")
            self._read += data
            if len(self._read) > _MAX_ANSWER:
                raise WorkerLost("answered too much")
        line, _, rest = bytes(self._read).partition(b"\n")
        self._read = bytearray(rest)
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise WorkerLost("answered nonsense") from error
        if not isinstance(answer, dict):
            raise WorkerLost("answered nonsense")
        return answer

    def _wait(self, file: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(file, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise WorkerLost("timed out")


def as_json(messages: Sequence[Message], prompt: Prompt, end: EndReason, *, opening: int) -> dict[str, Any]:
    """What ``Worker.ask`` sends."""
    return {
        "messages": [(m.role, m.content) for m in messages],
        "prompt": prompt_as_json(prompt),
        "end": end,
        "opening": opening,
    }


def prompt_as_json(prompt: Prompt) -> dict[str, Any]:
    """What ``worker.read_prompt`` reads."""
    return {
        "uid": prompt.uid,
        "row": prompt.row,
        "messages": [(m.role, m.content) for m in prompt.messages],
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra": dict(prompt.extra),
    }
