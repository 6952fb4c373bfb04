"""A task with tools: the policy calls functions by JSON in its text, reads their answers, and answers.

The end: a turn without a call is the answer ("done"); or, with ``answer``, a turn that has this text in it. What the
policy writes is no error of the run: an unknown function, bad JSON or wrong arguments are told to it in the function's
stead, as ``{"error": why}``, and so is what a tool raises or that it took too long.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mdapo.environments.base import Observation, Tools
from mdapo.environments.json_schema import declaration_problems, violations
from mdapo.environments.resuming import after_opening
from mdapo.environments.tool_calls import BadCall, Call, calls_in, outside_calls
from mdapo.environments.tool_processes import ToolProcesses
from mdapo.environments.tools import Tool, load_tool, why_of
from mdapo.errors import UserError, shortened
from mdapo.types import Message, Prompt

NONE_LEFT = "no function calls are left; answer now"
_SHORTEST = 80  # characters of an observation: room for the note that it is cut


@dataclass(frozen=True)
class Limits:
    """``timeout_s`` of one call, ``max_tool_calls`` of an episode, ``max_observation_chars`` of one answer."""

    timeout_s: float
    max_tool_calls: int
    max_observation_chars: int
    answer: str | None


class ToolUse:
    """One episode. A configuration names this class; `for_run` then makes what makes the episodes'."""

    def __init__(self, prompt: Prompt, *, shared: ToolUses) -> None:
        self._prompt, self._shared, self._limits = prompt, shared, shared.limits
        self._tools = shared.tools_for(prompt)
        self._answers = _recorded(prompt)
        self._spent = 0
        self._told = self._reminded = False
        self.tools: Tools = tuple(tool.declaration for tool in self._tools.values())

    @classmethod
    def for_run(
        cls,
        *,
        tools: Sequence[str] = (),
        workers: int = 2,
        timeout_s: float = 10.0,
        max_tool_calls: int = 8,
        max_observation_chars: int = 2000,
        answer: str | None = None,
    ) -> ToolUses:
        """``configs/README.md`` describes each. ``ValueError``: one is out of bounds; ``UserError``: no such tool."""
        if isinstance(tools, str) or not all(isinstance(name, str) for name in tools):
            raise ValueError("tools must be a list of names, such as [calculator, my_tools.py:search]")
        bounds = (
            ("workers", workers, 1, 1024),
            ("timeout_s", timeout_s, 0.001, 86400),
            ("max_tool_calls", max_tool_calls, 1, 1000),
            ("max_observation_chars", max_observation_chars, _SHORTEST, 1_000_000),
        )
        for name, value, least, most in bounds:
            kinds = int | float if name == "timeout_s" else int
            if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
                raise ValueError(f"{name} must be a number from {least} to {most}, not {value!r:.60}")
        if answer is not None and (not isinstance(answer, str) or not answer):
            raise ValueError("answer must be a text that marks the answer, or null")
        limits = Limits(float(timeout_s), max_tool_calls, max_observation_chars, answer)
        return ToolUses([load_tool(name) for name in tools], limits, workers=workers)

    def opening(self) -> tuple[Message, ...]:
        return self._prompt.messages

    def resume(self, messages: Sequence[Message]) -> None:
        """No tool is called again: what they answered has been said."""
        for message in after_opening(messages, self.opening()):
            if message.role == "assistant":
                calls = calls_in(message.content)
                self._admitted(calls)
                self._reminded |= not calls  # a conversation that went on: it was no answer

    def observe(self, messages: Sequence[Message]) -> Observation:
        text, marker = messages[-1].content, self._limits.answer
        if marker is not None and marker in outside_calls(text):
            return Observation(end="done")
        calls = calls_in(text)
        if not calls:
            return Observation(end="done") if marker is None else self._remind(marker)
        if self._told:  # that none are left, and it calls all the same
            return Observation(end="gave_up")
        answers = [self._run(call) for call in self._admitted(calls)]
        if self._told:  # one message for all the rest
            answers.append(self._error(NONE_LEFT))
        limit = self._limits.max_observation_chars
        return Observation(tuple(Message("tool", _readable(answer, limit)) for answer in answers))

    def _admitted(self, calls: Sequence[Call | BadCall]) -> Sequence[Call | BadCall]:
        """Those of a turn for which there is room; they are counted."""
        admitted = calls[: self._limits.max_tool_calls - self._spent]
        self._spent += len(admitted)
        self._told |= len(admitted) < len(calls)
        return admitted

    def _remind(self, marker: str) -> Observation:
        """Neither call nor answer: once that is told, twice is the end."""
        if self._reminded:
            return Observation(end="gave_up")
        self._reminded = True
        return Observation((Message("user", f"Call a function, or give your answer after {marker}"),))

    def _error(self, why: str) -> str:
        return _error(why, self._limits.max_observation_chars)

    def _run(self, call: Call | BadCall) -> str:
        if isinstance(call, BadCall):
            return self._error(call.why)
        tool = self._tools.get(call.name)
        if tool is None:
            return self._error(f"there is no function {call.name:.60}; there are {', '.join(self._tools) or 'none'}")
        if wrong := violations(call.arguments, tool.declaration["function"].get("parameters", {})):
            return self._error(f"{tool.name}: {'; '.join(wrong)}")
        if tool.source == _RECORDED:
            known = self._answers.get(_key(tool.name, call.arguments))
            return known if known is not None else self._error(f"{tool.name}: no answer is known for these arguments")
        return self._shared.run(tool, call.arguments, self._prompt)


