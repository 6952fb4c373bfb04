"""Rows of the GPU's table: what was measured, or why it was not, with hardware, driver and date.

python benchmarks/gpu/rows.py OUT/gpu.csv build "native ops" 23.1 s     one row, for shell scripts
python benchmarks/gpu/rows.py OUT/gpu.csv                               the table so far
"""

from __future__ import annotations

import csv
import subprocess
import sys
from datetime import date
from importlib import metadata
from pathlib import Path

COLUMNS = ("date", "hardware", "driver", "torch", "stage", "what", "measured", "unit", "note")


def gpu() -> tuple[str, str]:
    """Name and driver of the first GPU, ("no GPU", "") where there is none."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "no GPU", ""
    name, _, driver = done.stdout.partition("\n")[0].partition(",")
    return (name.strip(), driver.strip()) if done.returncode == 0 and name.strip() else ("no GPU", "")


class Table:
    """A CSV file that rows are added to; each is on disk when ``add`` returns."""

    def __init__(self, path: Path) -> None:
        self.path, self.machine = path, gpu()

    def add(self, stage: str, what: str, measured: float | str, unit: str = "", note: str = "") -> None:
        text = f"{measured:.4g}" if isinstance(measured, float) else measured
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(COLUMNS)
            known = (date.today().isoformat(), *self.machine, metadata.version("torch"))
            writer.writerow([*known, stage, what, text, unit, note])
        print(f"{stage}: {what}: {text} {unit}".rstrip() + (f"  ({note})" if note else ""), flush=True)

    def show(self) -> None:
        with self.path.open(newline="") as file:
            found = list(csv.DictReader(file))
        rows = [(r["stage"], r["what"], f"{r['measured']} {r['unit']}".rstrip(), r["note"]) for r in found]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        for row in rows:
            print("  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]]).rstrip())


def main(arguments: list[str]) -> None:
    table = Table(Path(arguments[0]))
    if len(arguments) == 1:
        table.show()
    else:
        table.add(*arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
