"""A small process between mdapo and one SGLang server: whatever ends either of them, nothing of the server is left.

Standard library only, so that it starts at once and weighs little. Standard input: the API key in a line, which it
passes on; then nothing, until it closes. That is the order to stop, given by ``Server.stop`` or by the owner's death,
SIGKILL included. The guard outlives the owner to clean up, which a process group that is killed cannot do itself:
SGLang would leave schedulers, files in /dev/shm and temporary files.

The server gets a folder of its own for temporary files, readable for this user only: the sockets between its processes
lie there, and so does the meeting point of their process group, which else were a TCP listener on every address.

Exit code: the server's, 0 when it was told to stop.
"""

from __future__ import annotations

import ctypes
import fcntl
import getpass
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_S = 5.0  # from SIGTERM to SIGKILL
GONE_S = 20.0  # a killed process leaves once the kernel has freed its memory
LOOK_S = 1.0  # how often the server's shared memory is looked at: one that is killed leaves no time to
SHM = "/dev/shm/"
PREFIX = "mdapo-sgl-"
LEFTOVER_S = 60.0  # a younger folder may be about to be locked


def main() -> int:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # its orphans become our children: none gets out of sight
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)  # when to stop is the owner's to say
    key = sys.stdin.buffer.readline()
    folder, _ = locked_folder()
    guard = os.getpid()

    def die_with_guard() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)

    try:
        server = subprocess.Popen(
            sys.argv[1:],
            stdin=subprocess.PIPE,
            env=environment(folder),
            start_new_session=True,
            preexec_fn=die_with_guard,
        )
        assert server.stdin is not None
        try:
            server.stdin.write(key)
            server.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already; the exit code tells
        code, used = watch(server)
        used |= shared_memory(server.pid)
        end(server)
        remove_unused(used)
        return code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def environment(folder: str) -> dict[str, str]:
    """The server's: its own temporary folder, but the shared cache of compiled kernels, and loopback for all else."""
    kernels = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    return {
        "TORCHINDUCTOR_CACHE_DIR": kernels,
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        **os.environ,
        "TMPDIR": folder,
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{folder}/rendezvous",
    }


def watch(server: subprocess.Popen[bytes]) -> tuple[int, set[int]]:
    """Until the server ends by itself (its exit code) or standard input closes (0); and its shared memory."""
    used: set[int] = set()
    look = time.monotonic() + LOOK_S
    while True:
        readable, _, _ = select.select([0], [], [], 0.2)
        if readable and not os.read(0, 1024):
            return 0, used
        if (code := server.poll()) is not None:
            return code if code >= 0 else 128 - code, used
        if time.monotonic() > look:
            used |= shared_memory(server.pid)
            look = time.monotonic() + LOOK_S


def end(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server, which tells its processes; SIGKILL to its group, and to all that left the group."""
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            pass  # it hangs, or is stopped: SIGKILL
    deadline = time.monotonic() + GONE_S
    while time.monotonic() < deadline:
        for pid in (-server.pid, *children()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # gone, which is what the signal is for
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # none is left
        time.sleep(0.05)
    sys.stderr.write(f"mdapo: processes of the server did not die within {GONE_S:.0f} s: {children()}\n")


def children() -> list[int]:
    with open("/proc/thread-self/children", encoding="ascii") as file:
        return [int(pid) for pid in file.read().split()]


def group_of(leader: int) -> set[int]:
    """Processes of the server's group, its leader's pid being its number."""
    found = set()
    for name in os.listdir("/proc"):
        try:
            if name.isdecimal() and os.getpgid(int(name)) == leader:
                found.add(int(name))
        except ProcessLookupError:
            pass  # it has just ended
    return found


def shared_memory(leader: int) -> set[int]:
    """Inodes of what the server's processes have mapped of /dev/shm; a semaphore's name there is one that is gone."""
    return {inode for pid in group_of(leader) for inode in mapped(pid)}


def mapped(pid: int) -> set[int]:
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
            return {int(line.split(maxsplit=5)[4]) for line in file if SHM in line}
    except OSError:
        return set()  # it has just ended, or is another user's


def remove_unused(used: set[int]) -> None:
    """Removes the files that no process has mapped any more: the trainer's, while it lives, stay."""
    in_use = {inode for name in os.listdir("/proc") if name.isdecimal() for inode in mapped(int(name))}
    for entry in os.scandir(SHM):
        if entry.inode() in used - in_use:
            try:
                os.unlink(entry.path)
            except FileNotFoundError:
                pass  # removed meanwhile


def locked_folder(prefix: str = PREFIX) -> tuple[str, int]:
    """A new temporary folder, and its lock: an open file, which goes with this process, whatever ends it. Folders of
    that prefix that killed processes of this user left behind go first. ``OSError``: none can be made.

    Here, since the guard can import nothing of mdapo's."""
    root = tempfile.gettempdir()
    for name in os.listdir(root):
        if name.startswith(prefix):
            clear_leftover(os.path.join(root, name))
    folder = tempfile.mkdtemp(prefix=prefix)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def clear_leftover(folder: str) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # gone meanwhile, or not ours to look into
    try:
        status = os.fstat(lock)
        if status.st_uid == os.getuid() and time.time() - status.st_mtime > LEFTOVER_S:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # locked: its owner lives; or a file system without locks, where nothing can be known
    finally:
        os.close(lock)


if __name__ == "__main__":
    sys.exit(main())
