"""All that survives a restart, in one commit point a step: weights, optimizer, schedule, prompt cursor, carried groups,
metrics offset. Random numbers need no state: every draw is a function of the seed and of what it is for."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdapo.errors import StorageError, UserError
from mdapo.megatron import checkpoint
from mdapo.trainer.commit import close_commit, newest_commit, open_commit

if TYPE_CHECKING:
    from mdapo.trainer.flow import Trainer

STATE, MODEL = "state.json", "model"


@dataclass
class TrainState:
    """Counters, the same on every rank. ``before``: the first evaluation, kept for the table at the end."""

    step: int = 0
    version: int = 0
    skipped_in_a_row: int = 0
    exhausted: bool = False
    before: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0  # of earlier processes of this run


def save(t: Trainer) -> None:
    """Write one commit point; all ranks. ``StorageError`` where rank 0 cannot write: the older ones stay as they are."""

    def begin() -> str:
        assert t.journal is not None
        return str(_storage(lambda: open_commit(t.journal.path / "checkpoints", t.state.step)))

    folder = Path(t.agree({"folder": t.share_errors(begin)})["folder"])
    checkpoint.save(t.actor, folder / MODEL)

    def end() -> None:
        assert t.journal is not None and t.rollout is not None
        state = {"train": asdict(t.state), "metrics_offset": t.journal.offset, "rollout": t.rollout.save(folder)}
        (folder / STATE).write_text(json.dumps(state, indent=1))
        close_commit(folder, keep=t.config.run.keep_checkpoints)

    t.share_errors(lambda: _storage(end))


def resume(t: Trainer) -> bool:
    """Continue from the newest complete commit point; all ranks. Damaged ones are named and passed over.

    Raises ``UserError`` when there are commit points and none of them is good: never silently from the start.
    """

    def find() -> dict[str, Any]:
        assert t.journal is not None
        root = t.journal.path / "checkpoints"
        found = newest_commit(root)
        if found.path is None and found.problems:
            raise UserError([f"{root}: no checkpoint is usable; move them away to start from the beginning", *found.problems])
        for problem in found.problems:
            t.journal.say(f"passed over: {problem}")
        if found.path is None:
            return {"folder": None}
        return {"folder": str(found.path), **json.loads((found.path / STATE).read_text())}

    found = t.agree(t.share_errors(find) or {})
    if found["folder"] is None:
        if t.journal is not None:
            t.journal.start(step=0, offset=0)
        return False
    folder = Path(found["folder"])
    t.state = TrainState(**found["train"])
    checkpoint.load(t.actor, folder / MODEL)

    def restore() -> None:
        assert t.journal is not None and t.rollout is not None
        t.rollout.restore(folder, found["rollout"])
        t.journal.start(step=t.state.step, offset=found["metrics_offset"])
        t.journal.say(f"resumed after step {t.state.step} from {folder}")

    t.share_errors(restore)
    return True


def _storage(work: Any) -> Any:
    try:
        return work()
    except OSError as error:
        raise StorageError(f"checkpoint not written: {error}") from error
