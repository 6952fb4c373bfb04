"""Four ranks over gloo: shares reach the right replica, sums count once, one bad rank makes all skip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from parity import launch
from tiny_models import save_model

PROGRAM = Path(__file__).with_name("collectives_rank.py")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "parallel",
    [{"tensor": 2, "sequence": True}, {"pipeline": 2, "distributed_optimizer": False}],
    ids=["TP2xDP2+SP+dist-opt", "PP2xDP2"],
)
def test_bytes_numbers_and_a_bad_rank(parallel: dict[str, Any], tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama", layers=2)
    launch(PROGRAM, [json.dumps(parallel), str(model)], 4, timeout_s=150.0)


@pytest.mark.timeout(100)
def test_layout_that_does_not_fit_the_ranks_says_so(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama", layers=2)
    with pytest.raises(RuntimeError, match="tensor 1 x pipeline 3 does not fit 2 ranks"):
        launch(PROGRAM, [json.dumps({"pipeline": 3}), str(model)], 2, timeout_s=80.0)
