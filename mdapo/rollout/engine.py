"""The engine protocol: token ids in, token ids and log-probs out, with the weight version that made them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SamplingParams:
    """How one turn is sampled. Log-probs are those of the distribution at ``temperature`` before top-p/top-k cuts."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy (log-probs then at temperature 1)
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    stop_ids: tuple[int, ...] = ()  # a stop token stays in the output
    ignore_eos: bool = False


@dataclass(frozen=True)
class Request:
    """One turn to generate. ``session`` names the dialogue (keeps its KV cache over turns) and ``group`` the dialogues
    that share a prompt prefix; ``seed`` makes the turn's tokens independent of what else is in the batch, up to
    rounding."""

    ids: Sequence[int]
    params: SamplingParams
    session: str
    group: str
    seed: int


@dataclass(frozen=True)
class Completion:
    ids: tuple[int, ...]
    logps: tuple[float, ...]
    finish: str  # "stop" | "length" | "abort"
    version: int  # weight version of every token
    cached_tokens: int = 0  # prompt tokens not computed again


class Engine(Protocol):
    """What trainer and episodes need from an engine; implemented in-process (local) and over HTTP (SGLang)."""

    @property
    def version(self) -> int:
        """Of the weights that it has."""
        ...

    @property
    def description(self) -> str:
        """One line for the start of a run: what was chosen."""
        ...

    @property
    def lost(self) -> str:
        """Why no answer can be had any more, or not before new weights; empty while there may be one."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Raise ``EngineError`` when no answer can be had within the engine's deadline."""
        ...

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace all weights, by Hugging Face name, streamed; the engine answers with ``version`` from then on."""
        ...

    async def abort(self, session: str | None = None) -> None:
        """End the running requests of one dialogue, or all, with ``finish == "abort"`` and the tokens written so far;
        drops their caches. A request that comes later is not touched."""
        ...

    async def release(self, session: str) -> None:
        """The dialogue is over: its KV cache may go."""
        ...

    def metrics(self) -> dict[str, float]:
        """``engine/...`` numbers of what happened since the last call; none where there is nothing to say."""
        ...

    async def close(self) -> None: ...


class EngineError(RuntimeError):
    """The engine could not answer (dead, timed out, refused): infrastructure, never a property of the sample."""
