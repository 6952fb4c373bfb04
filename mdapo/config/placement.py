"""Which devices the actor's ranks and the servers that mdapo starts run on: rules, and the arithmetic of ``placement``.

Numbers of devices are those that the job sees (``CUDA_VISIBLE_DEVICES`` and its like count from 0 again). With
``torchrun`` over several machines ``placement.actor`` holds on each, and servers run on the first.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata

from mdapo.config.problems import Problem, either
from mdapo.config.schema import Config, DeviceGroup
from mdapo.errors import UserError, shortened

# Options that mdapo says itself, by all names that SGLang has for them, and what to set instead.
OWN_OPTIONS = {
    **dict.fromkeys(("model-path", "model"), "set model.path"),
    **dict.fromkeys(("tp-size", "tensor-parallel-size", "tp"), "set rollout.tp"),
    **dict.fromkeys(("device",), "set placement.groups"),
    **dict.fromkeys(("host", "port", "nccl-port"), "servers listen on 127.0.0.1, on ports chosen free"),
    **dict.fromkeys(("api-key", "admin-api-key"), "each server gets a random key, kept out of command lines and logs"),
    **dict.fromkeys(("tokenizer-worker-num", "grpc-mode", "smg-grpc-mode"), "SGLang checks no key with it"),
    **dict.fromkeys(("nnodes", "node-rank", "dist-init-addr"), "a server lies on one machine; start others yourself"),
    **dict.fromkeys(("config",), "give its options themselves"),
    **dict.fromkeys(("ssl-keyfile", "ssl-certfile"), "nothing leaves the machine; start others yourself"),
}
COLLECTIVES = {"cuda": "NCCL", "npu": "HCCL"}
START_S = 60.0  # for a Python interpreter to say what it has; a cold network drive takes a while


def placement_rules(config: Config) -> Iterator[Problem]:
    """What contradicts itself in ``placement`` and the server keys of ``rollout``."""
    yield from _groups(config)
    yield from _servers(config)
    kinds = (group.device for group in (server_group(config), actor_group(config)) if group is not None)
    yield from sharing_problems(config, next((kind for kind in kinds if kind is not None), None))
    for name in config.rollout.engine_args:
        if (why := OWN_OPTIONS.get(name.replace("_", "-").lower())) is not None:
            yield Problem(f"rollout.engine_args.{name}", f"is not to be given: {why}")


def sharing_problems(config: Config, kind: str | None) -> Iterator[Problem]:
    """What servers cannot do on the actor's own devices, which are of ``kind``; None: not known yet."""
    if not starts_servers(config) or not colocated(config) or kind is None or kind == "cpu":
        return
    shared = f"the servers that mdapo starts share the actor's {kind} devices"
    keys = ("placement.rollout", "placement.groups", "rollout.engine")
    if config.sync.mode == "distributed":
        text = f"distributed cannot be: {shared}, and {COLLECTIVES[kind]} has no two ranks on one"
        yield Problem("sync.mode", f"{text}; set tensor, or give them a group of their own", keys)
    if config.rollout.mode == "async":
        text = f"async lets servers work while the actor trains, but {shared}"
        yield Problem("rollout.mode", f"{text}; set sync or partial, or give them a group of their own", keys)


def starts_servers(config: Config) -> bool:
    """Whether mdapo starts servers for this run."""
    return config.rollout.engine == "sglang" and not config.rollout.urls


def group_of(config: Config, name: str | None) -> DeviceGroup | None:
    return next((g for g in config.placement.groups if g.name == name), None)


def actor_group(config: Config) -> DeviceGroup | None:
    return group_of(config, config.placement.actor)


def server_group(config: Config) -> DeviceGroup | None:
    """The servers' devices; the actor's when none is named: colocated."""
    return group_of(config, config.placement.rollout or config.placement.actor)


def colocated(config: Config) -> bool:
    """Whether servers that mdapo starts share the actor's devices, and so release memory between phases."""
    actor, servers = actor_group(config), server_group(config)
    return servers is None or (_of_one_kind(actor, servers) and _ids(actor) == _ids(servers))


def _of_one_kind(actor: DeviceGroup | None, servers: DeviceGroup) -> bool:
    """Where no kind is named it is the machine's accelerator, or its CPU, where sharing matters little."""
    kinds = {group.device if group is not None else None for group in (actor, servers)}
    return len(kinds) == 1 or (None in kinds and "cpu" not in kinds)


def _ids(group: DeviceGroup | None) -> set[int]:
    """Empty: all there are."""
    return set(group.ids) if group is not None else set()


def actor_environment(config: Config) -> dict[str, str]:
    """What a rank's process must have set before it asks for its device (``mdapo/device``)."""
    group = actor_group(config)
    if group is None:
        return {}
    kind = {"MDAPO_DEVICE": group.device} if group.device is not None else {}
    return kind | ({"MDAPO_DEVICE_IDS": ",".join(map(str, group.ids))} if group.ids else {})


def server_devices(config: Config, *, kind: str, visible: int) -> list[tuple[int, ...]]:
    """The devices of each server that mdapo starts, in order; empty tuples on a CPU, which is shared.

    ``kind`` and ``visible``: the servers' kind of device, and how many of it the job sees. ``UserError`` when there are
    too few.
    """
    rollout, group = config.rollout, server_group(config)
    if kind == "cpu":
        return [()] * (rollout.num_servers or 1)
    ids = list(group.ids) if group is not None and group.ids else list(range(visible))
    beyond = [n for n in ids if n >= visible]
    count = rollout.num_servers or len(ids) // rollout.tp
    if beyond:
        raise UserError(
            f"placement.groups: there are {visible} {kind} devices, numbered from 0; {beyond} are not there"
        )
    if count * rollout.tp > len(ids) or not count:
        need = f"{max(count, 1)} servers x rollout.tp={rollout.tp}"
        raise UserError(f"rollout.num_servers: {need} need {max(count, 1) * rollout.tp} devices, there are {len(ids)}")
    return [tuple(ids[i * rollout.tp : (i + 1) * rollout.tp]) for i in range(count)]


