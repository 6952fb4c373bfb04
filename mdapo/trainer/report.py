"""What a run is made of, said once at its start: device, attention, ops, engine, layout, the arithmetic of a batch."""

from __future__ import annotations

import os
from importlib import metadata
from typing import TYPE_CHECKING

import torch

import mdapo
from mdapo import device
from mdapo.config.model_facts import read_model
from mdapo.config.plan import plan
from mdapo.config.problems import lines
from mdapo.config.render import render_plan
from mdapo.errors import UserError
from mdapo.ops import registry

if TYPE_CHECKING:
    from mdapo.config.load import Loaded
    from mdapo.trainer.flow import Trainer

# Attention over packed segments (megatron/attention.py), by device.
ATTENTION = {
    "cpu": "torch's scaled_dot_product_attention, segment by segment",
    "cuda": "torch's varlen_attn; in float32 scaled_dot_product_attention, segment by segment",
    "npu": "npu_fusion_attention, TND",
}
Rows = list[tuple[str, str]]


def parts() -> Rows:
    """Versions, device, attention and ops of this process, as label and value."""
    here = device.current()
    names = ("torch", "megatron-core", "transformers")
    versions = [f"mdapo {mdapo.__version__}", *(f"{name} {metadata.version(name)}" for name in names)]
    count = torch.get_num_threads()
    memory = here.memory_bytes()["total"] / 2**30
    threads = f", {count} thread{'s' * (count > 1)} a rank" if here.kind == "cpu" else ""
    return [
        ("versions", ", ".join(versions)),
        ("device", f"{here.torch_device}, {memory:.0f} GiB, collectives over {here.backend}{threads}"),
        ("attention", ATTENTION[here.kind]),
        ("ops", registry.summary()),
    ]


def startup_report(t: Trainer) -> str:
    """One block of text; the same plan that ``mdapo check`` shows, for the ranks there are."""
    model, _ = read_model(t.config.model.path)
    found = plan(t.config, world_size=t.layout.world, model=model, device_bytes=rank_bytes)
    engine = t.engine.description if t.engine is not None else "none, recorded groups are trained on"
    rows = [*parts(), ("engine", engine)]
    if t.config.debug.mode != "full":
        rows.append(("debug.mode", t.config.debug.mode))
    return f"parts\n{aligned(rows)}\n\n{render_plan(found, t.config, model)}\n"


def rank_bytes(_: int) -> int:
    """Of memory for this rank; torchrun says how many there are on this machine."""
    return device.current().rank_bytes(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def memory_cap(loaded: Loaded, *, world: int) -> int | None:
    """Tokens of the largest micro-batch that adaptive lengths may grow to here. ``UserError`` when the longest sample
    does not fit into it."""
    config = loaded.config
    if not config.rollout.adaptive_lengths.enable:
        return None
    model, _ = read_model(config.model.path)
    found = plan(config, world_size=world, model=model, device_bytes=rank_bytes)
    if found.problems:
        raise UserError(lines(found.problems, loaded.sources))
    return found.token_cap


def aligned(rows: Rows) -> str:
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"  {label:{width}}  {value}" for label, value in rows)