class ToolUses:
    """Makes the episodes' environments, all with the same tools. ``waits``: some run in processes."""

    def __init__(self, tools: Sequence[Tool], limits: Limits, *, workers: int) -> None:
        self.limits, self._tools = limits, {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise ValueError(f"tools: two have the same name ({', '.join(tool.name for tool in tools)})")
        foreign = [tool for tool in tools if tool.foreign]
        self._processes = ToolProcesses(foreign, workers=workers) if foreign else None
        self.waits = self._processes is not None

    def __call__(self, prompt: Prompt, *, seed: int) -> ToolUse:
        return ToolUse(prompt, shared=self)

    def tools_for(self, prompt: Prompt) -> dict[str, Tool]:
        """Those that the row names or declares in its column ``tools``, else all. ``ValueError``: it cannot."""
        wanted = prompt.extra.get("tools")
        if isinstance(wanted, str):
            try:
                wanted = json.loads(wanted)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{prompt.uid}: tools: neither a list nor JSON ({str(error)[:60]})") from error
        if wanted is None:
            if not self._tools:
                raise ValueError(f"{prompt.uid}: has no column tools, and environment.args.tools names none")
            return dict(self._tools)
        if not isinstance(wanted, list):
            raise ValueError(f"{prompt.uid}: tools: must be a list of names or declarations")
        found: dict[str, Tool] = {}
        for item in wanted:
            tool = self._tool_of(item, prompt)
            if tool.name in found:
                raise ValueError(f"{prompt.uid}: tools: {tool.name} comes twice")
            found[tool.name] = tool
        return found

    def _tool_of(self, item: Any, prompt: Prompt) -> Tool:
        if isinstance(item, str):
            if item not in self._tools:
                known = ", ".join(self._tools) or "none"
                raise ValueError(f"{prompt.uid}: tools: no tool {item!r:.60}; environment.args.tools has {known}")
            return self._tools[item]
        if problems := declaration_problems(item):
            raise ValueError(f"{prompt.uid}: tools: {problems[0]}")
        own = self._tools.get(item["function"]["name"])
        if own is not None:  # its function, under the row's declaration
            return replace(own, declaration=item)
        return Tool(_RECORDED, _no_function, item, foreign=False)

    def run(self, tool: Tool, arguments: Mapping[str, Any], prompt: Prompt) -> str:
        """The tool's answer, or the error that it is answered with. ``UserError``: the row has not what it needs."""
        if tool.foreign:
            assert self._processes is not None
            limits = self.limits
            answer = self._processes.call(
                tool, arguments, prompt, timeout_s=limits.timeout_s, limit=limits.max_observation_chars
            )
            if "error" in answer:
                return _error(f"{tool.name}: {answer['error']}", limits.max_observation_chars)
            return _cut(str(answer["text"]), limits.max_observation_chars, length=int(answer["length"]))
        try:
            return tool(arguments, prompt)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the policy is told
            return _error(f"{tool.name}: {why_of(error)}", self.limits.max_observation_chars)

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()


_RECORDED = ""  # the source of a tool that answers from the row's tool_answers


def _no_function(**arguments: object) -> str:
    raise AssertionError("answered from the row")


def _recorded(prompt: Prompt) -> dict[str, str]:
    """Answers by call, from the row's column ``tool_answers``: ``[{"name", "arguments", "answer"}]``."""
    rows = prompt.extra.get("tool_answers") or []
    wanted = f"{prompt.uid}: tool_answers: must be a list of objects with name, arguments and answer"
    if not isinstance(rows, list):
        raise ValueError(wanted)
    found = {}
    for row in rows:
        if not isinstance(row, Mapping) or not isinstance(row.get("name"), str) or "answer" not in row:
            raise ValueError(wanted)
        answer = row["answer"]
        text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, allow_nan=False)
        found[_key(row["name"], row.get("arguments") or {})] = text
    return found


def _key(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps([name, arguments], sort_keys=True, allow_nan=False)


def _error(why: str, limit: int) -> str:
    """JSON of at most ``limit`` characters: what is counted as an error must stay one."""
    while len(text := json.dumps({"error": why}, ensure_ascii=False, allow_nan=False)) > limit:
        why = shortened(why, limit=max(len(why) - (len(text) - limit), 3))
    return text


def _cut(text: str, limit: int, *, length: int | None = None) -> str:
    """At most ``limit`` characters, with a note where there were more: ``text`` may be the beginning of ``length``."""
    length = len(text) if length is None else length
    if length <= limit:
        return text
    note = f"... [cut: {length} characters]"
    return text[: max(limit - len(note), 0)] + note


def _readable(text: str, limit: int) -> str:
    """Bounded, and text that can be encoded: a tool, or JSON of the policy, may hold half of a surrogate pair."""
    return _cut(text, limit).encode("utf-8", "replace").decode().replace("\x00", "\ufffd")
