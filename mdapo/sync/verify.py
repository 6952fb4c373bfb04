"""Whether the servers hold what was sent: version number, and values of sampled tensors read back from them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from mdapo.rollout.engine import EngineError
from mdapo.sync.servers import Server

# SGLang's model classes that answer /get_weights_by_name; for the others only the version can be asked.
READABLE: Final = frozenset({"LlamaForCausalLM"})
# Tensors whose first rows a server can give back whatever its tensor parallelism and head size: those that are not
# fused, and the first of each fused matrix. With more than one rank the last two are gathered from all of them.
SURE: Final = ("layernorm.weight", "q_proj.weight", "gate_proj.weight", "o_proj.weight", "down_proj.weight")
LAST: Final = "model.norm.weight"  # the end of the stream, or nearly
# Of the last layer: their columns tell how many heads the server has, how wide its layers are, and that it has so many.
# SGLang cuts a matrix that is too large for it without a word.
TELLING: Final = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
# The server turns a whole tensor into a list of Python numbers before it cuts off the rows asked for: what has more
# elements costs it a second or so, and memory; of such matrices it is asked for one a sync, where there are any.
MOST_ELEMENTS: Final = 1 << 20
LARGEST: Final = 1 << 26
ROWS: Final = 2
SAMPLED: Final = 4
STORED_AS: Final = (torch.float32, torch.bfloat16, torch.float16)  # a server may keep another dtype than the actor's


@dataclass
class Expected:
    """What must come of a stream: every weight of ``shapes`` once, and the sampled values that ``values`` then holds.

    ``sampled``: names, chosen by a seed, so that over many syncs all are looked at.
    """

    shapes: Mapping[str, tuple[int, ...]]
    sampled: frozenset[str]
    values: dict[str, Tensor] = field(default_factory=dict)  # float32 [rows, columns] or [columns]

    @classmethod
    def choose(cls, shapes: Mapping[str, tuple[int, ...]], *, architecture: str, seed: int) -> Expected:
        """Sample ``SAMPLED`` weights, one of the large ones too, and always the last norm and the ``TELLING`` ones that
        are not large; none where the servers' model class gives nothing back."""
        if architecture not in READABLE:
            return cls(shapes, frozenset())
        sizes, rng = {name: torch.Size(shape).numel() for name, shape in shapes.items()}, random.Random(seed)
        small = {name for name, size in sizes.items() if size <= MOST_ELEMENTS}
        sure = sorted(name for name in small if name.endswith(SURE))
        large = sorted(name for name in shapes.keys() - small if name.endswith(SURE) and sizes[name] <= LARGEST)
        chosen = rng.sample(sure, min(SAMPLED, len(sure))) + rng.sample(large, min(1, len(large)))
        layers = [name.split(".")[2] for name in shapes if name.endswith(TELLING)]
        always = {LAST, *(f"model.layers.{max(layers, key=int)}.{part}" for part in TELLING if layers)}
        return cls(shapes, frozenset({*chosen, *(always & small)}))

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same stream; keeps the sampled values.

        Raises ``ValueError`` for a weight that the model does not have, has in another shape, or that never came.
        """
        missing = set(self.shapes)
        for name, tensor in weights:
            if tuple(tensor.shape) != self.shapes.get(name):
                raise ValueError(f"weight {name!r} {tuple(tensor.shape)}: this model has {self.shapes.get(name)}")
            missing.discard(name)
            if name in self.sampled:
                rows = tensor if tensor.dim() == 1 else tensor[:ROWS]
                self.values[name] = rows.detach().to("cpu", torch.float32, copy=True)
            yield name, tensor
        if missing:
            raise ValueError(f"{len(missing)} weights never came, {min(missing)!r} among them")


async def check(server: Server, expected: Expected, *, version: int, deadline_s: float) -> None:
    """``EngineError``: the server answers for another version, or holds other values than were sent."""
    said = (await server.info(deadline_s=deadline_s)).version
    if said != str(version):
        raise EngineError(f"{server.url}: says it has weights {said!r}, after a sync to {version}")
    possible = set(STORED_AS)
    for name, sent in expected.values.items():
        request = {"name": name, "truncate_size": len(sent)}
        answer = await server.post("/get_weights_by_name", request, deadline_s=deadline_s)
        held = _unpadded(_numbers(answer, server, name), sent)
        if held.shape != sent.shape:
            raise EngineError(f"{server.url}: {name}: {tuple(held.shape)} values came back, not {tuple(sent.shape)}")
        possible &= {dtype for dtype in STORED_AS if torch.equal(sent.to(dtype).float(), held)}
        if not possible:
            worst = (sent - held).abs().max().item()
            raise EngineError(f"{server.url}: {name}: holds other values than were sent (up to {worst:.3g} apart)")


def _unpadded(held: Tensor, sent: Tensor) -> Tensor:
    """Without the columns of zeros by which a server's matrix is wider: SGLang's on a CPU fills a block."""
    wider = held.dim() == sent.dim() == 2 and held.shape[1] > sent.shape[1]
    return held[:, : sent.shape[1]] if wider and not held[:, sent.shape[1] :].any() else held


def _numbers(answer: Any, server: Server, name: str) -> Tensor:
    try:
        return torch.tensor(answer, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise EngineError(f"{server.url}: {name}: an answer that is no list of numbers ({error})") from error
