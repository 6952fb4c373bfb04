"""All that survives a restart, in one commit point a step: weights, optimizer, schedule, prompt cursor, carried groups,
metrics offset. Random numbers need no state: every draw is a function of the seed and of what it is for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mdapo.errors import StorageError, UserError
from mdapo.megatron import checkpoint
from mdapo.tracking.metrics import as_json
from mdapo.tracking.run_folder import CHECKPOINTS
from mdapo.trainer.commit import close_commit, newest_commit, open_commit

if TYPE_CHECKING:
    from mdapo.config.schema import Config
    from mdapo.trainer.flow import Trainer

STATE, MODEL = "state.json", "model"
T = TypeVar("T")
Moment = tuple[int, bool]  # step, and whether it waits for its evaluation


@dataclass
class TrainState:
    """Counters, the same on every rank.

    ``updates``: optimizer steps made. ``before``: the first evaluation, kept for the table at the end. ``waiting``: the
    numbers of a step that was trained and waits for its evaluation.
    """

    step: int = 0
    version: int = 0
    updates: int = 0
    skipped_in_a_row: int = 0
    exhausted: bool = False
    waiting: dict[str, float] | None = None
    before: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0  # of earlier processes of this run


def written(state: TrainState, *, seconds: float) -> dict[str, Any]:
    """As strict JSON: of a step that was left out, the loss that waits to be noted is NaN, and null in a file."""
    waiting = None if state.waiting is None else as_json(state.waiting)
    return {**asdict(state), "seconds": seconds, "waiting": waiting}


def read(data: Mapping[str, Any]) -> TrainState:
    """What `written` wrote."""
    state = TrainState(**data)
    if state.waiting is not None:
        state.waiting = {name: math.nan if value is None else value for name, value in state.waiting.items()}
    return state


def moment(t: Trainer) -> Moment:
    return t.state.step, t.state.waiting is not None


def save(t: Trainer) -> None:
    """Write one commit point; all ranks. ``StorageError`` where one cannot write: the older ones stay as they are."""
    if t.committed == moment(t):
        return

    def begin() -> str:
        assert t.journal is not None
        return str(open_commit(t.journal.path / CHECKPOINTS, t.state.step))

    folder = Path(t.agree({"folder": t.share_errors(_stored(begin))})["folder"])
    _stored(lambda: checkpoint.save(t.actor, folder / MODEL))()
    t.actor.leave_device()

    def end() -> None:
        assert t.journal is not None and t.rollout is not None
        state = {
            "train": written(t.state, seconds=t.seconds),
            "metrics_offset": t.journal.offset,
            "rollout": t.rollout.save(folder),
        }
        state["optimizer"] = optimizer_kind(t.config)
        (folder / STATE).write_text(json.dumps(state, indent=1, allow_nan=False), encoding="utf-8")
        close_commit(folder, keep=t.config.run.keep_checkpoints)

    t.share_errors(_stored(end))
    t.committed = moment(t)


def resume(t: Trainer) -> bool:
    """Continue from the newest complete commit point; all ranks. Damaged ones are named and passed over.

    Raises ``UserError`` when there are commit points and none of them is good: never silently from the start.
    """

    def find() -> dict[str, Any]:
        assert t.journal is not None
        root = t.journal.path / CHECKPOINTS
        found = newest_commit(root, needs=(STATE,))
        if found.path is None and found.problems:
            advice = f"{root}: no checkpoint is usable; move them away to start from the beginning"
            raise UserError([advice, *found.problems])
        for problem in found.problems:
            t.journal.say(f"passed over: {problem}")
        if found.path is None:
            return {"folder": None}
        state = json.loads((found.path / STATE).read_text(encoding="utf-8"))
        if not t.only_evaluate:
            _same_optimizer(state["optimizer"], t.config, found.path)
        return {"folder": str(found.path), **state}

    found = t.agree(t.share_errors(find) or {})
    if found["folder"] is None:
        if t.journal is not None:
            t.journal.start(step=0, offset=0)
        return False
    folder = Path(found["folder"])
    t.state = read(found["train"])
    t.committed = moment(t)
    checkpoint.load(t.actor, folder / MODEL)

    def restore() -> None:
        assert t.journal is not None and t.rollout is not None
        if not t.only_evaluate:
            t.rollout.restore(folder, found["rollout"])
        noted = t.state.step - (t.state.waiting is not None)
        t.journal.start(step=noted, offset=found["metrics_offset"])
        t.journal.say(f"weights of step {t.state.step}, from {folder}")

    t.share_errors(restore)
    return True


def optimizer_kind(config: Config) -> dict[str, Any]:
    """What megatron writes optimizers of different kinds by; all else of a layout may change."""
    return {
        "model.dtype": config.model.dtype,
        "parallel.distributed_optimizer": config.parallel.distributed_optimizer,
    }


def _same_optimizer(saved: dict[str, Any], config: Config, path: Path) -> None:
    found = optimizer_kind(config)
    changed = [f"{key}={found[key]}: the checkpoint has {value}" for key, value in saved.items() if found[key] != value]
    if changed:
        raise UserError([*changed, f"{path}: resume as it was saved, or start a new run (run.name)"])


def _stored(work: Callable[[], T]) -> Callable[[], T]:
    """The same, with the operating system's errors as ``StorageError``."""

    def guarded() -> T:
        try:
            return work()
        except OSError as error:
            raise StorageError(f"checkpoint not written, the last one is as it was: {error}") from error

    return guarded
