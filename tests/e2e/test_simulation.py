"""The simulations in benchmarks/ run with the code as it is: small worlds, every mode and policy."""

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


def test_the_simulation_of_dynamic_sampling_runs_every_policy_and_ends_where_nothing_teaches(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "simulate_dynamic_batch.py")]
    small = [
        "--scale",
        "0.0625",
        "--n",
        "4",
        "--steps",
        "8",
        "--warm",
        "4",
        "--seeds",
        "0",
        "--out",
        f"{tmp_path}/found",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *small], capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()][2:]
    assert len(rows) == 9 and (tmp_path / "found.svg").read_text().startswith("<svg")
    faster = {row[1]: float(row[4].split()[0]) for row in rows}
    assert faster["partial 2"] > faster["sync"] > 0.8
    again = subprocess.run(
        [*command, "--read", f"{tmp_path}/found.csv"], capture_output=True, text=True, timeout=60, env=env
    )
    assert again.stdout == done.stdout
    hopeless = subprocess.run([*command, "--adversarial", "18"], capture_output=True, text=True, timeout=240, env=env)
    assert hopeless.stdout.startswith("dead loops: 0 of 18 adversarial runs"), hopeless.stderr
