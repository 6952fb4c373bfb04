"""A server that keeps weights as SGLang does, as far as a sync sees it: reads safetensors folders, gives rows back,
has a version, counts what it was asked. It ends the test where the real one would end its process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mdapo.config.model_facts import ModelFacts
from mdapo.rollout.engine import EngineError

MODEL = ModelFacts(
    "LlamaForCausalLM", layers=1, hidden=8, ffn=12, heads=2, kv_heads=1, head_dim=4, vocab=40, max_positions=64,
    tied=True, dtype="float32", qkv_bias=False, qk_norm=False,
)  # fmt: skip
SHAPES = MODEL.weight_shapes()
NBYTES = 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
    for i, (name, shape) in enumerate(SHAPES.items()):
        yield name, torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + i)).to(dtype)


@dataclass(frozen=True)
class Info:
    version: str


class RecordingServer:
    """``refuse``: raises or changes the answer to a path; it may raise ``EngineError`` as a client would."""

    def __init__(self, url: str = "http://server", *, stores: torch.dtype = torch.float32) -> None:
        self.url, self.stores = url, stores
        self.version = "default"
        self.held: dict[str, Tensor] = {}
        self.times: dict[str, int] = {}
        self.asked: list[tuple[str, Any]] = []
        self.paused = False
        self.away: set[str] = set()
        self.refuse: Callable[[str, Any], None] = lambda path, body: None
        self.busy = 0  # flushes that find a request running

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    async def info(self, *, deadline_s: float) -> Info:
        self.refuse("/model_info", None)
        return Info(self.version)

    async def flush_cache(self, *, deadline_s: float) -> None:
        self.asked.append(("/flush_cache", None))
        if self.busy:
            self.busy -= 1
            raise EngineError(f"{self.url}: requests are running")

    async def post(self, path: str, body: Any, *, deadline_s: float) -> Any:
        self.asked.append((path, body))
        self.refuse(path, body)
        return getattr(self, "_" + path.removeprefix("/"))(body)

    def _pause_generation(self, body: Any) -> Any:
        assert body == {"mode": "abort"}
        self.paused = True

    def _continue_generation(self, body: Any) -> Any:
        self.paused = False

    def _update_weight_version(self, body: Any) -> Any:
        assert body["abort_all_requests"] is False
        self.version = body["new_version"]
        return {"success": True, "message": "", "new_version": self.version}

    def _update_weights_from_disk(self, body: Any) -> Any:
        assert self.paused, "a request could begin between two buckets"
        assert "weights" not in self.away, "there is no memory to write into"
        assert body["flush_cache"] is False, "a server that is not idle would end itself"
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        assert files
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  safe_open is no mapping
                    self.held[name] = opened.get_tensor(name).to(self.stores, copy=True)
                    self.times[name] = self.times.get(name, 0) + 1
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def _get_weights_by_name(self, body: Any) -> Any:
        return self.held[body["name"]].float().tolist()[: body["truncate_size"]]

    def _release_memory_occupation(self, body: Any) -> Any:
        assert self.paused and self.paths()[-2] == "/flush_cache", "only an idle server releases its memory"
        self.away |= set(body["tags"])

    def _resume_memory_occupation(self, body: Any) -> Any:
        assert set(body["tags"]) <= self.away, "SGLang ends itself here"
        self.away -= set(body["tags"])
