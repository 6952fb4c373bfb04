#!/usr/bin/env bash
# One training step in every parallel layout against one rank, as a table; exits non-zero above 1e-5.
# Usage: scripts/parity.sh [--model HF_FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${MDAPO_PYTHON:-.venv/bin/python}
[ -x "$python" ] || { bash scripts/install.sh; }
PYTHONPATH="$PWD" OMP_NUM_THREADS=1 exec "$python" tests/distributed/parity.py "$@"
