"""Every op's goals with what this machine measures, in one table; exit code 1 where one is missed. Each benchmark has a
process of its own: what another left in the heap would hide what it needs itself.

python benchmarks/ops/run.py                  all benchmarks of this folder: 15 minutes
python benchmarks/ops/run.py pack             of one op
python benchmarks/ops/run.py --out FILE.csv   kept as well
"""

from __future__ import annotations

import argparse
import csv
import importlib
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from _goals import Goal, hardware, show

FOLDER = Path(__file__).resolve().parent


def save(goals: Sequence[Goal], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["hardware", "what", "measured", "goal", "unit", "met", "note"])
        for goal in goals:
            limit = f"{'<=' if goal.at_most else '>='} {goal.limit:g}"
            writer.writerow(
                [
                    hardware(),
                    goal.what,
                    f"{goal.measured:.3g}",
                    limit,
                    goal.unit,
                    "yes" if goal.met else "no",
                    goal.note,
                ]
            )


def measured(name: str) -> list[Goal]:
    return importlib.import_module(f"bench_{name}").measure()


def main(arguments: Sequence[str]) -> int:
    known = sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--out", type=Path, metavar="FILE.csv")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(known):
        parser.error(f"no benchmark of {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    goals: list[Goal] = []
    for name in options.names or known:
        print(f"{name} ...", flush=True)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            goals += process.submit(measured, name).result()
        if options.out:
            save(goals, options.out)
    return show(goals, title="ops")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
