"""Test tooling: stands in for ``sgl_kernel``, SGLang's compiled kernels, whose wheels exist for GPUs only.

SGLang 0.5.19 imports names from it wherever it runs, and on a CPU, with torch's own attention and sampling, calls none
of them. So every name and every submodule imports, and a call says what was called: nothing here computes anything, and
nothing can silently come from here. SGLang asks whether ``sgl_kernel.scalar_type`` exists and does without it; it must
stay missing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import NoReturn

ABSENT = {"scalar_type"}


class _Missing:
    """One name of the real package: may be imported and passed around, not used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"{self._name} is a GPU kernel; on this CPU a stand-in of mdapo's tests has its place"
        )


def _named(module: str, name: str) -> _Missing:
    if name.startswith("__"):  # what the import system and inspect ask any module for
        raise AttributeError(name)
    if name in ABSENT:
        raise AttributeError(f"{module} stands in for GPU kernels and has no {name}")
    return _Missing(f"{module}.{name}")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes any submodule but the absent ones."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        parent, _, name = fullname.partition(".")
        if parent != __name__ or name in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        module.__dict__["__getattr__"] = lambda attribute: _named(name, attribute)


def __getattr__(name: str) -> _Missing:
    return _named(__name__, name)


sys.meta_path.append(_Submodules())
