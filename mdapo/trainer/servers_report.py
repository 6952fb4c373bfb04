"""What is known of SGLang and its servers before any of them runs, as label and value; for ``check`` and ``doctor``."""

from __future__ import annotations

import os
from pathlib import Path

from mdapo.config.model_facts import ModelFacts
from mdapo.config.placement import colocated, server_devices, server_group, sglang_version, starts_servers
from mdapo.config.render import count, size
from mdapo.config.schema import Config
from mdapo.sync.build import FOLDER, chosen_mode
from mdapo.sync.compare import allowed_gap
from mdapo.trainer.engines import servers_on, visible_devices

Rows = list[tuple[str, str]]
ENVIRONMENT = "MDAPO_SGLANG_ENV"  # that scripts/install_sglang_cpu.sh, and the quickstart, look at
BYTES = {"float32": 4, "bfloat16": 2}
LOOPBACK = "http://127.0.0.1"  # of servers that mdapo starts
WAYS = {
    "tensor": "shared memory",
    "distributed": "broadcast, each byte once to all servers",
    "disk": "safetensors in {folder}",
}


def server_rows(config: Config, model: ModelFacts) -> Rows:
    """Of a run with SGLang servers. ``UserError``: devices that are not there, a server that there is no way to."""
    rollout, sync = config.rollout, config.sync
    if starts_servers(config):
        rows = [("SGLang", f"{sglang_version(rollout.server_python)}, {rollout.server_python or 'beside mdapo'}")]
        rows.append(("servers", _placed(config)))
    else:
        router = f" behind the router {rollout.router}" if rollout.router is not None else ""
        rows = [("servers", f"{', '.join(rollout.urls)}{router}: running already, of others")]
    mode = chosen_mode(config, rollout.urls or [LOOPBACK])
    way = WAYS[mode].format(folder=sync.dir or Path(config.run.dir, config.run.name, FOLDER))
    whole = size(model.parameters * BYTES[config.model.dtype])
    how = f"{mode}{'' if sync.mode else ' (chosen)'}: {way}"
    rows.append(("sync", f"{how}; {whole} ({count(model.parameters)} parameters) in buckets of {sync.bucket_mb} MiB"))
    if sync.check:
        rows.append(("sync.check", f"after each sync, log-probs within {allowed_gap(config):g} of the actor's"))
    return rows


def _placed(config: Config) -> str:
    kind, group = servers_on(config), server_group(config)
    devices = server_devices(config, kind=kind, visible=visible_devices(kind))
    what = f"{len(devices)} on {kind}"
    if kind != "cpu":
        what += " " + ", ".join("+".join(map(str, one)) for one in devices)
    if not colocated(config):
        return f"{what}, apart from the actor ({group.name if group is not None else 'all devices'})"
    turns = "they share its cores" if kind == "cpu" else "they take turns: memory is given back while it trains"
    return f"{what}, beside the actor: {turns}"


def sglang_rows() -> Rows:
    """Of this machine: which Python has SGLang, of those that a run would find without ``rollout.server_python``."""
    rows = []
    folder = os.environ.get(ENVIRONMENT)
    own = str(Path(folder, "bin", "python")) if folder else None
    for label, python in (("beside mdapo", None), (ENVIRONMENT, own)):
        if label == ENVIRONMENT and python is None:
            rows.append((label, "not set"))
            continue
        try:
            rows.append((label, f"SGLang {sglang_version(python)}{f', {python}' if python else ''}"))
        except LookupError as error:
            rows.append((label, "no SGLang" if python is None else error.args[0]))
    return rows
