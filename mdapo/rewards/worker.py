"""The process that runs reward functions which may hang, fork or crash: JSON lines in, JSON lines out.

Line 1 in: the functions to load. Line 1 out: ``{"ready": true}`` or ``{"problems": [...]}``. Then for each episode one
line in, and one line out for each function, in order.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any, BinaryIO

from mdapo.errors import UserError
from mdapo.rewards.calling import BadReward, RewardFunction, load_function
from mdapo.types import Message, Prompt

_PR_SET_PDEATHSIG = 1


def main() -> None:
    die_with_parent()
    requests, answers = private_pipes()
    parts = json.loads(requests.readline())
    try:
        functions = [load_function(p["name"], p["args"]) for p in parts]
    except UserError as error:
        say(answers, {"problems": error.problems})
        return
    say(answers, {"ready": True})
    me = os.getpid()
    for line in requests:
        episode = _read_episode(json.loads(line))
        for function in functions:
            answer = _answer(function, **episode)
            if os.getpid() != me:  # the function forked, and this is the child that came back
                os._exit(0)
            say(answers, answer)


def die_with_parent() -> None:
    """A trainer that is killed leaves no reward process behind (Linux; elsewhere the closed pipe ends an idle one)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """(requests, answers): stdin and stdout kept for the protocol. What functions print goes to stderr; they read
    nothing."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, answers


def _read_episode(row: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a ``RewardFunction``, as ``rewards/processes.py`` wrote them."""
    messages = tuple(Message(role, content) for role, content in row["messages"])
    return {**row, "messages": messages, "prompt": read_prompt(row["prompt"])}


def read_prompt(row: dict[str, Any]) -> Prompt:
    """As ``processes.prompt_as_json`` wrote it."""
    texts = tuple(Message(role, content) for role, content in row["messages"])
    rest = {name: value for name, value in row.items() if name != "messages"}
    return Prompt(messages=texts, **rest)


def _answer(function: RewardFunction, **episode: Any) -> dict[str, Any]:
    try:
        verdict = function(**episode)
    except BadReward as error:
        return {"error": str(error), "detail": repr(error.__cause__)[:500]}
    return {"value": verdict.value, "outcome": verdict.outcome, "parts": dict(verdict.parts)}


def say(answers: BinaryIO, answer: dict[str, Any]) -> None:
    """One line of JSON."""
    answers.write(json.dumps(answer, allow_nan=False).encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    main()
