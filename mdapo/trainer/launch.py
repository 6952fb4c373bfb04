"""``mdapo train``: start the ranks under torchrun, pass signals on, leave nothing behind, say how it ended.

torchrun turns every exit code of a rank into 1, so each rank leaves its code and message in a small file (its
*outcome*); the earliest one that failed is the cause.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from mdapo.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, StorageError, UserError
from mdapo.rollout.sglang_guard import locked_folder
from mdapo.trainer.signals import RESUMES, leave_terminal, stop_signals

EXITS = "exits.json"  # what torchrun saw: exit codes of the ranks that failed, negative for a signal
OUTCOME_ENV = "MDAPO_OUTCOME_DIR"
FOLDER_PREFIX = "mdapo-launch-"
EVAL_FLAG = "--eval"
GRACE_S = 300.0  # from the first signal until the ranks are killed: a large checkpoint takes a while


def die_with_parent() -> None:
    """Linux: this process gets SIGKILL when its parent dies, so that a killed launcher leaves no orphan ranks."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG


def write_outcome(code: int, message: str, *, lost_peer: bool = False) -> bool:
    """Leave this rank's exit code and message for the launcher; False when there is none (a plain torchrun).

    ``lost_peer``: it only failed because another rank had gone, or was told to leave before there was anything to save.
    """
    folder = os.environ.get(OUTCOME_ENV)
    if folder is None:
        return False
    outcome = {"code": code, "message": message, "time": time.time(), "lost_peer": lost_peer}
    Path(folder, f"rank-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(outcome), encoding="utf-8")
    return True


def write_exits(codes: Mapping[int, int]) -> None:
    """Leave the failed ranks' exit codes for the launcher, where there is one."""
    if OUTCOME_ENV in os.environ:
        Path(os.environ[OUTCOME_ENV], EXITS).write_text(json.dumps(codes), encoding="utf-8")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check_port(text: str) -> int:
    """The port that ``MASTER_PORT`` names; ``UserError`` when it is none, or somebody else listens on it."""
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise UserError(f"MASTER_PORT={text}: must be a port from 1 to 65535; unset it to choose a free one")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(text)))
        except OSError as error:
            reason = f"the port cannot be used ({error.strerror}); choose another, or unset it to choose a free one"
            raise UserError(f"MASTER_PORT={text}: {reason}") from error
    return int(text)


def check_threads(text: str) -> None:
    """``UserError`` when ``OMP_NUM_THREADS`` is not what OpenMP takes: each library makes its own of it."""
    if not re.fullmatch(r"0*[1-9][0-9]{0,3}(,0*[1-9][0-9]{0,3})*", text):
        raise UserError(f"OMP_NUM_THREADS={text}: must be a whole number from 1 on; unset it for the default")


@contextmanager
def own_folder() -> Generator[str]:
    """A temporary folder, gone afterwards; those that killed launchers of this user left behind go first.

    Each is locked while its launcher lives: the lock goes with the process, whatever ends it. ``StorageError`` when
    none can be made.
    """
    try:
        folder, lock = locked_folder(FOLDER_PREFIX)
    except OSError as error:
        raise StorageError(f"no temporary folder can be made (TMPDIR names another place): {error}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def launch(config_path: str, overrides: Sequence[str], *, nproc: int, flags: Sequence[str] = ()) -> int:
    """Run ``nproc`` ranks on this machine to their end; return the exit code of the run (README, "Exit codes").

    ``flags`` go to ``mdapo.trainer`` before the configuration.
    """
    check_threads(os.environ.get("OMP_NUM_THREADS", "1"))
    port = check_port(os.environ["MASTER_PORT"]) if "MASTER_PORT" in os.environ else free_port()
    with own_folder() as outcomes:
        command = [
            *(sys.executable, "-m", "mdapo.trainer.torchrun"),
            *(f"--nproc-per-node={nproc}", "--master-addr=127.0.0.1", f"--master-port={port}"),
            *(f"--log-dir={outcomes}", "-m", "mdapo.trainer", *flags, config_path, *overrides),
        ]
        # Ranks on one machine take turns (a waiting one lends its cores to the engine): idle threads must not spin.
        threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        alone = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}  # they speak to each other only
        # Torch reads files of its own in the locale's encoding, which they are not in; what is shown stays in it.
        encodings = {"PYTHONUTF8": "1", "PYTHONIOENCODING": f"{sys.stdout.encoding}:backslashreplace"}
        environment = {**threads, **alone, **os.environ, **encodings, OUTCOME_ENV: outcomes}
        process = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=die_with_parent)
        code, asked = supervise(process)
        return report(code, Path(outcomes), ranks=nproc, asked=asked)


