"""Every op's goals with what this machine measures, in one table; exit code 1 where one is missed.

python benchmarks/ops/run.py             all benchmarks of this folder
python benchmarks/ops/run.py pack        of one op
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from _goals import Goal, show

FOLDER = Path(__file__).resolve().parent


def main(names: list[str]) -> int:
    known = sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))
    if unknown := set(names) - set(known):
        sys.exit(f"no benchmark of {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    goals: list[Goal] = []
    for name in names or known:
        print(f"{name} ...", flush=True)
        goals += importlib.import_module(f"bench_{name}").measure()
    return show(goals, title="ops")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
