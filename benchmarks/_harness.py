"""Two workers with one task each, alive at the same time and stepped in turn, so that a drifting machine hits both."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"  # scripts/fetch_model.py


class Worker:
    """A subprocess that does one step for each line ``step`` and answers with one JSON line."""

    def __init__(self, name: str, python: Path | str, script: Path, work: Mapping[str, Any]) -> None:
        self.name, self.steps = name, []
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(work["threads"]),
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": str(ROOT),
        }
        self.log = (ROOT / "benchmarks" / "results" / f".{name}.log").open("w")
        command = [str(python), "-W", "ignore", str(script), json.dumps(work)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
        )
        assert self._answer()["ready"]

    def step(self) -> dict[str, float]:
        self._say("step")
        self.steps.append(self._answer())
        return self.steps[-1]

    def finish(self) -> dict[str, float]:
        """Ends the worker: medians over its steps but the first (warm-up), and its peak memory in bytes."""
        self._say("end")
        peak = self._answer()
        self.process.wait(60)
        measured = self.steps[1:]
        return {**{key: statistics.median(s[key] for s in measured) for key in measured[0]}, **peak}

    def _say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(60)
            sys.exit(f"{self.name} died; see {self.log.name}")
        return json.loads(line)


def alternate(workers: Sequence[Worker], *, steps: int) -> None:
    """``steps`` steps of each, in turn, after one of warm-up; one line a step."""
    for i in range(steps + 1):
        seconds = [f"{worker.name} {worker.step()['seconds']:.2f} s" for worker in workers]
        print(f"  {'warm-up' if i == 0 else f'step {i}/{steps}'}: " + ", ".join(seconds), flush=True)


def hardware() -> str:
    """The machine in a few words, with today's date."""
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {date.today().isoformat()}"


def forget_peak(pid: int | str = "self") -> int:
    """From here on counts what ``most_held`` gives; returns the bytes that the process holds now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def most_held(pid: int | str = "self") -> int:
    """The most bytes that the process held since ``forget_peak``."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024
