"""Requests sized by the yield, through the real trainer: each prompt once, also when it is killed, and a clean end
where nothing teaches."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tiny_run import Material, mdapo, metrics, trained_prompts

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
YIELD = (
    "algorithm.filter_groups.sample=yield",
    "algorithm.filter_groups.skip_prompts.enable=true",
    "tracking.replay=true",
    "run.eval_before=false",
    "run.eval_after=false",
    "run.eval_every=0",
    "run.export_hf=false",
)


@pytest.mark.parametrize("mode", ["sync", "partial"])
def test_a_killed_run_trains_each_prompt_once_and_keeps_what_it_learned(
    material: Material, tmp_path: Path, mode: str
) -> None:
    command = ("train", str(material.config), f"run.dir={tmp_path}", f"rollout.mode={mode}", *YIELD)
    done = mdapo(*command, SABOTAGE="killed-before-commit:3")
    assert done.code == 75, done.err
    run = tmp_path / "run"
    newest = max((run / "checkpoints").glob("step_*"))
    held = json.loads((newest / "state.json").read_text())["rollout"]
    assert held["yield"]["judged"] >= 4 and held["groups"]["trained"] == 4 and len(held["pass_rates"]["uids"]) >= 4
    done = mdapo(*command)
    assert done.code == 0, done.err
    rows = metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert max(Counter(trained_prompts(run)).values()) == 1 and len(trained_prompts(run)) == 12
    for row in rows:
        count = {name: row.get(f"rollout/run/groups_{name}", 0) for name in ("generated", "trained", "dropped")}
        assert count["generated"] == count["trained"] + count["dropped"] + row["rollout/groups_carried"]
    assert rows[-1]["rollout/run/groups_trained"] == 12 and rows[-1]["actor/updates_total"] == 6
    assert 0.0 < rows[-1]["rollout/yield"] <= 1.0
    assert "round 1: asked " in done.out and "6 steps (6 optimizer steps)" in done.out


def test_where_nothing_teaches_the_run_ends_with_code_4_and_a_checkpoint(material: Material, tmp_path: Path) -> None:
    """Cases 1 and 2: bounded, with the cause, and nothing of the last step is lost."""
    plugin = f"{Path(__file__).with_name('plugin.py')}:vowels"
    reward = f'reward.functions=[{{"name": "{plugin}", "args": {{"same_for": ["W"]}}}}]'
    stop = ("algorithm.filter_groups.on_limit=stop", "algorithm.filter_groups.max_num_gen_batches=14")
    done = mdapo("train", str(material.config), f"run.dir={tmp_path}", reward, *YIELD, *stop)
    assert done.code == 4 and "0 of 2 groups after 14 rounds" in done.err and "Traceback" not in done.err, done.err
    assert "warning: 0 of the last 40 groups teach anything; 40 of them: no spread. Likely the metric gives" in done.out
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000000"]
