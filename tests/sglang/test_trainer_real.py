"""Whole runs of the real trainer, two ranks, with the real SGLang server that it starts: a tiny random model, so that
starting the server is what takes time. Each way of rollout with another way of the weights."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from soundness import is_sound
from tiny_run import TWO_RANKS, Command, Material, Outcome, make_material, metrics, wait_for

pytestmark = [pytest.mark.sglang, pytest.mark.e2e, pytest.mark.timeout(2400)]
DEADLINE_S = 900.0
KEYS = (
    *TWO_RANKS,
    "rollout.engine=sglang",
    "rollout.start_timeout_s=600",
    "run.init_timeout_s=600",
    "sync.timeout_s=300",
    "sync.check=true",
    "run.eval_after=false",
)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("material"))


class Runs:
    """Of one folder; each command's server must be gone when the command is."""

    def __init__(self, material: Material, python: str, folder: Path, *more: str) -> None:
        self.run, self.model = folder / "run", material.model
        self.words = (
            "train",
            str(material.config),
            f"run.dir={folder}",
            f"rollout.server_python={python}",
            *KEYS,
            *more,
        )

    def start(self, **environment: str) -> Command:
        return Command(*self.words, **environment)

    def finish(self, running: Command) -> Outcome:
        done = running.wait(deadline_s=DEADLINE_S)
        lines = {p.pid: p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])}
        left = {pid: line for pid, line in lines.items() if str(self.model) in line}
        assert not left, f"servers are left: {left}"
        return done

    @property
    def said(self) -> str:
        return "\n".join(file.read_text(errors="replace")[-2000:] for file in self.run.glob("servers/*.log"))


@pytest.mark.parametrize(("mode", "sync"), [("sync", "distributed"), ("partial", "disk")])
def test_every_step_trains_on_the_weights_of_the_one_before(
    material: Material, sglang_python: str, tmp_path: Path, mode: str, sync: str
) -> None:
    keys = (f"rollout.mode={mode}", f"sync.mode={sync}", "run.total_steps=3")
    runs = Runs(material, sglang_python, tmp_path, *keys)
    done = runs.finish(runs.start())
    assert done.code == 0, (done.err, done.out, runs.said)
    rows = metrics(runs.run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    largest = [row["actor/rollout_logp_gap_max"] for row in rows if row["rollout/staleness_max"] == 0]
    assert largest and max(largest) <= 1e-4
    for row in rows:
        assert row["sync/logprob_gap"] <= 1e-4
        assert (row["sync/servers"], row["sync/failed"]) == (1, 0)
        assert row["sync/bytes"] == rows[0]["sync/bytes"] > 0
        assert row["engine/retries"] == 0
    assert sum(row["engine/turns"] > 0 for row in rows) >= 2  # a partial step may find its batch complete


def test_an_asynchronous_run_is_stopped_by_a_signal_and_goes_on(
    material: Material, sglang_python: str, tmp_path: Path
) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    keys = ("rollout.mode=async", "sync.mode=tensor", "algorithm.rollout_correction.rollout_is=token")
    runs = Runs(material, sglang_python, tmp_path, *keys)
    running = runs.start(SLOW=str(slow))
    log = runs.run / "metrics.jsonl"
    wait_for(lambda: log.exists() and len(metrics(runs.run)) >= 2, deadline_s=DEADLINE_S, of=running)
    running.process.send_signal(signal.SIGTERM)
    done = runs.finish(running)
    assert done.code == 75 and "stopped on a signal; the same command resumes" in done.err, (done.out, done.err)
    assert "Traceback" not in done.err
    state = json.loads((max((runs.run / "checkpoints").glob("step_*")) / "state.json").read_text())
    assert state["train"]["step"] >= 2 and state["rollout"]["unfinished"]
    slow.unlink()
    done = runs.finish(runs.start())
    assert done.code == 0, (done.err, done.out, runs.said)
    is_sound(runs.run)
    assert any(row["rollout/staleness"] > 0 for row in metrics(runs.run))


def test_a_server_that_does_not_start_is_one_message(material: Material, sglang_python: str, tmp_path: Path) -> None:
    runs = Runs(material, sglang_python, tmp_path, "rollout.engine_args={nonsense-option: 5}")
    done = runs.finish(runs.start())
    assert done.code == 2, (done.out, done.err)
    assert "rollout.engine_args: SGLang refuses an option" in done.err and "nonsense" in done.err
    assert "Traceback" not in done.err
