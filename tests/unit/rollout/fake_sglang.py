#!/usr/bin/env python3
"""A mock of SGLang's server for what the real one does only now and then: it hangs, forks, dies, finds its port taken.

Takes the place of the interpreter that runs ``sglang_launch.py``: its arguments are that file and SGLang's options. How
it behaves is in FAKE_SGLANG, a word; it writes what it is to FAKE_SGLANG_REPORT.
"""

import http.server
import json
import mmap
import os
import signal
import sys
import time

options = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=False))
behaviour = os.environ.get("FAKE_SGLANG", "")
key = sys.stdin.readline().strip()


def sleep_in_child(*, leave_group: bool) -> int:
    child = os.fork()
    if child == 0:
        if leave_group:
            os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
        os._exit(0)
    return child


def shared_file() -> str:
    path = f"/dev/shm/mdapo_fake_{os.getpid()}"
    with open(f"{path}_new", "wb+") as file:
        file.truncate(4096)
        shared_file.kept = mmap.mmap(file.fileno(), 4096)
    os.link(f"{path}_new", path)
    os.unlink(f"{path}_new")  # as a semaphore is made: mapped under a name that is gone
    return path


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


if behaviour == "dies":
    print("Traceback (most recent call last):\n  File x\nOSError: models/m has no weights", flush=True)
    sys.exit(1)
if behaviour == "refuses":
    print("usage: sglang serve [-h]\nsglang serve: error: unrecognized arguments: --no-such 5", flush=True)
    sys.exit(2)
pids = [os.getpid(), sleep_in_child(leave_group=False), sleep_in_child(leave_group=True)]
report = {"pids": pids, "shm": shared_file(), "tmp": os.environ["TMPDIR"], "key": key, "port": options["--port"]}
with open(os.environ["FAKE_SGLANG_REPORT"], "w", encoding="utf-8") as file:
    json.dump(report, file)
if behaviour == "hangs":
    time.sleep(600)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
try:
    server = http.server.ThreadingHTTPServer((options["--host"], int(options["--port"])), Handler)
except OSError:
    print(
        f"ERROR: [Errno 98] error while attempting to bind on {options['--port']}: address already in use", flush=True
    )
    time.sleep(600)  # as SGLang does, for minutes: to warm up it calls whoever listens there
server.serve_forever()
