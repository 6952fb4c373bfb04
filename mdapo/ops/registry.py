"""Which backend serves each op: defines the ops for torch, loads the compiled libraries that are there, and says so.

An op is defined once, in Python: schema, plain-torch reference, fake and gradient. A library (csrc/) only adds kernels
for its own dispatch key, so that every op works without any build, on every device. ``MDAPO_OPS=reference`` loads no
library; ``MDAPO_REQUIRE_NATIVE=1`` makes a reference that would serve an error. Importing this touches no device.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import mdapo.ops
from mdapo.errors import UserError

NATIVE = Path(__file__).resolve().parent.parent / "_native"
KEYS = {"cpu": "CPU", "cuda": "CUDA", "npu": "PrivateUse1"}
BUILD = "build with `python csrc/compile.py` (csrc/README.md)"

# Name -> the plain-torch reference, for all ops of the pages imported so far.
REFERENCES: dict[str, Callable[..., Any]] = {}
# Backend -> why its library was not loaded; empty where it was.
LIBRARIES: dict[str, str] = {}


def define(
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> None:
    """Define ``mdapo::<schema>``, as in ``"double(Tensor x) -> Tensor"``.

    ``reference`` computes it in plain torch on any device, ``fake`` gives the outputs' shapes, ``backward`` and
    ``setup_context`` are those of `torch.library.register_autograd`.
    """
    name = schema.partition("(")[0].strip()
    torch.library.define(f"mdapo::{name}", schema[len(name) :])
    serving = _refuse(name) if os.environ.get("MDAPO_REQUIRE_NATIVE") == "1" else reference
    torch.library.impl(f"mdapo::{name}", "CompositeExplicitAutograd", serving)
    torch.library.register_fake(f"mdapo::{name}", fake)
    if backward is not None:
        torch.library.register_autograd(f"mdapo::{name}", backward, setup_context=setup_context)
    REFERENCES[name] = reference


def native_backends() -> Mapping[str, tuple[str, ...]]:
    """Op -> the backends that have a kernel of their own for it, over all ops of ``mdapo.ops``."""
    for page in pkgutil.iter_modules(mdapo.ops.__path__, "mdapo.ops."):
        importlib.import_module(page.name)
    return {name: tuple(kind for kind, key in KEYS.items() if _has_kernel(name, key)) for name in sorted(REFERENCES)}


def summary() -> str:
    """One line: ``native on cpu: pack, unpack; reference: balance``."""
    groups: dict[str, list[str]] = {}
    for name, kinds in native_backends().items():
        groups.setdefault(f"native on {', '.join(kinds)}" if kinds else "reference", []).append(name)
    return "; ".join(f"{how}: {', '.join(names)}" for how, names in sorted(groups.items()))


def load() -> None:
    """Load the libraries that this process can use, once. Raises ``UserError`` on contradicting variables."""
    ops, require = os.environ.get("MDAPO_OPS", "auto"), os.environ.get("MDAPO_REQUIRE_NATIVE", "0")
    if ops not in ("auto", "reference"):
        raise UserError(f"MDAPO_OPS={ops}: use auto or reference")
    if ops == "reference" and require == "1":
        raise UserError("MDAPO_OPS=reference and MDAPO_REQUIRE_NATIVE=1 exclude each other: unset one")
    for kind in KEYS:
        LIBRARIES[kind] = "MDAPO_OPS=reference" if ops == "reference" else _load(kind)


def _load(kind: str) -> str:
    path = NATIVE / f"mdapo_{kind}.so"
    if not path.exists():
        return f"not built: {BUILD}"
    # A library for a device needs that device's torch in the process, but no device.
    if kind == "cuda" and torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA"
    if kind == "npu" and "torch_npu" not in sys.modules:
        return "torch_npu is not imported"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"cannot be loaded ({error}): {BUILD}"
    return ""


def _has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"mdapo::{name}", key)


def _refuse(name: str) -> Callable[..., Any]:
    def no_kernel(*args: Any) -> Any:
        reasons = "; ".join(f"{kind}: {why}" for kind, why in LIBRARIES.items() if why)
        raise UserError(f"MDAPO_REQUIRE_NATIVE=1: mdapo::{name} has no kernel for this device ({reasons})")

    return no_kernel


load()
