"""benchmarks/simulate_rollout.py runs with the code as it is: a small world, every mode."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_no_mode_is_slower_than_waiting_for_the_slowest() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "simulate_rollout.py")]
    small = ["--seeds", "1", "--steps", "4", "--groups", "8", "--slots", "32"]
    done = subprocess.run(
        [*command, *small], capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    faster = {(row[0].strip(), row[1].strip(), row[2].strip()): float(row[5].split()[0]) for row in rows}
    assert {mode for mode, _, _ in faster} == {"sync", "partial", "async"}
    assert all(times > 1 for (mode, _, _), times in faster.items() if mode != "sync"), faster
