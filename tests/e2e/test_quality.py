"""A whole run whose dialogues are measured: the numbers of every step and evaluation, the folder, and a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import Material, mdapo, metrics

from mdapo.data.wire import load_groups_file

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
MEASURED = ("quality.embeddings=lexical", "algorithm.filter_groups.metric=combined", "tracking.replay=true")


def test_coherence_and_relevance_are_with_every_step_every_evaluation_and_every_episode(
    material: Material, tmp_path: Path
) -> None:
    done = mdapo("train", str(material.config), f"run.dir={tmp_path}", "run.total_steps=2", *MEASURED)
    assert done.code == 0 and done.err == "", done.err
    run = tmp_path / "run"
    for row in metrics(run):
        for name in ("quality/coherence", "quality/relevance", "trained/coherence", "trained/relevance"):
            assert 0.0 <= row[name] <= 1.0
        assert row["quality/measured"] >= 8 and row["rollout/reward_failures"] == 0
    scores = [e.score for g in load_groups_file(run / "replay" / "step_000002.safetensors") for e in g.episodes]
    assert scores and all(s is not None and s.coherence is not None and s.relevance is not None for s in scores)
    summary = json.loads((run / "summary.json").read_text())
    assert {"coherence_before", "coherence_after", "relevance_before", "relevance_after"} <= summary.keys()
    (first, *_) = (run / "episodes" / "step_000001.jsonl").read_text().splitlines()
    assert 0.0 <= json.loads(first)["score"]["coherence"] <= 1.0
    assert "coherence" in done.out
    again = mdapo("train", str(material.config), f"run.dir={tmp_path}", "run.total_steps=3", *MEASURED)
    assert again.code == 0 and again.err == "", again.err
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]


def test_check_says_how_quality_is_measured_and_what_is_missing(material: Material) -> None:
    asked = ("algorithm.filter_groups.reward_threshold=0.5", "algorithm.filter_groups.min_coherence_score=0.25")
    done = mdapo("check", str(material.config), *MEASURED, *asked)
    assert done.code == 0, done.out
    assert "coherence and relevance by words alone (lexical)" in done.out
    assert (
        "with a mean combined (outcome 1 : coherence 0.5 : relevance 0.5) of at least 0.5 and a mean coherence"
        in done.out
    )
    assert "quality: coherence 0." in done.out
    missing = mdapo("check", str(material.config), "algorithm.filter_groups.metric=relevance")
    assert missing.code == 2 and "quality.embeddings: must be set with" in missing.out + missing.err
    no_folder = mdapo("check", str(material.config), "quality.embeddings=models/nothing")
    assert no_folder.code == 2 and "quality.embeddings: no such folder: models/nothing" in no_folder.out + no_folder.err
