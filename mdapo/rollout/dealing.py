"""Which prompts are asked next: the stream's, without those that their pass rates rule out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from mdapo.config.schema import Config
from mdapo.rollout.pass_rates import PassRates
from mdapo.types import Prompt


class Stream(Protocol):
    """What is needed of ``data/prompts.py``."""

    @property
    def exhausted(self) -> bool: ...

    def __len__(self) -> int: ...

    def next(self, n: int) -> list[Prompt]: ...

    def commit(self, uids: Iterable[str]) -> None: ...

    def put_back(self, uids: Iterable[str]) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any], *, held: Iterable[str] = ()) -> None: ...


class Dealer:
    """``rates`` is None where nothing is ever skipped. A skipped prompt is done with for its epoch."""

    def __init__(self, stream: Stream, config: Config) -> None:
        skip = config.algorithm.filter_groups.skip_prompts
        self.stream = stream
        self.rates = PassRates(skip, n=config.rollout.n_resp_per_prompt, seed=config.run.seed) if skip.enable else None

    def next(self, count: int) -> list[Prompt]:
        """``count`` prompts, or as many as there are. At most one epoch of them is skipped: never endless."""
        if self.rates is None:
            return self.stream.next(count)
        found: list[Prompt] = []
        may_skip = len(self.stream)
        while len(found) < count and not self.stream.exhausted:
            for prompt in self.stream.next(count - len(found)):
                if may_skip and self.rates.skips(prompt):
                    may_skip -= 1
                    self.stream.commit([prompt.uid])
                else:
                    found.append(prompt)
        return found
