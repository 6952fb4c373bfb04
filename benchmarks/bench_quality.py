#!/usr/bin/env python3
"""What coherence and relevance tell apart: AUC of good dialogues against the same ones spoilt, and seconds a batch.

    python benchmarks/bench_quality.py [--embeddings FOLDER] [--out benchmarks/results/quality.csv] [--no-times]

The dialogues (`corruptions.py`) are cut in two by a digest of their names. The numbers in `mdapo/rewards/` were chosen
on the half ``calibrate``; goals are for the half ``report``. AUC is the chance that a good dialogue scores higher than
a spoilt one, ties counting half; its standard error is that of Hanley and McNeil (1982). ``combined`` gives both the
same outcome, so that quality alone decides. Every kind has one measure that is meant to catch it, with a goal of 0.9;
kinds without a goal are harder variants, for information.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from _harness import ROOT, hardware
from corruptions import KINDS, Dialogue, good_dialogues

from mdapo.rewards.calibration import Scale, calibrate
from mdapo.rewards.coherence import Quality, judge_all
from mdapo.rewards.embeddings import Cached, open_embedder

GOAL = 0.9
MEANT = {
    "shuffled": "coherence",
    "repeated": "coherence",
    "stuttered": "coherence",
    "truncated": "coherence",
    "contradicting": "coherence",
    "swapped": "relevance",
    "off_topic": "relevance",
}
MEASURES = ("coherence", "relevance", "combined")
WEIGHTS = (0.5, 0.5)  # the defaults of coherence_weight and relevance_weight
BATCH, TURNS = 64, 6
Row = dict[str, str | float | int]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--embeddings", default=str(ROOT / "models" / "all-MiniLM-L6-v2"))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "quality.csv")
    parser.add_argument("--no-times", action="store_true")
    arguments = parser.parse_args()
    machine, rows = hardware(), []
    for embeddings in (arguments.embeddings, "lexical"):
        found = aucs(good_dialogues(), embeddings)
        rows += found if arguments.no_times else [*found, seconds(embeddings)]
    for row in rows:
        row["hardware"] = machine
    names = list(dict.fromkeys(name for row in rows for name in row))
    with arguments.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(*(f"{name}={value}" for name, value in row.items() if name != "hardware"))


def half_of(dialogue: Dialogue) -> str:
    return ("calibrate", "report")[hashlib.sha256(dialogue.name.encode()).digest()[0] % 2]


def spoilt(kind: str, dialogues: Sequence[Dialogue]) -> list[tuple[Dialogue, Dialogue]]:
    """(good, spoilt) of those that can be, the same at every run; replies are swapped within ``dialogues``."""
    made = [(d, KINDS[kind](d, random.Random(f"{kind}/{d.name}"), dialogues)) for d in dialogues]
    return [(good, bad) for good, bad in made if bad is not None]


def auc(good: Sequence[float], bad: Sequence[float]) -> float:
    a, b = np.array(good)[:, None], np.array(bad)[None, :]
    return float((a > b).mean() + 0.5 * (a == b).mean())


def standard_error(area: float, good: int, bad: int) -> float:
    q1, q2 = area / (2.0 - area), 2.0 * area**2 / (1.0 + area)
    variance = area * (1.0 - area) + (good - 1) * (q1 - area**2) + (bad - 1) * (q2 - area**2)
    return math.sqrt(max(variance, 0.0) / (good * bad))


def values(qualities: Sequence[Quality]) -> dict[str, list[float]]:
    total = 1.0 + sum(WEIGHTS)
    return {
        "coherence": [q.coherence for q in qualities],
        "relevance": [q.relevance for q in qualities],
        "combined": [(1.0 + WEIGHTS[0] * q.coherence + WEIGHTS[1] * q.relevance) / total for q in qualities],
    }


def aucs(dialogues: Sequence[Dialogue], embeddings: str) -> list[Row]:
    """A row for each half, source and kind."""
    embedder = Cached(open_embedder(embeddings), size=100_000)
    scale = calibrate(embedder)
    rows: list[Row] = []
    for half in ("calibrate", "report"):
        own = [d for d in dialogues if half_of(d) == half]
        good = {d.name: q for d, q in zip(own, judged(own, embedder, scale), strict=True)}
        for kind in KINDS:
            pairs = spoilt(kind, own)
            bad = judged([b for _, b in pairs], embedder, scale)
            for source in ("all", "written", "service"):
                places = [i for i, (g, _) in enumerate(pairs) if source in ("all", g.source)]
                if places:
                    names = {pairs[i][0].name for i in places}
                    kept = [good[name] for name in sorted(names)]
                    rows.append(_row(embeddings, half, kind, source, kept, [bad[i] for i in places]))
    return rows


def _row(embeddings: str, half: str, kind: str, source: str, good: list[Quality], bad: list[Quality]) -> Row:
    row: Row = {"embeddings": Path(embeddings).name, "half": half, "kind": kind, "source": source, "pairs": len(bad)}
    row["meant"] = MEANT.get(kind, "")
    of_good, of_bad = values(good), values(bad)
    for measure in MEASURES:
        row[f"auc_{measure}"] = round(auc(of_good[measure], of_bad[measure]), 3)
    if kind in MEANT:
        area = auc(of_good[MEANT[kind]], of_bad[MEANT[kind]])
        row |= {"auc": round(area, 3), "se": round(standard_error(area, len(good), len(bad)), 3)}
        row |= {"goal": GOAL, "ok": "yes" if area >= GOAL else "no"}
    for measure in ("coherence", "relevance"):
        row[f"good_{measure}"] = round(float(np.mean(of_good[measure])), 3)
        row[f"spoilt_{measure}"] = round(float(np.mean(of_bad[measure])), 3)
    return row


def judged(dialogues: Sequence[Dialogue], embedder: Cached, scale: Scale) -> list[Quality]:
    return judge_all([(d.messages, d.opening) for d in dialogues], embedder, scale)


def seconds(embeddings: str) -> Row:
    """Of one thread, for `BATCH` dialogues of `TURNS` agent turns of which no text is known; and again, all known."""
    dialogues = [d for d in good_dialogues() if d.source == "written"]
    talks = []
    for k in range(BATCH):
        parts = [dialogues[(k + step) % len(dialogues)] for step in (0, 31)]
        messages = [m for part in parts for m in part.messages if m.role in ("user", "assistant")]
        talks.append(([type(m)(m.role, f"{m.content} ({k})") for m in messages[: 2 * TURNS]], 1))
    embedder = Cached(open_embedder(embeddings), size=100_000)
    scale, took = calibrate(embedder), []
    for _ in range(2):
        started, used = time.perf_counter(), time.process_time()
        judge_all(talks, embedder, scale)
        took += [round(time.perf_counter() - started, 3), round(time.process_time() - used, 3)]
    texts = len({m.content for messages, _ in talks for m in messages})
    names = ("seconds_new", "cpu_seconds_new", "seconds_known", "cpu_seconds_known")
    row: Row = {
        "embeddings": Path(embeddings).name,
        "kind": f"time of {BATCH} dialogues x {TURNS} turns",
        "pairs": texts,
    }
    return row | dict(zip(names, took, strict=True))


if __name__ == "__main__":
    main()
