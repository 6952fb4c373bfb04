"""What rank 0 writes down of a run: the run folder with its metrics, conversations and replay, and the console."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdapo.data.wire import save_groups_file
from mdapo.tracking.console import Console
from mdapo.tracking.environment import describe_environment
from mdapo.tracking.metrics import as_json
from mdapo.tracking.recorder import Recorder, replace_text
from mdapo.tracking.run_folder import CHECKPOINTS, EVAL, open_eval_folder, open_run_folder, usable
from mdapo.tracking.tracker import FILE, Tracker
from mdapo.trainer.commit import any_commit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mdapo.config.load import Loaded
    from mdapo.trainer.record import StepRecord
    from mdapo.types import Episode


class Journal:
    """Open with the run; ``start`` once it is known where the run goes on. ``UserError``: the folder cannot be used."""

    def __init__(self, loaded: Loaded) -> None:
        config = loaded.config
        self.config = config
        self.console = Console(config.run.total_steps)
        self.folder = open_run_folder(
            Path(config.run.dir) / config.run.name,
            config.model_dump(mode="json"),
            fresh=config.run.resume == "never",
            environment=describe_environment(),
            notify=self.console.say,
        )
        self.path = self.folder.path
        keeps_replay = config.tracking.replay or config.debug.mode == "rollout"
        self.recorder = Recorder(
            self.path,
            episodes_per_step=config.tracking.episodes_per_step,
            save_groups=save_groups_file if keeps_replay else None,
        )
        self.tracker: Tracker | None = None

    def claim(self) -> None:
        """Take the run folder: the run will start. Steps without a checkpoint to go on from are moved aside."""
        self.folder.claim(lost=None if any_commit(self.path / CHECKPOINTS) else trained_before(self.path))

    def start(self, *, step: int, offset: int) -> None:
        """The run goes on after ``step``, whose commit had ``offset`` bytes of metrics."""
        self.console.close()
        self.console = Console(self.config.run.total_steps, first_step=step)
        with usable(self.path):
            self.tracker = Tracker(self.path, self.config.tracking, offset, resume_step=step, notify=self.say)

    @property
    def offset(self) -> int:
        """Bytes of metrics written so far."""
        assert self.tracker is not None
        return self.tracker.offset

    def say(self, text: str) -> None:
        self.console.say(text)

    def doing(self, text: str) -> None:
        self.console.doing(text)

    def keep(self, record: StepRecord) -> None:
        """What a step was trained on: some conversations to read, all of it to replay when that is asked for."""
        self.recorder.record(record.step, record.groups)

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """One finished step: its line of metrics, and the console's."""
        assert self.tracker is not None
        self.tracker.log(step, metrics)
        self.console.step(step, metrics)

    def note_evaluation(self, step: int, episodes: Sequence[Episode]) -> None:
        self.recorder.episodes(step, episodes, kind="eval")

    def summarise(self, summary: dict[str, Any]) -> None:
        write_json(self.path / "summary.json", summary)

    def close(self) -> None:
        self.console.close()
        if self.tracker is not None:
            self.tracker.close()
        self.folder.close()


class EvalJournal(Journal):
    """Of ``mdapo eval``: writes below the run folder's ``eval/`` and leaves the rest of it, and its lock, alone."""

    def __init__(self, loaded: Loaded) -> None:
        config = loaded.config
        self.config, self.tracker = config, None
        self.console = Console(0)
        self.path = Path(config.run.dir) / config.run.name
        self.recorder = Recorder(open_eval_folder(self.path), episodes_per_step=0)

    def claim(self) -> None:
        pass  # it stays the run's

    def start(self, *, step: int, offset: int) -> None:
        pass  # no metrics are written

    def summarise(self, summary: dict[str, Any]) -> None:
        write_json(self.path / EVAL / f"step_{summary['step']:06d}.json", summary)

    def close(self) -> None:
        self.console.close()


def trained_before(path: Path) -> str | None:
    """Which signs of trained steps a run folder without a checkpoint holds; None without any."""
    signs = [name for name in (FILE, "summary.json", "hf") if (path / name).exists()]
    if signs == [FILE] and (path / FILE).stat().st_size == 0:
        return None
    return f"holds trained steps ({', '.join(signs)}) and no checkpoint to go on from" if signs else None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """A reader sees the old file or the new one. A number that is not finite is written as null, as in the metrics."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(as_json(value), indent=1, allow_nan=False) + "\n")
