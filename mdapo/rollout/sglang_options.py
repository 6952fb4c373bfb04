"""How one SGLang server is started: from the configuration to a command line, without the key."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mdapo.config.placement import colocated, server_devices, server_group

if TYPE_CHECKING:
    from mdapo.config.schema import Config

LAUNCH = Path(__file__).with_name("sglang_launch.py")
HOST = "127.0.0.1"
# A server takes prompts of at most context_length - 7 tokens, and prompt and turn of at most context_length - 2.
CONTEXT_MARGIN = 6
# What SGLang's CPU server computes with where its kernels for Intel AMX are missing; engine_args can say otherwise.
ON_CPU: Mapping[str, object] = {
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-overlap-schedule": True,
    "sleep-on-idle": True,  # a scheduler without work would keep a core busy, which the trainer needs
}
CPU_CACHE_TOKENS = 32768  # of the KV cache, else a share of the machine's memory, all of it touched
# torchrun's: with them SGLang would take its own process groups, and those of a weight update, for the trainer's.
_OF_A_RANK = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|MDAPO_\w+"
)
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


@dataclass(frozen=True)
class ServerOptions:
    """One server. ``devices`` are the numbers of those it may use, among the visible ones; empty: all."""

    model_path: str
    device: Literal["cpu", "cuda", "npu"] = "cpu"
    devices: tuple[int, ...] = ()
    tp: int = 1
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_context: int = 4096  # tokens of a dialogue
    max_running: int = 64  # dialogues
    python: str | None = None  # of SGLang's environment; None: this interpreter
    threads: int = 0  # CPU threads of a scheduler; 0: OpenMP's choice
    takes_turns: bool = False  # gives its memory back while the trainer computes on the same devices
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def command(self, port: int) -> list[str]:
        """SGLang's launch with all options; ``engine_args`` go in verbatim, and win over what mdapo would say."""
        options: dict[str, object] = {
            "model-path": self.model_path,
            "host": HOST,
            "port": port,
            "device": self.device,
            "tp-size": self.tp,
            "dtype": self.dtype,
            "context-length": self.max_context + CONTEXT_MARGIN,
            "max-running-requests": self.max_running,
            "log-level-http": "warning",  # no line a request
        }
        if self.takes_turns and self.device != "cpu":  # a CPU's memory is not given back
            options["enable-memory-saver"] = True
        if self.device == "cpu":
            room = self.max_context + CONTEXT_MARGIN
            tokens = max(room, min(CPU_CACHE_TOKENS, self.max_running * room))
            options |= {**ON_CPU, "max-total-tokens": tokens}
        options |= {name.replace("_", "-"): value for name, value in self.engine_args.items()}
        words = [word for name, value in options.items() for word in _words(name, value)]
        return [self.python or sys.executable, str(LAUNCH), *words]

    def environment(self) -> dict[str, str]:
        """The server's: this process's, less what makes it a rank under torchrun, with what SGLang is to know."""
        found = {name: value for name, value in os.environ.items() if not _OF_A_RANK.fullmatch(name)}
        beside = [found[name] for name in ("no_proxy", "NO_PROXY") if found.get(name)][:1]
        found |= {
            **dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join([*beside, HOST])),  # SGLang calls itself to warm up
            "HF_HUB_OFFLINE": "1",  # nothing is downloaded
            "TOKENIZERS_PARALLELISM": "false",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for CONTEXT_MARGIN, where the model has no more
        }
        if self.device == "cpu":
            found["SGLANG_USE_CPU_ENGINE"] = "1"
            found.pop("OMP_NUM_THREADS", None)  # of a rank, which shares its machine with others
            if self.threads:
                found["OMP_NUM_THREADS"] = str(self.threads)
        elif self.devices:
            name = VISIBLE[self.device]
            visible = os.environ[name].split(",") if os.environ.get(name) else [str(n) for n in range(1024)]
            found[name] = ",".join(visible[n] for n in self.devices)
        return found


def server_options(
    config: Config, *, here: Literal["cpu", "cuda", "npu"], visible: int, threads: int = 0
) -> list[ServerOptions]:
    """Each server that mdapo starts for this run.

    ``here`` is the kind of the trainer's own device, ``visible`` how many of the servers' kind the job sees;
    ``UserError`` when they are too few.
    """
    rollout, group = config.rollout, server_group(config)
    kind = here if group is None or group.device is None else group.device
    return [
        ServerOptions(
            model_path=config.model.path,
            device=kind,
            devices=devices,
            tp=rollout.tp,
            dtype=config.model.dtype,
            max_context=config.model.max_context,
            max_running=rollout.max_running,  # of each: when one dies, another takes over what it had
            python=rollout.server_python,
            threads=threads,
            takes_turns=colocated(config),
            engine_args=rollout.engine_args,
        )
        for devices in server_devices(config, kind=kind, visible=visible)
    ]


def _words(name: str, value: object) -> list[str]:
    """One option as words of a command line; a switch has no value, and one that is off is left out."""
    flag = f"--{name}"
    if value is True:
        return [flag]
    if value is False or value is None:
        return []
    if isinstance(value, list | tuple):
        return [flag, *(str(item) for item in value)]
    return [flag, json.dumps(value, allow_nan=False) if isinstance(value, dict) else str(value)]
