"""benchmarks/gpu.sh without a GPU: what it says of each end of a stage. nvidia-smi and Python are stand-ins."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu.sh"
SMI = """#!/bin/sh
case "$*" in
    -L) echo "GPU 0: a device";;
    *compute_cap*) echo 9.0;;
    *) echo "a device, 1.2";;
esac
"""
# rows.py is run; what a stage would run says what the test wants.
PYTHON = f"""#!/bin/sh
case "$*" in
    *rows.py*) exec {sys.executable} "$@";;
    *compile.py*) echo "archs $MDAPO_CUDA_ARCHS"; exit 0;;
    *bench_ops.py*) echo "a traceback"; echo "Error: broken"; exit 1;;
    *"import megatron"*) exit 1;;
    *pytest*) echo "5 passed"; exit 0;;
esac
"""


def tool(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder)}
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("answer", ["exit 9", "echo 'No devices were found'"])
def test_without_a_gpu_it_says_so_and_ends_with_2(tmp_path: Path, answer: str) -> None:
    tool(tmp_path, "nvidia-smi", f"#!/bin/sh\n{answer}\n")
    found = run(tmp_path, str(tmp_path / "out"))
    assert found.returncode == 2 and "no GPU on this machine" in found.stderr
    assert not (tmp_path / "out").exists()


def test_without_a_folder_it_says_how_it_is_used(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert found.returncode == 2 and found.stderr.startswith("usage:")


def test_each_stage_is_a_row_whatever_its_end(tmp_path: Path) -> None:
    tool(tmp_path, "nvidia-smi", SMI)
    python = tool(tmp_path, "python", PYTHON)
    nvcc = tool(tmp_path, "nvcc", "#!/bin/sh\nexit 0\n")
    found = run(tmp_path, str(tmp_path / "out"), PYTHON=str(python), NVCC=str(nvcc), CUDA_HOME=str(tmp_path))
    assert found.returncode == 1, found.stderr
    with (tmp_path / "out" / "gpu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["hardware"], row["driver"]) for row in rows} == {("a device", "1.2")}
    ends = {row["stage"]: (row["measured"], row["note"]) for row in rows if row["what"] == "stage"}
    assert list(ends) == ["build", "sanitize", "ops", "actor", "suite"]
    assert ends["build"][0] == "ok" and ends["build"][1].endswith("archs 90a")
    assert ends["sanitize"][0] == "not run (no compute-sanitizer)"
    assert ends["ops"] == ("failed (code 1)", "Error: broken")
    assert ends["actor"][0].startswith("not run (no megatron-core or pydantic")
    assert ends["suite"][0] == "ok"


def test_the_stages_together_have_six_minutes() -> None:
    limits = [int(line.split()[2]) for line in SCRIPT.read_text().splitlines() if line.startswith("stage ")]
    assert len(limits) == 5 and sum(limits) <= 350
