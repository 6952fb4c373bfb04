"""What ``mdapo doctor`` says of SGLang on this machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from mdapo.doctor import doctor
from mdapo.trainer.servers_report import sglang_rows


def test_the_python_of_an_environment_with_sglang_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho '\"0.5.19\"'\n")
    python.chmod(0o755)
    monkeypatch.setenv("MDAPO_SGLANG_ENV", str(tmp_path))
    rows = dict(sglang_rows())
    assert rows["MDAPO_SGLANG_ENV"] == f"SGLang 0.5.19, {python}"
    if importlib.util.find_spec("sglang") is None:
        assert rows["beside mdapo"] == "no SGLang"
    monkeypatch.setenv("MDAPO_SGLANG_ENV", str(tmp_path / "none"))
    assert dict(sglang_rows())["MDAPO_SGLANG_ENV"].startswith("is no program that can be started")
    monkeypatch.delenv("MDAPO_SGLANG_ENV")
    assert dict(sglang_rows())["MDAPO_SGLANG_ENV"] == "not set"
    assert "\nsglang\n  beside mdapo" in doctor()
