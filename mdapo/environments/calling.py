"""Make a configured environment and hold it to its contract: what it may return is checked where it returns it.

What an environment *raises* may be its network's fault and is the caller's to judge. What it *returns* wrongly is a bug
of the plug-in, and so is what it raises that is no ``Exception`` (``sys.exit``, a leaked cancellation), which would be
taken for the run's own: one ``UserError`` with its name.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from mdapo import plugins
from mdapo.config.schema import EnvironmentCfg, Plugin
from mdapo.environments import BUILTIN
from mdapo.environments.aside import Aside, Pace
from mdapo.environments.base import Environment, EnvironmentFactory, Observation, Resumable, Tools
from mdapo.environments.json_schema import declaration_problems
from mdapo.errors import UserError, shortened
from mdapo.types import EndReason, Message, Prompt, Role

T = TypeVar("T")
_OBSERVED = ("system", "user", "tool")  # the policy alone speaks as the assistant; a prompt may show it doing so


@dataclass(frozen=True)
class Opening:
    """What stands before the first turn: messages, and the functions that the policy may call."""

    messages: tuple[Message, ...]
    tools: Tools = ()


class Environments:
    """Makes checked environments, ``(prompt, seed=...)``, all of one kind. ``pace``: how their calls are waited for."""

    def __init__(self, name: str, make: Callable[..., Any], pace: Pace) -> None:
        self.name, self.pace, self._make = name, pace, make

    def __call__(self, prompt: Prompt, *, seed: int) -> Environment:
        made = _unless_it_ends_all(self.name, "the constructor", lambda: self._make(prompt, seed=seed))
        return (_CheckedResumable if isinstance(made, Resumable) else _Checked)(made, self.name)

    def calls(self, cfg: EnvironmentCfg) -> Aside:
        """Where their calls run, with the configured deadline and bound."""
        return Aside(pace=self.pace, timeout_s=cfg.timeout_s, max_running=cfg.max_running)

    def close(self) -> None:
        """Ends what they share."""
        if (close := getattr(self._make, "close", None)) is not None:
            close()


def load_environment(cfg: Plugin) -> Environments:
    """``UserError``: no such plug-in, arguments it does not take, or that it refuses."""
    factory: Any = plugins.load(cfg.name, builtin=BUILTIN)
    shares = hasattr(factory, "for_run")
    called, required = (factory.for_run, ()) if shares else (factory, ("prompt", "seed"))
    plugins.check_signature(called, name=cfg.name, required=required, args=cfg.args)
    waits = getattr(factory, "waits", False) or inspect.iscoroutinefunction(getattr(factory, "observe", None))
    own = BUILTIN.get(cfg.name, cfg.name).startswith("mdapo.")
    make: Callable[..., Any]
    if shares:
        try:
            make = _unless_it_ends_all(cfg.name, "for_run()", lambda: factory.for_run(**cfg.args))
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"environment.args: {cfg.name}: {error}") from error
        waits = waits or getattr(make, "waits", False)
    else:
        make = _Bound(factory, cfg.args)
    return Environments(cfg.name, make, "waits" if waits else "inline" if own else "quick")


@dataclass(frozen=True)
class _Bound:
    """A factory with its configured arguments."""

    factory: Callable[..., Any]
    args: dict[str, Any]

    def __call__(self, prompt: Prompt, *, seed: int) -> Any:
        return self.factory(prompt, seed=seed, **self.args)


async def openings_of(
    factory: EnvironmentFactory, name: str, prompts: Sequence[Prompt], *, seed: int, calls: Aside, timeout_s: float
) -> list[Opening]:
    """What stands before the first turn to each row. ``UserError`` with environment and row, the first such, when it
    refuses the row or has not answered after ``timeout_s`` (``rollout.episode_timeout_s``)."""
    found: dict[int, Opening] = {}
    failed: dict[int, UserError] = {}
    rows = iter(enumerate(prompts))

    async def some() -> None:
        for i, prompt in rows:  # the next row that nobody has taken
            try:
                found[i] = await _opening_of(factory, name, prompt, seed=seed, calls=calls, timeout_s=timeout_s)
            except UserError as error:
                failed[i] = error
            if failed:
                return
            await asyncio.sleep(0)  # where a signal can end it

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(calls.max_running, len(prompts))):
            tasks.create_task(some())
    if failed:
        raise failed[min(failed)]
    return [found[i] for i in range(len(prompts))]


async def _opening_of(
    factory: EnvironmentFactory, name: str, prompt: Prompt, *, seed: int, calls: Aside, timeout_s: float
) -> Opening:
    def open_it() -> Opening:
        env = factory(prompt, seed=seed)
        return Opening(tuple(env.opening()), tuple(getattr(env, "tools", ())))

    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await calls.call(open_it)
    except UserError:
        raise
    except Exception as error:
        if deadline.expired():
            limit = f"{timeout_s:g} s (rollout.episode_timeout_s)"
            raise UserError(f"environment.name={name}: {prompt.uid}: no opening after {limit}") from error
        what = str(error) if isinstance(error, ValueError) and str(error) else f"{type(error).__name__}: {error}"
        raise UserError(f"environment.name={name}: refuses {prompt.uid}: {shortened(what)}") from error


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

    @property
    def tools(self) -> Tools:
        found = getattr(self._inner, "tools", ())
        if not isinstance(found, list | tuple):
            raise self._wrong("tools", found, "a sequence of declarations")
        for tool in found:
            if problems := declaration_problems(tool):
                raise UserError(f"environment.name={self._name}: tools: {shortened('; '.join(problems))}")
        return tuple(found)

    def observe(self, messages: Sequence[Message]) -> Observation | Awaitable[Observation]:
        if inspect.iscoroutinefunction(self._inner.observe):  # called when it is waited for: it may never be
            return self._observe_later(lambda: self._inner.observe(messages))
        found = _unless_it_ends_all(self._name, "observe()", lambda: self._inner.observe(messages))
        return self._observe_later(lambda: found) if inspect.iscoroutine(found) else self._observed(found)

    async def _observe_later(self, work: Callable[[], Awaitable[Any]]) -> Observation:
        return self._observed(await _later_unless_it_ends_all(self._name, "observe()", work))

    def _observed(self, found: Any) -> Observation:
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
    def resume(self, messages: Sequence[Message]) -> Awaitable[None] | None:
        if inspect.iscoroutinefunction(self._inner.resume):
            return self._resume_later(lambda: self._inner.resume(messages))
        found = _unless_it_ends_all(self._name, "resume()", lambda: self._inner.resume(messages))
        return self._resume_later(lambda: found) if inspect.iscoroutine(found) else self._resumed(found)

    async def _resume_later(self, work: Callable[[], Awaitable[Any]]) -> None:
        self._resumed(await _later_unless_it_ends_all(self._name, "resume()", work))

    def _resumed(self, found: Any) -> None:
        if found is not None:
            raise self._wrong("resume()", found, "None (what cannot be resumed raises)")


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
        raise _exit_of(name, call, error) from error


async def _later_unless_it_ends_all(name: str, call: str, work: Callable[[], Awaitable[Any]]) -> Any:
    """As ``_unless_it_ends_all``, of a coroutine."""
    try:
        return await work()
    except Exception:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # its deadline's, not its own
        raise _exit_of(name, call, error) from error
    except BaseException as error:
        raise _exit_of(name, call, error) from error


def _exit_of(name: str, call: str, error: BaseException) -> UserError:
    what = f"called sys.exit({error.code})" if isinstance(error, SystemExit) else f"raised {type(error).__name__}"
    return UserError(f"environment.name={name}: {call} {what}")
