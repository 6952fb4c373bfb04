"""``mdapo doctor``: what this machine has for mdapo, without a configuration. It reports; it judges nothing."""

from __future__ import annotations

import os

from mdapo.ops import registry
from mdapo.tracking.environment import describe_environment
from mdapo.trainer.report import aligned, parts
from mdapo.trainer.servers_report import sglang_rows

# What mdapo and torch read from the environment.
VARIABLES = ("MDAPO_DEVICE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
VARIABLES += ("ASCEND_RT_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "MDAPO_OPS", "MDAPO_REQUIRE_NATIVE")


def doctor() -> str:
    """Sections of ``label  value`` lines. Raises ``UserError`` when ``MDAPO_DEVICE`` asks for what is not there."""
    found = describe_environment()
    hardware = found["hardware"]
    machine = [
        ("platform", found["platform"]),
        ("cpu", f"{hardware['cpu']}, {hardware['cores']} cores for this process"),
        ("memory", f"{hardware['memory_gib']} GiB"),
    ]
    packages = [("python", found["python"]), *found["packages"].items(), ("git", found["git"] or "not a checkout")]
    variables = [(name, os.environ.get(name, "not set")) for name in VARIABLES]
    sections = {"machine": machine, "parts": parts(), "ops": _ops(), "sglang": sglang_rows(), "packages": packages}
    sections |= {"environment": variables}
    return "\n\n".join(f"{title}\n{aligned(rows)}" for title, rows in sections.items())


def _ops() -> list[tuple[str, str]]:
    """Each op with its kernels, and why a backend's library is not in use."""
    ops = registry.native_backends()
    rows = [(op, f"native on {', '.join(kinds)}" if kinds else "reference (plain torch)") for op, kinds in ops.items()]
    return rows + [(f"{kind} library", why or "loaded") for kind, why in registry.LIBRARIES.items()]
