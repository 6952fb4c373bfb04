"""Reward functions as people write them, and as they should not: loaded by name in reward processes."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path


def good(messages, prompt, end):
    return {"score": 0.5, "acc": 1.0, "pred": "seven", "length": len(messages[-1].content)}


def number(messages, prompt, end, value=1.0):
    return value


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.endswith(ground_truth)) + 10 * (data_source == "gsm8k") + 100 * extra_info["index"]


def trl(prompts, completions, index, **columns):
    assert prompts[0][-1]["role"] == "user" and completions[0][0]["role"] == "assistant"
    return [len(completions[0]) + 10 * index[0] + 100 * float(columns["ground_truth"][0])]


async def trl_async(prompts, completions):
    await asyncio.sleep(0)
    return [2.0]


def hanging(messages, prompt, end):
    time.sleep(1000)


def raising(messages, prompt, end):
    raise KeyError("secret of the episode")


def exiting(messages, prompt, end):
    sys.exit(3)


def dying(messages, prompt, end):
    os._exit(3)


def returns_1e308(messages, prompt, end):
    return -1e308


def returns_a_huge_outcome(messages, prompt, end):
    return {"score": 1.0, "acc": 1e9}


def returns_an_outcome_beyond_one(messages, prompt, end):
    return {"score": 7.0, "acc": 7.0}


def logs_large_numbers(messages, prompt, end):
    return {"score": 0.5, "seconds": 1.8e9, "norm": 1e308}


def returns_none(messages, prompt, end):
    return None


def returns_nan(messages, prompt, end):
    return float("nan")


def returns_inf(messages, prompt, end):
    return {"score": 1e400}


def returns_text(messages, prompt, end):
    return "1.0"


def returns_list(messages, prompt, end):
    return [1.0]


def returns_no_score(messages, prompt, end):
    return {"acc": 1.0}


def returns_huge(messages, prompt, end):
    return 10**400


def trl_returns_two(prompts, completions):
    return [1.0, 2.0]


def trl_returns_none(prompts, completions):
    return [None]


def printing(messages, prompt, end):
    print('{"value": 99, "outcome": 99, "parts": {}}', flush=True)
    os.write(1, b'{"value": 99, "outcome": 99, "parts": {}}\n')
    return 0.25 + len(sys.stdin.read())


def forking(messages, prompt, end, note=""):
    """The child comes back too, and a grandchild in a session of its own stays."""
    if os.fork() == 0:
        return 99.0
    if os.fork() == 0:
        os.setsid()
        Path(note).write_text(str(os.getpid()))
        time.sleep(1000)
    while not note_written(note):
        time.sleep(0.01)
    return 0.75


def note_written(note):
    return Path(note).is_file() and Path(note).read_text()


def hangs_after_forking(messages, prompt, end, note=""):
    forking(messages, prompt, end, note=note)
    time.sleep(1000)


def sometimes(messages, prompt, end):
    if "bad" in messages[-1].content:
        raise RuntimeError("bad")
    return 1.0


def wants_two_turns(messages, prompt, end):
    said = [m for m in messages if m.role == "assistant"]
    if len(said) < 2:
        raise ValueError("not finished")
    return float(len(said))


def strange(a, b):
    return 1.0


not_a_function = 7
