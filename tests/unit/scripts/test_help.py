"""What a new user reads first says what each command does, shows an example and names the exit codes."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import mdapo
from mdapo.cli import app


@pytest.mark.parametrize("command", ["train", "eval", "check", "doctor"])
def test_every_command_has_an_example(command: str) -> None:
    text = CliRunner().invoke(app, [command, "--help"]).output
    assert f"Example: mdapo {command}" in text
    assert command == "doctor" or "Exit codes: 0" in text
    assert "``" not in text


def test_the_version_is_told() -> None:
    found = CliRunner().invoke(app, ["--version"])
    assert (found.exit_code, found.output) == (0, f"mdapo {mdapo.__version__}\n")


def test_the_first_page_says_what_mdapo_is_and_where_to_begin() -> None:
    text = CliRunner().invoke(app, ["--help"]).output
    for word in ("DAPO", "scripts/quickstart.sh", "configs/README.md", "Exit codes: 0", "train", "eval", "check"):
        assert word in text
