"""Every layout against one rank: trains one step from the same replay and compares loss, gradient norm and gradients.

``python tests/distributed/parity.py [--model FOLDER]`` prints the table and exits non-zero above the limit. All layouts
of the same number of ranks share one torchrun. The tests run a reduced list through the same functions.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

RANK_PROGRAM = Path(__file__).with_name("parity_rank.py")
LIMIT = 1e-5  # of the largest gradient, and of loss and norm relative to their size, in fp32
KINDS = {"llama": False, "qwen2": True, "qwen3": True}  # and whether embeddings are tied
REFERENCE = {"sequences": 7, "seed": 0, "cut": 60}

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor": 2},
    "TP2+SP": {"tensor": 2, "sequence": True},
    "PP2": {"pipeline": 2},
    "PP2xVPP2": {"pipeline": 2, "virtual_pipeline": 2},
    "DP2": {"data": 2, "distributed_optimizer": False},
    "DP2+dist-opt": {"data": 2},
    "TP2xPP2+SP": {"tensor": 2, "pipeline": 2, "sequence": True},
    "TP2xDP2": {"tensor": 2, "data": 2, "distributed_optimizer": False},
}


@dataclass(frozen=True)
class Case:
    """One row of the table; ``spec`` is merged over the reference's."""

    name: str
    kind: str
    parallel: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return math.prod(self.parallel.get(axis, 1) for axis in ("tensor", "pipeline", "data"))

    @property
    def key(self) -> str:
        return f"{self.kind}-{self.name}"


def all_cases() -> list[Case]:
    """What ``scripts/parity.sh`` shows."""
    cases = [Case(name, kind, parallel) for kind in KINDS for name, parallel in LAYOUTS.items()]
    padded = {"actor": {"use_remove_padding": False}}
    for kind in KINDS:
        cases.append(Case("padded", kind, spec=padded))
        cases.append(Case("padded TP2+SP", kind, LAYOUTS["TP2+SP"], padded))
        cases += [Case(f"cut at {cut}", kind, spec={"cut": cut}) for cut in (1, 45, 1000)]
        # five and seven micro-batches: a virtual pipeline needs a filler
        cases += [Case(f"cut at {cut} PP2xVPP2", kind, LAYOUTS["PP2xVPP2"], {"cut": cut}) for cut in (1, 45)]
        shared = {"share_prefix": True, "cut": 1000}
        cases.append(Case("shared prefixes", kind, spec=shared))
        cases += [Case(f"shared {name}", kind, LAYOUTS[name], shared) for name in ("TP2+SP", "PP2xVPP2", "DP2")]
    overlap = {"megatron": {"ddp": {"overlap_grad_reduce": True}}}
    cases += [Case(f"{name} overlapped", "qwen3", LAYOUTS[name], overlap) for name in ("DP2", "DP2+dist-opt")]
    for mode in ("selective", "full"):
        cases.append(Case(f"recompute {mode}", "qwen3", spec={"actor": {"recompute": mode}}))
        cases.append(
            Case(f"recompute {mode} TP2xPP2+SP", "qwen3", LAYOUTS["TP2xPP2+SP"], {"actor": {"recompute": mode}})
        )
    return cases


def launch(program: Path, arguments: list[str], ranks: int, *, timeout_s: float) -> None:
    """Run a program in ``ranks`` gloo processes; a deadline ends them all."""
    command = [sys.executable, str(program), *arguments]
    if ranks > 1:
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *run, *command[1:]]
    root = str(RANK_PROGRAM.parents[2])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MDAPO_DEVICE": "cpu", "PYTHONPATH": root}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun passes it on to its workers
        output, _ = process.communicate(timeout=40)
        raise TimeoutError(f"{ranks} ranks did not finish in {timeout_s:.0f} s:\n{output[-4000:]}") from None
    if process.returncode:
        raise RuntimeError(f"{ranks} ranks failed with {process.returncode}:\n{output[-6000:]}")


def run_cases(cases: list[Case], folder: Path, *, timeout_s: float = 300.0) -> dict[str, dict[str, Any]]:
    """Results by key, with those of one rank under ``<kind>-one``. Makes the models that are missing."""
    from tiny_models import save_model

    kinds = sorted({case.kind for case in cases})
    for kind in kinds:
        if not (folder / kind).exists():
            save_model(folder / kind, kind, tied=KINDS[kind])
    wanted = [*cases, *(Case("one", kind) for kind in kinds)]
    todo = [case for case in wanted if not (folder / f"{case.key}.pt").exists()]
    for ranks in sorted({case.ranks for case in todo}):
        specs = [
            {"name": case.key, "model": str(folder / case.kind), "parallel": case.parallel, **REFERENCE, **case.spec}
            for case in todo
            if case.ranks == ranks
        ]
        path = folder / f"specs-{ranks}.json"
        path.write_text(json.dumps(specs))
        launch(RANK_PROGRAM, [str(path), str(folder)], ranks, timeout_s=timeout_s)
    return {case.key: torch.load(folder / f"{case.key}.pt") for case in wanted}


def differences(result: dict[str, Any], one: dict[str, Any]) -> dict[str, float]:
    """Relative differences against one rank: loss, gradient norm, and the largest of any gradient's entries."""
    assert result["grads"].keys() == one["grads"].keys()
    largest = max(float(grad.abs().max()) for grad in one["grads"].values())
    worst = max(float((result["grads"][name] - grad).abs().max()) for name, grad in one["grads"].items())
    return {
        "loss": abs(result["loss"] - one["loss"]) / abs(one["loss"]),
        "grad_norm": abs(result["grad_norm"] - one["grad_norm"]) / one["grad_norm"],
        "grads": worst / largest,
    }


def table(cases: list[Case], results: dict[str, dict[str, Any]]) -> tuple[list[str], bool]:
    """Lines of the table, and whether all rows are within the limit."""
    lines = [f"{'model':8}{'case':30}{'ranks':>6}{'dloss':>11}{'dgrad norm':>12}{'max dgrad':>12}"]
    fine = True
    for case in cases:
        delta = differences(results[case.key], results[f"{case.kind}-one"])
        good = max(delta.values()) <= LIMIT
        fine &= good
        row = f"{case.kind:8}{case.name:30}{case.ranks:>6}{delta['loss']:>11.1e}{delta['grad_norm']:>12.1e}"
        lines.append(f"{row}{delta['grads']:>12.1e}{'' if good else '   > 1e-5'}")
    lines.append("Relative to one rank (its loss, its gradient norm, its largest gradient), fp32, same replay batch.")
    return lines, fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", type=Path, help="a Hugging Face folder: also compare its log-probs with transformers"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = all_cases()
        lines, fine = table(cases, run_cases(cases, Path(folder), timeout_s=600.0))
        print("\n".join(lines))
        if options.model is not None:
            from parity_model import compare

            lines, good = compare(options.model, Path(folder))
            print("\n".join(lines))
            fine &= good
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
