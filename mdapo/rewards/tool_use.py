"""The reward of tasks with tools: whether the answer is right, with the calls and their errors beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from mdapo.rewards.math import gsm8k
from mdapo.types import EndReason, Message, Prompt, Score


def tool_use(messages: Sequence[Message], prompt: Prompt, end: EndReason, *, strict: bool = True) -> Score:
    """As `math.gsm8k`, whose ``strict`` it has. The parts ``tool_answers`` and ``tool_errors`` count what tools said,
    and how often it was an error (an unknown function, bad JSON, wrong arguments, a tool that failed); they earn
    nothing. Raises ValueError where ``prompt.ground_truth`` is no text or number."""
    score = gsm8k(messages, prompt, end, strict=strict)
    opening = len(prompt.messages)
    told = [m.content for m in messages[opening:] if m.role == "tool"]
    counts = {"tool_answers": float(len(told)), "tool_errors": float(sum(map(_is_error, told)))}
    return replace(score, parts={**score.parts, **counts})


def _is_error(text: str) -> bool:
    """As ``environments/tool_use.py`` tells one."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(said, dict) and list(said) == ["error"]
