#!/usr/bin/env bash
# From a clean clone to a trained model on a laptop: environment, model, training, table before and after.
#   bash scripts/quickstart.sh run.seed=1     arguments are overrides of configs/quickstart.yaml
# The same command resumes a run that was stopped.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash scripts/install.sh
bin=${VENV:-$root/.venv}/bin
"$bin/python" scripts/fetch_model.py
exec "$bin/mdapo" train configs/quickstart.yaml "$@"
