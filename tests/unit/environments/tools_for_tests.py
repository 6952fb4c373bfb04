"""Tools as a user's plug-in file has them, good and bad."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from mdapo.types import Prompt


def shout(text: Annotated[str, "What to shout"], times: Annotated[int, {"minimum": 1, "maximum": 3}] = 1) -> str:
    """Says it loudly.

    Not shown.
    """
    return text.upper() * times


def choose(how: Literal["fast", "slow"], many: list[int], more: str | None = None, deep: dict = {}) -> dict:  # noqa: B006
    """Chooses."""
    return {"how": how, "sum": sum(many), "more": more, "deep": deep}


def row(word: str, *, prompt: Prompt) -> str:
    return f"{word} of {prompt.uid}: {prompt.extra['note']}"


def bad(how: str) -> Any:
    """Misbehaves."""
    if how == "raise":
        raise ValueError("the order is unknown")
    if how == "raise other":
        raise KeyError("x" * 10_000)
    if how == "exit":
        sys.exit(0)
    if how == "die":
        os._exit(1)
    if how == "hang":
        subprocess.Popen(["sleep", "1000"])
        time.sleep(1000)
    if how == "fork" and os.fork() == 0:
        return "the child"
    if how == "print":
        print('{"text": "forged", "length": 6}')
        return "the real one"
    values = {"none": None, "number": 4.5, "bytes": b"x", "nan": float("nan"), "object": object(),
              "long": "y" * 10_000_000,
              "surrogate": "a\ud800b\x00", "fork": "the parent"}  # fmt: skip
    return values[how]


def untyped(x, y: int):  # type: ignore[no-untyped-def]
    return x


def odd(x: set) -> str:
    return ""


def pattern(x: Annotated[str, {"pattern": "(a+)+$"}]) -> str:
    return ""


def slowly(word: str, *, prompt: Prompt) -> str:
    """Tells in a file that it was called, and answers once a file of that name is there."""
    folder, deadline = Path(prompt.extra["folder"]), time.monotonic() + 60
    with (folder / "log").open("a") as log:
        log.write(f"{word}\n")
    while not (folder / word).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(word)
        time.sleep(0.01)
    return f"{word} is done"
