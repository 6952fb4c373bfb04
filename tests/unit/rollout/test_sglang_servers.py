"""Servers of others: their addresses and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mdapo.config.schema import Config
from mdapo.errors import UserError
from mdapo.rollout.sglang_servers import Address, external
from mdapo.rollout.sglang_timing import Timing

URLS = ["http://a:1", "http://b:2"]


def config(**rollout: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train_files": ["d"]},
            "rollout": {"engine": "sglang", "urls": URLS} | rollout,
        }
    )


def test_the_key_is_read_from_its_file_and_shown_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("s3cret\n")
    file.chmod(0o600)
    addresses, router = external(config(key_file=str(file), router="http://r:3"))
    assert addresses == [Address(url, "s3cret") for url in URLS]
    assert router == Address("http://r:3", "s3cret")
    assert "s3cret" not in f"{addresses!r} {router!r} {addresses[0]}"


def test_without_a_key_file_there_is_no_key() -> None:
    assert external(config()) == ([Address(url) for url in URLS], None)


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        (None, 0o600, "no such file"),
        (b"k", 0o640, "others may read it; chmod 600"),
        (b"\n", 0o600, "is empty"),
        ("schlüssel".encode(), 0o600, "is not a key: printable ASCII"),
        (b"two words", 0o600, "is not a key: printable ASCII"),
        (b"k" * 5000, 0o600, "is not a key: printable ASCII"),
    ],
)
def test_a_key_file_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None, mode: int, says: str) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)
    with pytest.raises(UserError, match=says) as caught:
        external(config(key_file=str(file)))
    assert str(file) in str(caught.value)


def test_a_server_has_half_of_an_episodes_time_for_a_turn() -> None:
    timing = Timing.of(config(episode_timeout_s=60.0))
    assert (timing.turn_s, timing.attempt_s) == (60.0, 30.0)
