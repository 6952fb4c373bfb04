"""A whole training step (generate, score, train, sync) against a peer's: samples/s and peak memory, ours over theirs.

    python benchmarks/bench_step.py --peer trl [--steps 5] [--only fixed-float32]

Both do the same work: the same model, prompts, response lengths, dtype and threads, 8 prompts x 4 samples, one
on-policy optimizer step. ``fixed``: 32 + 32 tokens, no padding to gain from. ``ragged``: responses of 16 to 256
tokens. The peer gets a virtual environment of its own, made on the first call. Exit code 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from _harness import ROOT, Worker, alternate, hardware

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
PEER_ENV = ROOT / ".venv-trl"
PEER_PACKAGES = (
    "torch==2.13.0",
    "trl==1.16.0",
    "transformers==5.12.1",
    "datasets==5.2.0",
    "accelerate==1.15.0",
    "numpy==2.4.6",
)
PROMPTS, SAMPLES, PROMPT_LEN = 8, 4, 32
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night"
)
GOALS = {"fixed-float32": 1.2, "fixed-bfloat16": 1.2, "ragged-float32": 2.0, "ragged-bfloat16": 2.0}


def peer_python() -> Path:
    """The peer's interpreter; installs it once."""
    python, stamp = PEER_ENV / "bin" / "python", PEER_ENV / "installed"
    if not stamp.exists() or stamp.read_text() != " ".join(PEER_PACKAGES):
        print(f"installing {PEER_PACKAGES[1]} into {PEER_ENV.name} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(PEER_ENV)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PEER_PACKAGES], check=True)
        stamp.write_text(" ".join(PEER_PACKAGES))
    return python


def ragged_lengths(rng: random.Random) -> list[int]:
    """Log-normal around 48 tokens, cut to 16..256: many short answers, a few long ones."""
    return [min(max(round(rng.lognormvariate(math.log(48), 0.8)), 16), 256) for _ in range(PROMPTS * SAMPLES)]


def work(case: str, *, steps: int) -> dict[str, Any]:
    """What both workers are told to do; prompts are 32 common words, one token each."""
    from transformers import AutoTokenizer

    shape, dtype = case.split("-")
    rng = random.Random(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    words = WORDS.split()
    texts = [" " + " ".join(rng.choice(words) for _ in range(PROMPT_LEN)) for _ in range(64)]
    prompt_ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert all(len(ids) == PROMPT_LEN for ids in prompt_ids), "every word is one token"
    lengths = [ragged_lengths(rng) if shape == "ragged" else [32] * (PROMPTS * SAMPLES) for _ in range(steps + 1)]
    return {
        "model": str(MODEL),
        "dtype": dtype,
        "threads": 2,
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "prompt_len": PROMPT_LEN,
        "lengths": lengths,
        "texts": texts,
        "prompt_ids": prompt_ids,
        "context": PROMPT_LEN + max(map(max, lengths)),
        "micro_tokens": 1024,
    }


def compare(case: str, *, steps: int) -> dict[str, Any]:
    task = work(case, steps=steps)
    mean = sum(map(sum, task["lengths"])) / sum(map(len, task["lengths"]))
    print(f"{case}: {PROMPTS} prompts x {SAMPLES}, mean response {mean:.0f} tokens")
    folder = Path(__file__).parent / "peers"
    workers = [
        Worker("mdapo", sys.executable, folder / "mdapo_step.py", task),
        Worker("trl", peer_python(), folder / "trl_step.py", task),
    ]
    alternate(workers, steps=steps)
    ours, theirs = (worker.finish() for worker in workers)
    samples = PROMPTS * SAMPLES
    return {
        "case": case,
        "mdapo_samples_per_s": samples / ours["seconds"],
        "trl_samples_per_s": samples / theirs["seconds"],
        "ratio": theirs["seconds"] / ours["seconds"],
        "goal": GOALS[case],
        "mdapo_generate_s": ours["generate"],
        "trl_generate_s": theirs["generate"],
        "mdapo_train_s": ours["train"],
        "trl_train_s": theirs["train"],
        "mdapo_peak_gb": ours["peak_bytes"] / 1e9,
        "trl_peak_gb": theirs["peak_bytes"] / 1e9,
    }


def save(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["hardware", *rows[0]])
        writer.writeheader()
        writer.writerows(
            {"hardware": hardware(), **{k: f"{v:.4g}" if isinstance(v, float) else v for k, v in r.items()}}
            for r in rows
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=["trl"], default="trl")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", choices=list(GOALS))
    options = parser.parse_args()
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    rows = []
    for case in [options.only] if options.only else GOALS:
        rows.append(compare(case, steps=options.steps))
        save(rows, results / "step_vs_trl.csv")
    print(f"\n{hardware()}, median of {options.steps} steps")
    print("case              ours/s  trl/s  ratio  goal | generate s  train s (ours, trl) | peak GB (ours, trl)")
    for r in rows:
        speed = f"{r['mdapo_samples_per_s']:6.2f} {r['trl_samples_per_s']:6.2f} {r['ratio']:6.2f} {r['goal']:5.1f}"
        generate = f"{r['mdapo_generate_s']:.2f} {r['trl_generate_s']:.2f}"
        train = f"{r['mdapo_train_s']:.2f} {r['trl_train_s']:.2f}"
        print(f"{r['case']:<17} {speed} | {generate}   {train} | {r['mdapo_peak_gb']:.2f} {r['trl_peak_gb']:.2f}")
    missed = [r["case"] for r in rows if r["ratio"] < r["goal"] or r["mdapo_peak_gb"] > r["trl_peak_gb"]]
    if missed:
        print(f"missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
