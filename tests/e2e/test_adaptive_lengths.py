"""Lengths that follow the dialogues, and credit by turn: a run that is killed ends, bit for bit, as one that is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import Material, mdapo, metrics, trained_prompts, weights

from mdapo.data.wire import load_groups_file

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
KEYS = (
    "rollout.max_response_len=72",  # two turns, rarely three; x 1.5 and a prompt of 48 just fit the context
    "model.max_context=156",
    "rollout.max_turns=3",
    "rollout.adaptive_lengths={enable: true, turns_above: 1.9, turns_below: 1.2, hysteresis: 0.2, decay: 0.5}",
    "reward.overlong_buffer_cfg={enable: true, len: auto, penalty_factor: 0.2}",
    "algorithm.advantage={credit: turn, turn_share: 0.75, turn_gamma: 0.9}",
    "algorithm.name=rloo",
    "actor.ppo_max_token_len=120",
    "tracking.replay=true",
    "run.eval_before=false",
    "run.eval_after=false",
    "run.eval_every=0",
)
MODES = {"sync": ("parallel.data=2",), "partial": ("rollout.mode=partial", "rollout.max_turn_len=16")}


@pytest.mark.parametrize("mode", MODES)
def test_a_killed_run_goes_on_with_the_lengths_it_had(mode: str, material: Material, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "killed"
    keys = (*KEYS, *MODES[mode])
    done = mdapo("train", str(material.config), f"run.dir={whole}", *keys)
    assert done.code == 0, done.err
    rows = metrics(whole / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert (rows[0]["lengths/scale"], rows[-1]["lengths/scale"]) == (1.0, 1.5)
    assert {row["lengths/max_response_len"] for row in rows} == {72, 108}
    assert all(1 <= row["lengths/overlong_buffer"] <= row["lengths/max_response_len"] for row in rows)
    assert len({row["lengths/overlong_buffer"] for row in rows}) > 1
    assert "turns on average: lengths x 1.5, rollout.max_response_len 108 (was 72)" in done.out
    assert "responses 50 / 72 / 108, micro-batches 84 / 120 / 180 tokens" in done.out
    groups = [g for file in sorted((whole / "run" / "replay").glob("*")) for g in load_groups_file(file)]
    assert {group.length_scale for group in groups} == {1.0, 1.5}
    for group in groups:
        longest = max(len(e.ids) - len(e.prompt_ids) for e in group.episodes)
        assert longest <= round(72 * group.length_scale)
    assert any(len(e.ids) - len(e.prompt_ids) > 72 for group in groups for e in group.episodes)
    turns = {e.num_agent_turns for group in groups for e in group.episodes}
    assert len(turns) > 1, "credit by turn with different numbers of turns"

    command = ("train", str(material.config), f"run.dir={run}", *keys)
    for number in (1, 3):
        done = mdapo(*command, SABOTAGE=f"killed-before-commit:{number}")
        assert done.code == 75, done.err
        newest = max((run / "run" / "checkpoints").glob("step_*"), default=None)
        if newest is not None:
            saved = json.loads((newest / "state.json").read_text())["rollout"]["lengths"]
            assert saved["regime"] == "longer" and saved["running"]["dialogues"] > 0
    done = mdapo(*command)
    assert done.code == 0, done.err
    assert metrics(run / "run") == rows
    assert weights(run / "run") == weights(whole / "run")
    assert trained_prompts(run / "run") == trained_prompts(whole / "run")
