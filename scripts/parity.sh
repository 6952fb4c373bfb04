#!/usr/bin/env bash
# One training step in every parallel layout against one rank, as a table; exits non-zero above 1e-5.
#   bash scripts/parity.sh [--model FOLDER]     FOLDER: also compare a real model's log-probs with transformers'
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash scripts/install.sh
export PYTHONPATH=$root OMP_NUM_THREADS=1
exec "${VENV:-$root/.venv}/bin/python" tests/distributed/parity.py "$@"
