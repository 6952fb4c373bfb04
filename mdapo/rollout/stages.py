"""The three stages of the dynamic batch, by their configured names: built-in, ``pkg.mod:Class``, ``file.py:Class``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mdapo import plugins
from mdapo.config.schema import Config
from mdapo.errors import UserError
from mdapo.rollout import fill, filter, sample
from mdapo.types import Group

NEEDED = {
    "sample": (sample, ("ask", "state", "restore")),
    "filter": (filter, ("judge", "saw", "open_step", "metrics", "state", "restore")),
    "fill": (fill, ("choose",)),
}


@dataclass(frozen=True)
class Stages:
    """What a plug-in returns is checked where it returns it."""

    names: Mapping[str, str]
    sampler: sample.Sample
    filter: filter.Filter
    filler: fill.Fill

    @classmethod
    def of(cls, config: Config) -> Stages:
        """``UserError`` when one cannot be loaded, or lacks what a stage of its kind has."""
        cfg = config.algorithm.filter_groups
        names = {"sample": cfg.sample, "filter": cfg.filter, "fill": cfg.fill}
        return cls(names, *(_made(kind, name, config) for kind, name in names.items()))

    def ask(self, need: sample.Need) -> int:
        asked = self.sampler.ask(need)
        if not isinstance(asked, int) or asked < 0:
            raise UserError(f"algorithm.filter_groups.sample={self.names['sample']}: ask() gave {asked!r}, no count")
        if asked == 0 and need.missing > 0 and need.under_way == 0:
            text = f"ask() gave 0 with {need.missing} groups missing and none under way: nothing would ever come"
            raise UserError(f"algorithm.filter_groups.sample={self.names['sample']}: {text}")
        return asked

    def choose(self, groups: Sequence[Group], count: int) -> list[int]:
        """``count`` different indices into ``groups``, ascending: the order of arrival stays that of the batch."""
        chosen = sorted(self.filler.choose(groups, count))
        if len(set(chosen)) != count or not set(chosen) <= set(range(len(groups))):
            name = f"algorithm.filter_groups.fill={self.names['fill']}"
            raise UserError(f"{name}: choose() gave {chosen}, not {count} different ones of {len(groups)} groups")
        return chosen

    def bias(self, trained: Sequence[Group], accepted: Sequence[Group]) -> dict[str, float]:
        """The length bias of a fill that chooses."""
        return {} if self.names["fill"] == "arrival" else fill.bias(trained, accepted)

    def state(self) -> dict[str, Any]:
        return {"sample": self.sampler.state(), "filter": self.filter.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.sampler.restore(state["sample"])
        self.filter.restore(state["filter"])


def _made(kind: str, name: str, config: Config) -> Any:
    module, methods = NEEDED[kind]
    made = plugins.load(name, builtin=module.BUILTIN, required=("config",), args=())(config=config)
    missing = [method for method in methods if not callable(getattr(made, method, None))]
    if missing:
        base = f"mdapo.rollout.{kind}.{kind.capitalize()}"
        raise UserError(f"algorithm.filter_groups.{kind}={name}: lacks {', '.join(missing)}; {base} has defaults")
    return made
