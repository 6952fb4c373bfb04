"""The process that runs tools which may hang, fork or crash: JSON lines in, JSON lines out.

Line 1 in: the tools to load; out: ``{"ready": true}`` or ``{"problems": [...]}``. Then for each call a line in,
``{"tool", "arguments", "prompt", "limit"}``, and one out: ``{"text", "length"}``, at most ``limit`` characters of a
text that has ``length``, or ``{"error": why}``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from mdapo.environments.tools import Tool, load_tool, why_of
from mdapo.errors import UserError
from mdapo.rewards.worker import die_with_parent, private_pipes, read_prompt, say


def main() -> None:
    die_with_parent()
    requests, answers = private_pipes()
    try:
        tools = {part["name"]: load_tool(part["name"]) for part in json.loads(requests.readline())}
    except UserError as error:
        say(answers, {"problems": error.problems})
        return
    say(answers, {"ready": True})
    me = os.getpid()
    for line in requests:
        answer = _answer(tools, json.loads(line))
        if os.getpid() != me:  # the tool forked, and this is the child that came back
            os._exit(0)
        say(answers, answer)


def _answer(tools: Mapping[str, Tool], call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        text = tools[call["tool"]](call["arguments"], read_prompt(call["prompt"]))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the policy is told
        return {"error": why_of(error)}
    return {"text": text[: call["limit"]], "length": len(text)}


if __name__ == "__main__":
    main()
