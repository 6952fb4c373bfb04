"""Make a configured environment and hold it to its contract: what it may return is checked where it returns it.

What an environment *raises* may be its network's fault and is the caller's to judge. What it *returns* wrongly is a bug
of the plug-in, and so is what it raises that is no ``Exception`` (``sys.exit``, a leaked cancellation), which would be
taken for the run's own: one ``UserError`` with its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_args

from mdapo import plugins
from mdapo.config.schema import Plugin
from mdapo.environments import BUILTIN
from mdapo.environments.aside import Aside
from mdapo.environments.base import Environment, EnvironmentFactory, Observation, Resumable
from mdapo.errors import UserError, shortened
from mdapo.types import EndReason, Message, Prompt, Role

T = TypeVar("T")
_OBSERVED = ("system", "user", "tool")  # the policy alone speaks as the assistant; a prompt may show it doing so


def load_environment(cfg: Plugin) -> Callable[..., Environment]:
    """Makes checked environments ``(prompt, seed=...)``. ``UserError``: no such plug-in, arguments it does not take."""
    factory = plugins.load(cfg.name, builtin=BUILTIN, required=("prompt", "seed"), args=cfg.args)

    def make(prompt: Prompt, *, seed: int) -> Environment:
        made = _unless_it_ends_all(cfg.name, "the constructor", lambda: factory(prompt, seed=seed, **cfg.args))
        return (_CheckedResumable if isinstance(made, Resumable) else _Checked)(made, cfg.name)

    return make


async def openings_of(
    factory: EnvironmentFactory, name: str, prompts: Sequence[Prompt], *, seed: int, calls: Aside, timeout_s: float
) -> list[tuple[Message, ...]]:
    """What stands before the first turn to each row. ``UserError`` with environment and row when it refuses the row or
    has not answered after ``timeout_s`` (``rollout.episode_timeout_s``)."""
    openings = []
    for prompt in prompts:
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                openings.append(await calls.call(lambda prompt=prompt: factory(prompt, seed=seed).opening()))
                await asyncio.sleep(0)  # where a signal can end it
        except UserError:
            raise
        except Exception as error:
            if deadline.expired():
                limit = f"{timeout_s:g} s (rollout.episode_timeout_s)"
                raise UserError(f"environment.name={name}: {prompt.uid}: no opening after {limit}") from error
            what = str(error) if isinstance(error, ValueError) and str(error) else f"{type(error).__name__}: {error}"
            raise UserError(f"environment.name={name}: refuses {prompt.uid}: {shortened(what)}") from error
    return openings


class _Checked:
    """An environment whose returns are what ``environments/base.py`` asks for."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner, self._name = inner, name

    def opening(self) -> tuple[Message, ...]:
        found = _unless_it_ends_all(self._name, "opening()", lambda: self._inner.opening())
        wanted = "a sequence of one or more mdapo.types.Message"
        if not isinstance(found, list | tuple) or not found:
            raise self._wrong("opening()", found, wanted)
        return self._messages("opening()", found, wanted, get_args(Role))

    def observe(self, messages: Sequence[Message]) -> Observation:
        found = _unless_it_ends_all(self._name, "observe()", lambda: self._inner.observe(messages))
        wanted = "an mdapo.environments.base.Observation"
        if not isinstance(found, Observation):
            raise self._wrong("observe()", found, wanted)
        ends = get_args(EndReason)
        if found.end is not None and found.end not in ends:
            raise self._wrong("observe()", found.end, f"an Observation whose end is None or one of {', '.join(ends)}")
        wanted = "an Observation whose messages are a sequence of mdapo.types.Message"
        if not isinstance(found.messages, list | tuple):
            raise self._wrong("observe()", found.messages, wanted)
        return Observation(self._messages("observe()", found.messages, wanted, _OBSERVED), found.end)

    def _messages(self, call: str, found: Sequence[Any], wanted: str, roles: Sequence[str]) -> tuple[Message, ...]:
        for message in found:
            if not isinstance(message, Message):
                raise self._wrong(call, message, wanted, inside=True)
            if message.role not in roles:
                raise self._wrong(call, message, f"messages of role {', '.join(roles)}", inside=True)
            if not isinstance(message.content, str):
                raise self._wrong(call, message.content, "messages whose content is text", inside=True)
            if not _encodes(message.content):
                raise self._wrong(call, message.content, "text without lone surrogates (valid UTF-8)", inside=True)
        return tuple(found)

    def _wrong(self, call: str, found: object, wanted: str, *, inside: bool = False) -> UserError:
        shown = shortened(ascii(found), limit=100)
        kind = "" if found is None else f" ({type(found).__name__})"
        where = " among its messages" if inside else ""
        return UserError(f"environment.name={self._name}: {call} returned {shown}{kind}{where}; expected {wanted}")


class _CheckedResumable(_Checked):
    def resume(self, messages: Sequence[Message]) -> None:
        _unless_it_ends_all(self._name, "resume()", lambda: self._inner.resume(messages))


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unless_it_ends_all(name: str, call: str, work: Callable[[], T]) -> T:
    """``work()``; an exit of the plug-in is no end of the run, let alone a good one, nor is a cancellation of its own a
    signal to stop."""
    try:
        return work()
    except Exception:
        raise
    except BaseException as error:  # signals reach the main thread, plug-ins run in others
        what = f"called sys.exit({error.code})" if isinstance(error, SystemExit) else f"raised {type(error).__name__}"
        raise UserError(f"environment.name={name}: {call} {what}") from error