def _groups(config: Config) -> Iterator[Problem]:
    placement = config.placement
    names = [g.name for g in placement.groups]
    for key, name in (("actor", placement.actor), ("rollout", placement.rollout)):
        if name is not None and name not in names:
            there = f"there is {either(names)}" if names else "there are none"
            yield Problem(
                f"placement.{key}", f"{name!r} is no group of placement.groups; {there}", ("placement.groups",)
            )
    for i, group in enumerate(placement.groups):
        key = f"placement.groups.{i}"
        if group.name in names[:i]:
            yield Problem(f"{key}.name", f"{group.name!r} is there twice")
        if group.name not in (placement.actor, placement.rollout):
            text = f"{group.name!r} is used by neither placement.actor nor placement.rollout"
            yield Problem(f"{key}.name", text, ("placement.actor", "placement.rollout"))
        if group.ids and group.device == "cpu":
            yield Problem(f"{key}.ids", "must be empty: a machine's CPU is one device")
        if len(set(group.ids)) < len(group.ids):
            yield Problem(f"{key}.ids", f"has a number twice: {group.ids}")
    actor, servers = actor_group(config), server_group(config)
    if servers is not None and _of_one_kind(actor, servers) and servers.device != "cpu":
        shared = _ids(actor) & _ids(servers)
        whole = not _ids(actor) or not _ids(servers)
        if _ids(actor) != _ids(servers) and (shared or whole):
            what = f"share devices {sorted(shared)}" if shared else "overlap: one of them has no ids, so all devices"
            text = f"actor and servers {what}, but not all; let them have the same ids, or none in common"
            yield Problem("placement.groups", text, ("placement.actor", "placement.rollout"))


def _servers(config: Config) -> Iterator[Problem]:
    rollout, placement = config.rollout, config.placement
    given = {
        "rollout.num_servers": rollout.num_servers is not None,
        "rollout.tp": rollout.tp != 1,
        "rollout.server_python": rollout.server_python is not None,
        "placement.rollout": placement.rollout is not None,
    }
    if not starts_servers(config):
        why = (
            "the local engine runs in the trainer" if rollout.engine == "local" else "rollout.urls are running already"
        )
        for key in (k for k, is_given in given.items() if is_given):
            yield Problem(key, f"is for SGLang servers that mdapo starts; {why}", ("rollout.engine", "rollout.urls"))
        return
    group = server_group(config)
    if group is None or not group.ids:
        return
    devices, tp = len(group.ids), rollout.tp
    if devices % tp:
        key = "rollout.tp"
        works = either(n for n in range(1, devices + 1) if devices % n == 0)
        yield Problem(
            key, f"{tp} does not divide the {devices} devices of the servers; set {works}", ("placement.groups",)
        )
    elif rollout.num_servers is not None and rollout.num_servers * tp != devices:
        text = f"{rollout.num_servers} x rollout.tp={tp} is not the servers' {devices} devices; set {devices // tp}"
        yield Problem("rollout.num_servers", text, ("rollout.tp", "placement.groups"))


def rank_problems(config: Config, *, world: int) -> Iterator[Problem]:
    """``placement.actor`` against the number of ranks: one drives one device."""
    group = actor_group(config)
    if group is not None and group.ids and world % len(group.ids):
        text = f"{len(group.ids)} devices do not divide {world} ranks; a rank drives one device"
        yield Problem("placement.actor", text, ("placement.groups",))


def server_python_problems(config: Config) -> Iterator[Problem]:
    """Whether ``rollout.server_python`` is a Python with SGLang in it; asks it, which takes a moment."""
    if not starts_servers(config):
        return
    try:
        sglang_version(config.rollout.server_python)
    except LookupError as error:
        text = f"{error.args[0]}; scripts/install_sglang_cpu.sh makes one for a CPU"
        yield Problem("rollout.server_python", text, ("rollout.engine",))


def sglang_version(python: str | None) -> str:
    """SGLang's version beside that interpreter (it is asked); None: beside this one. ``LookupError``: none there."""
    if python is None:
        if importlib.util.find_spec("sglang") is None:
            raise LookupError("is not set, and SGLang is not installed beside mdapo; name the Python that has it")
        return metadata.version("sglang")
    if os.sep not in python or not os.path.isfile(python) or not os.access(python, os.X_OK):
        found = "" if shutil.which(python) is None or os.sep in python else f"; give its path: {shutil.which(python)}"
        raise LookupError(f"is no program that can be started: {python}{found}")
    ask = "import importlib.metadata as m, json; print(json.dumps(m.version('sglang')))"
    try:
        said = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=START_S, check=True).stdout
        version = json.loads(said)
        if not isinstance(version, str):
            raise ValueError(said)
    except subprocess.TimeoutExpired:
        raise LookupError(f"said nothing within {START_S:.0f} s: {python}") from None
    except subprocess.CalledProcessError as error:
        last = shortened(error.stderr.strip().rsplit("\n", 1)[-1])
        raise LookupError(f"has no SGLang: {python} ({last})") from None
    except (OSError, ValueError):
        raise LookupError(f"is no Python interpreter: {python}") from None
    return version