def supervise(process: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """Wait for torchrun; the first signal asks the ranks to stop, a second one or the grace period kills.

    Returns torchrun's exit code, and whether a signal came.
    """
    deadline: list[float] = []

    def forward(signum: int, _: FrameType | None) -> None:
        leave_terminal(signum)
        if deadline:
            deadline[0] = 0.0
        else:
            deadline.append(time.monotonic() + GRACE_S)
            ask_to_stop(process, signum)

    previous = {s: signal.signal(s, forward) for s in stop_signals()}
    try:
        while True:
            try:
                return process.wait(timeout=0.2), bool(deadline)
            except subprocess.TimeoutExpired:
                if deadline and time.monotonic() > deadline[0]:
                    signal_group(process, signal.SIGKILL)
    finally:
        signal_group(process, signal.SIGKILL)  # whatever of the group outlived torchrun
        restore_handlers(previous)


def restore_handlers(previous: dict[signal.Signals, Callable[..., object] | int | None]) -> None:
    for signum, handler in previous.items():
        signal.signal(signum, handler)


def ask_to_stop(process: subprocess.Popen[bytes], signum: int) -> None:
    """The signal to the ranks themselves: torchrun, if it were asked, would kill them after 30 seconds."""
    try:
        ranks = psutil.Process(process.pid).children()
        for rank in ranks or [psutil.Process(process.pid)]:  # none has started yet
            rank.send_signal(signum)
    except psutil.NoSuchProcess:
        pass  # they have ended by themselves


def signal_group(process: subprocess.Popen[bytes], signum: signal.Signals) -> None:
    try:
        os.killpg(process.pid, signum)
    except ProcessLookupError:
        pass  # the group is gone, which is what the signal was for


def report(torchrun_code: int, outcomes: Path, *, ranks: int, asked: bool = False) -> int:
    """The cause's exit code, its message on stderr. A run is done when each of its ``ranks`` says so.

    ``asked``: the launcher was told to stop. Then ranks may leave without a word: on a second signal, or killed.
    """
    found = sorted(
        (json.loads(f.read_text(encoding="utf-8")) for f in outcomes.glob("rank-*.json")), key=lambda o: o["time"]
    )
    cause = next((o for o in found if o["code"] != 0 and not o["lost_peer"]), None)
    if cause is not None:
        print(cause["message"], file=sys.stderr)
        return cause["code"]
    left = {} if asked and torchrun_code != 0 else walked_out(torchrun_code, outcomes, ranks)
    if left:
        who = ", ".join(f"rank {rank} (exit code {code})" for rank, code in left.items())
        why = "the run is not done; something in the process, such as a plug-in, called os._exit or its like"
        print(f"mdapo: {who} ended by itself without a word: {why}", file=sys.stderr)
        return EXIT_INTERNAL
    if torchrun_code == 0:
        return 0
    killed = (
        "a rank was killed (by the system, when memory runs out); the same command resumes from the last checkpoint"
    )
    left_alone = set(seen_exits(outcomes).values()) == {EXIT_INTERRUPTED}  # a signal to a rank itself
    told = asked or torchrun_code == EXIT_INTERRUPTED or left_alone
    print(f"mdapo: {RESUMES if told else killed}", file=sys.stderr)
    return EXIT_INTERRUPTED


def seen_exits(outcomes: Path) -> dict[str, int]:
    """Exit codes of the ranks that failed, as torchrun saw them; none when it was stopped itself."""
    file = outcomes / EXITS
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def walked_out(torchrun_code: int, outcomes: Path, ranks: int) -> dict[int, int]:
    """Exit codes of the ranks that left no outcome though nothing killed them; torchrun takes a 0 for success.

    A second signal makes a rank leave at once, with ``EXIT_INTERRUPTED``: that was asked for.
    """
    silent = [rank for rank in range(ranks) if not (outcomes / f"rank-{rank}.json").exists()]
    if torchrun_code == 0:
        return dict.fromkeys(silent, 0)
    codes = seen_exits(outcomes)
    if not codes:  # torchrun itself was stopped: nobody saw how they left
        return {}
    exits = {rank: codes.get(str(rank), 0) for rank in silent}
    return {rank: code for rank, code in exits.items() if code >= 0 and code != EXIT_INTERRUPTED}


if __name__ == "__main__":  # scripts/train.sh asks before it starts torchrun
    try:
        check_port(sys.argv[1])
    except UserError as error:
        print(f"train: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
