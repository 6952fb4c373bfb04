"""The end of a run: last commit point, evaluation, Hugging Face folder, summary.json and the before/after table."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import save_file

from mdapo.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from mdapo.megatron.actor import Actor
    from mdapo.trainer.flow import Trainer

SHARD_BYTES = 4 * 2**30
FIRST = ("eval/success", "eval/reward")  # of the table's rows
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.index.json", "*.gguf")


def finish(t: Trainer) -> int:
    """Close the run on all ranks; returns its exit code."""
    t.save()
    after = t.evaluate() if t.trains and t.config.run.eval_after else {}
    if t.trains and t.config.run.export_hf:
        target = Path(t.agree({"path": str(t.journal.path / "hf") if t.journal is not None else ""})["path"])
        export_hf(t.actor, Path(t.config.model.path), target)
    if t.journal is not None:
        before = t.state.before
        names = sorted({name.removeprefix("eval/") for name in (*before, *after)})
        summary: dict[str, float | int] = {"steps": t.state.step, "updates": t.state.updates}
        summary["seconds"] = round(t.seconds, 1)
        for name in names:
            summary |= {f"{name}_{when}": m[f"eval/{name}"] for when, m in (("before", before), ("after", after)) if m}
        t.journal.summarise(summary)
        if before and after:
            t.journal.console.show(comparison(before, after))
        ended = f" of {t.config.run.total_steps}, where the data ends" if t.state.exhausted else ""
        done = f"{t.state.step} steps{ended} ({t.state.updates} optimizer steps) in {t.seconds:.0f} s"
        t.say(f"{done}; conversations in {t.journal.path / 'episodes'}")
    return 0


def in_order(names: Iterable[str]) -> list[str]:
    """Of a table's rows: what people look for first."""
    return sorted(names, key=lambda n: (n not in FIRST, n == FIRST[1], n.count("/"), n))


def comparison(before: dict[str, float], after: dict[str, float]) -> Table:
    """The table people came for."""
    table = Table(title="held-out prompts, before and after")
    for column in ("", "before", "after", "change"):
        table.add_column(column, justify="left" if not column else "right")
    for name in in_order(before.keys() & after.keys()):
        table.add_row(
            name.removeprefix("eval/"),
            f"{before[name]:.3f}",
            f"{after[name]:.3f}",
            f"{after[name] - before[name]:+.3f}",
        )
    return table


def export_hf(actor: Actor, source: Path, target: Path) -> None:
    """Write the model as a Hugging Face folder: safetensors streamed from the actor, everything else as in ``source``.

    Collective; rank 0 writes, aside first, then by rename. A folder of an earlier export is replaced. ``StorageError``
    when it cannot be written.
    """
    partial = target.with_name(f".{target.name}.partial")
    lead = actor.layout.rank == 0
    if lead:
        shutil.rmtree(partial, ignore_errors=True)
        try:
            shutil.copytree(source, partial, ignore=shutil.ignore_patterns(*WEIGHT_FILES))
        except shutil.Error as error:  # a list of what went wrong, without its codes
            raise StorageError(f"{partial}: the model could not be exported: {error.args[0][0][2]}") from error
    shard: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}
    size = total = 0
    for name, tensor in actor.export():
        if shard and size + tensor.nbytes > SHARD_BYTES:
            _write_shard(partial, shard, files)
            shard, size = {}, 0
        shard[name] = tensor.contiguous().cpu()
        size += tensor.nbytes
        total += tensor.nbytes
    if lead:
        _write_shard(partial, shard, files)
        _name_shards(partial, files, total)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)


def _write_shard(folder: Path, shard: dict[str, torch.Tensor], files: dict[str, str]) -> None:
    name = f"shard-{len(set(files.values())):05d}.safetensors"
    try:
        save_file(shard, folder / name, metadata={"format": "pt"})
    except SafetensorError as error:  # how the library tells of a full disk
        raise StorageError(f"{folder}: the model could not be exported: {error}") from error
    files |= dict.fromkeys(shard, name)


def _name_shards(folder: Path, files: dict[str, str], total: int) -> None:
    """Hugging Face's names: one file, or numbered files with an index."""
    shards = sorted(set(files.values()))
    if len(shards) == 1:
        (folder / shards[0]).rename(folder / "model.safetensors")
        return
    names = {old: f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i, old in enumerate(shards)}
    for old, new in names.items():
        (folder / old).rename(folder / new)
    index = {"metadata": {"total_size": total}, "weight_map": {k: names[v] for k, v in files.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, allow_nan=False), encoding="utf-8")
