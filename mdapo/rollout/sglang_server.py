"""One SGLang server that mdapo starts, owns and ends.

Three processes deep: this one, the guard (``sglang_guard.py``), the server (``sglang_launch.py``) with the processes it
makes. The guard sees to it that nothing is left however this process ends. The key goes through pipes only, so it is in
no command line, environment, file or log.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import psutil

from mdapo.errors import UserError, shortened
from mdapo.rollout.sglang_options import HOST, ServerOptions

GUARD = Path(__file__).with_name("sglang_guard.py")
PORT_TRIES = 3  # a port that is free when it is chosen may be taken when, half a minute later, it is used
STOP_S = 40.0  # the guard's grace, and what the kernel needs to free a large process
POLL_S = 0.25
PROBE_S = 30.0  # SGLang answers a health check after 20 seconds at the latest
LAST_LINES = 20
_REASON = re.compile(r"^(?:[\w.]*\.)?\w*(?:Error|Exception|Interrupt|Killed)\b.*|.*\berror: .*", re.MULTILINE)
_TAKEN = re.compile(r"address already in use|Port is already in use", re.IGNORECASE)


class ServerFailed(UserError):
    """A server did not start, with its log's reason and last lines; usually the model, the memory or an option."""


class Server:
    """A server of ``options``, not yet started; output is appended to ``log``. ``port``: None chooses a free one."""

    def __init__(self, options: ServerOptions, *, log: Path, port: int | None = None) -> None:
        self.options, self.log = options, log
        self.url = ""
        self.key = ""
        self._port = port
        self._guard: subprocess.Popen[bytes] | None = None
        self._log_start = 0  # where in the log this start begins

    @property
    def alive(self) -> bool:
        """Whether its processes run; not whether they answer."""
        return self._guard is not None and self._guard.poll() is None

    async def start(self, deadline_s: float) -> None:
        """Until it generates. Again after it ended: a new key, another port, and the weights of the model's folder.

        ``ServerFailed`` when it ends before, or does not answer within ``deadline_s`` seconds; then nothing is left.
        """
        assert not self.alive
        end = time.monotonic() + deadline_s
        for tries_left in reversed(range(PORT_TRIES)):
            port = self._port or _free_port()
            self.key, self.url = secrets.token_urlsafe(32), f"http://{HOST}:{port}"
            try:
                self._spawn(port)
                problem = await self._ready(port, end, deadline_s)
            except BaseException:
                await self.stop()
                raise
            if not problem:
                return
            await self.stop()
            if not _TAKEN.search(self._said()):
                raise ServerFailed(problem)
            if self._port is not None or not tries_left:
                raise ServerFailed(
                    f"an SGLang server cannot listen on {HOST}:{port}: the port is taken; choose another"
                )

    async def stop(self) -> None:
        """End it and all that belongs to it. ``RuntimeError`` when the system does not let its processes end."""
        if self._guard is None:
            return
        guard, self._guard = self._guard, None
        assert guard.stdin is not None
        guard.stdin.close()
        loop = asyncio.get_running_loop()
        try:
            # In a thread, and to its end even when this task is cancelled: what is not waited for is left behind.
            await asyncio.shield(loop.run_in_executor(None, _wait, guard))
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(
                f"the guard of {self.url} (process {guard.pid}) did not end in {STOP_S:.0f} s"
            ) from error

    def _spawn(self, port: int) -> None:
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise UserError(f"the log of an SGLang server cannot be written: {self.log}: {error.strerror}") from error
        try:
            self._log_start = os.fstat(log).st_size
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), *self.options.command(port)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self.options.environment(),
                start_new_session=True,  # a Ctrl-C is for the trainer, which then stops the server
            )
        finally:
            os.close(log)
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{self.key}\n".encode())
        self._guard.stdin.flush()

    async def _ready(self, port: int, end: float, deadline_s: float) -> str:
        """Waits until the server generates; else says why it never will."""
        assert self._guard is not None
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_S)) as session:
            in_time = True
            while in_time:
                in_time = time.monotonic() < end  # one look after it: this loop may have stood still, not the server
                if not self.alive:
                    return self._told(f"ended with exit code {self._guard.returncode}")
                if _listens(self._guard.pid, port):
                    if await _generates(session, self.url):
                        return ""
                elif _TAKEN.search(self._said()):  # SGLang goes on calling whoever listens there, for minutes
                    return self._told("could not listen")
                await asyncio.sleep(POLL_S)
        return self._told(f"was not ready after {deadline_s:.0f} s (rollout.start_timeout_s)")

    def _said(self) -> str:
        """The log since this start."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def _told(self, what: str) -> str:
        said = self._said()
        reasons = _REASON.findall(said)
        option = next((r for r in reversed(reasons) if "error: " in r and "sglang" in r), None)
        if option is not None:
            text = option.split("error: ", 1)[1].strip()
            return f"rollout.engine_args: SGLang refuses an option: {shortened(text, limit=400)}"
        why = f": {shortened(reasons[-1].strip(), limit=400)}" if reasons else ""
        last = "\n".join(f"    {line}" for line in said.splitlines()[-LAST_LINES:])
        return f"an SGLang server for {self.options.model_path} {what}{why}\n{last}\n    (all of it in {self.log})"


def _wait(guard: subprocess.Popen[bytes]) -> None:
    """Until the guard has cleaned up. One that is stopped (SIGSTOP) is woken, for it holds what is to be cleaned."""
    guard.send_signal(signal.SIGCONT)
    guard.wait(STOP_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _listens(guard: int, port: int) -> bool:
    """Whether a process of this server listens there; another program's answer on that port says nothing of ours."""
    try:
        for process in psutil.Process(guard).children(recursive=True):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return True
    except psutil.NoSuchProcess:
        pass  # one of them has just ended; the next look tells more
    return False


async def _generates(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether it makes a token; the only call that needs no key."""
    try:
        async with session.get(f"{url}/health_generate", allow_redirects=False) as reply:
            return reply.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
