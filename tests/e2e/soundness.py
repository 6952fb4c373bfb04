"""What must hold of a run whose conversations outlive steps, whatever stopped it in between."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tiny_run import metrics, trained_prompts

from mdapo.data.wire import load_groups_file
from mdapo.types import Group


def groups(run: Path) -> list[list[Group]]:
    """Of each step."""
    return [load_groups_file(file) for file in sorted((run / "replay").glob("step_*.safetensors"))]


def is_sound(run: Path, *, steps: int = 6) -> None:
    """Each step once; no prompt twice in an epoch; no token older than allowed; staleness as the tokens tell it."""
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert max(Counter(trained_prompts(run)).values()) == 1, "24 prompts, of which 12 are trained on"
    for row, trained in zip(rows, groups(run), strict=True):
        version = row["version"] - 1  # that the step began with
        assert row["sync/logprob_gap"] <= 1e-4
        ages = [version - group.version for group in trained]
        assert min(ages) >= 0 and max(ages) <= 1
        assert row["rollout/staleness_max"] == max(ages)
        assert row["rollout/staleness"] == pytest.approx(sum(ages) / len(ages))
        assert 0 <= row["rollout/staleness_tokens"] <= 1
        for episode in (episode for group in trained for episode in group.episodes):
            assert episode.num_model_tokens == int(episode.response_mask.sum()) <= 48
            written = [v for turn in episode.turns if turn.version >= 0 for v, _ in turn.runs]
            assert written == sorted(written) and version - 1 <= written[0] and written[-1] <= version
