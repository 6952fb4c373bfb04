"""Conversations of each step as files to read, ``episodes/step_000006.{jsonl,txt}``; when asked, groups to replay."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mdapo.tracking.console import printable
from mdapo.tracking.metrics import as_json
from mdapo.types import Episode, Group, Score

SaveGroups = Callable[[Path, Sequence[Group]], None]


class Recorder:
    """Writes below ``run_dir``. A step that runs again after a resume replaces its files.

    ``save_groups`` writes one replay file (``mdapo.data.wire.save_groups_file``); None: no replay is kept.
    """

    def __init__(self, run_dir: Path, *, episodes_per_step: int, save_groups: SaveGroups | None = None) -> None:
        self._run_dir, self._limit, self._save_groups = run_dir, episodes_per_step, save_groups

    def record(self, step: int, groups: Sequence[Group]) -> None:
        """The groups step ``step`` was trained on: some to read, all of them to replay."""
        self.episodes(step, pick(groups, limit=self._limit))
        if self._save_groups is not None:
            self._save_groups(replay_path(self._run_dir, step), groups)

    def episodes(self, step: int, episodes: Sequence[Episode], *, kind: str = "step") -> None:
        """Write ``episodes/{kind}_{step}.jsonl`` (one object an episode) and ``.txt`` (the same for the eye)."""
        if not episodes:
            return
        folder = self._run_dir / "episodes"
        folder.mkdir(parents=True, exist_ok=True)
        records = [describe(step, episode) for episode in episodes]
        lines = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
        replace_text(folder / f"{kind}_{step:06d}.jsonl", lines)
        replace_text(folder / f"{kind}_{step:06d}.txt", "\n".join(render(record) for record in records))


def replay_path(run_dir: Path, step: int) -> Path:
    return run_dir / "replay" / f"step_{step:06d}.safetensors"


def pick(groups: Sequence[Group], *, limit: int) -> list[Episode]:
    """At most ``limit`` episodes, spread over the groups: of each the best, then the worst, then those between."""
    rounds = zip_longest(*(_best_and_worst(group) for group in groups))
    episodes = [episode for episodes in rounds for episode in episodes if episode is not None]
    return episodes[:limit]


def describe(step: int, episode: Episode) -> dict[str, Any]:
    """One episode as JSON data; ``score`` is None where it has none."""
    return {
        "step": step,
        "uid": f"{episode.prompt.uid}/{episode.index}",
        "data_source": episode.prompt.data_source,
        "end": episode.end,
        "score": None if episode.score is None else _score(episode.score),
        "tokens": {"prompt": len(episode.prompt_ids), "all": len(episode.ids), "model": episode.num_model_tokens},
        "agent_turns": episode.num_agent_turns,
        "versions": sorted(
            {version for turn in episode.turns for version, tokens in turn.runs if version >= 0 and tokens}
        ),
        "messages": [{"role": message.role, "content": message.content} for message in episode.messages],
    }


def render(record: dict[str, Any]) -> str:
    """One described episode as text: a heading, the score's parts, then who said what."""
    score = record["score"]
    verdict = "no score" if score is None else f"score {_number(score['value'])}  outcome {_number(score['outcome'])}"
    measured = (
        ""
        if score is None
        else "".join(f"  {name} {_number(score[name])}" for name in ("coherence", "relevance") if name in score)
    )
    head = f"=== step {record['step']}  {record['uid']}  {verdict}{measured}  end {record['end']}"
    parts = "" if score is None else "  ".join(f"{name} {_number(value)}" for name, value in score["parts"].items())
    tokens = record["tokens"]
    size = f"{record['agent_turns']} agent turns, {tokens['model']} of {tokens['all']} tokens the policy's"
    body = "\n".join(f"[{m['role']}]\n{m['content'].strip()}\n" for m in record["messages"])
    return printable("\n".join(filter(None, [head, parts, size, "", body])))


def _score(score: Score) -> dict[str, Any]:
    numbers = as_json({"value": score.value, "outcome": score.outcome})
    quality = {"coherence": score.coherence, "relevance": score.relevance}
    measured = as_json({name: value for name, value in quality.items() if value is not None})
    return {**numbers, **measured, "parts": as_json(score.parts), "valid": score.valid}


def _best_and_worst(group: Group) -> Iterator[Episode]:
    ranked = sorted(group.episodes, key=lambda e: float("-inf") if e.score is None else e.score.value, reverse=True)
    while ranked:
        yield ranked.pop(0)
        if ranked:
            yield ranked.pop()


def _number(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.3g}"


def replace_text(path: Path, text: str) -> None:
    """A reader sees the old file or the new one. A lone surrogate becomes its escape, which in JSON means the same."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(text.encode("utf-8", "backslashreplace"))
    partial.replace(path)
