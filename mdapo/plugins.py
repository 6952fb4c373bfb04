"""A plug-in by name: a built-in's short name, ``pkg.mod:name`` or ``path/file.py:name``; its signature is checked."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from mdapo.config.paths import why_no_file
from mdapo.errors import UserError, shortened


def load(
    name: str, *, builtin: Mapping[str, str], required: Sequence[str] = (), args: Collection[str] | None = None
) -> Callable[..., Any]:
    """The callable that ``name`` stands for. ``builtin`` maps short names to ``pkg.mod:name``.

    ``required`` are the parameters it is called with by keyword; ``args`` those that the configuration adds (None: not
    known yet). ``UserError`` when there is no such plug-in, its module cannot be imported (with file and line), it is
    not callable, or it cannot be called so.
    """
    target = builtin.get(name, name)
    source, colon, attribute = target.rpartition(":")
    if not colon or not source or not attribute.isidentifier():
        near = difflib.get_close_matches(name, builtin, n=1)
        meant = f", did you mean {near[0]}?" if near else f"; built-in are {', '.join(sorted(builtin)) or 'none'}"
        raise UserError(f"plug-in {name!r}: neither built-in nor pkg.mod:name nor file.py:name{meant}")
    module = _import(source, name=name)
    found = getattr(module, attribute, None)
    if found is None:
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        meant = f", did you mean {near[0]}?" if near else ""
        raise UserError(f"plug-in {name!r}: its module has no {attribute}{meant}")
    if not callable(found):
        raise UserError(f"plug-in {name!r}: must be a class or a function, not {type(found).__name__}")
    check_signature(found, name=name, required=required, args=args)
    return found


def _import(source: str, *, name: str) -> ModuleType:
    """Anything may happen while another's module is imported: all of it becomes one message."""
    if source.endswith(".py") and (why := why_no_file(source)):
        raise UserError(f"plug-in {name!r}: {why}")
    try:
        return _from_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except SystemExit as error:
        raise UserError(
            f"plug-in {name!r}: {_where(error, source)}: called sys.exit({error.code}) on import"
        ) from error
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and (source + ".").startswith(error.name + "."):
            raise UserError(
                f"plug-in {name!r}: no module {error.name!r} (looked in {', '.join(sys.path[:3])} …)"
            ) from error
        what = error.msg if isinstance(error, SyntaxError) else str(error)  # else it says the file and line again
        what = f"{type(error).__name__}: {shortened(what)}"
        raise UserError(f"plug-in {name!r}: {_where(error, source)}: {what}") from error


def _from_file(path: Path) -> ModuleType:
    """Import a file under a name of its own, once; files of the same name in different folders do not meet."""
    path = path.resolve()
    module_name = f"mdapo_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _where(error: BaseException, source: str) -> str:
    """File and line that a person can open: of a syntax error, or the innermost line outside of Python itself; the line
    alone in the plug-in's own file, which the message has named."""
    if isinstance(error, SyntaxError) and error.filename:
        return _place(error.filename, error.lineno, source)
    library = str(Path(importlib.__file__).parent.parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename[:1] != "<" and f.filename != __file__]
    outside = [f for f in frames if not f.filename.startswith(library) or "site-packages" in f.filename]
    return _place(outside[-1].filename, outside[-1].lineno, source) if outside else "on import"


def _place(file: str, line: int | None, source: str) -> str:
    return f"line {line}" if Path(file) == Path(source).resolve() else f"{file}:{line}"


def check_signature(
    found: Callable[..., Any], *, name: str, required: Sequence[str], args: Collection[str] | None
) -> None:
    """``UserError`` when ``found``, loaded by ``name``, cannot be called with these keywords; see `load`."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return  # some callables written in C tell nothing; the first call will
    by_name = {p.name: p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    problems = []
    missing = [] if takes_any else [r for r in required if r not in by_name]
    if missing:
        problems.append(f"is called with {', '.join(required)}; it lacks {', '.join(missing)}")
    for arg in () if takes_any or args is None else args:
        if arg not in by_name:
            near = difflib.get_close_matches(arg, by_name, n=1)
            problems.append(f"has no argument {arg}" + (f", did you mean {near[0]}?" if near else ""))
    if args is not None:
        given = {*required, *args}
        needed = [n for n, p in by_name.items() if p.default is p.empty and n not in given]
        problems += [f"needs the argument {n}" for n in needed]
    if problems:
        raise UserError([f"plug-in {name!r}: {p} (its signature: {signature})" for p in problems])
