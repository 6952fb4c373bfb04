#!/usr/bin/env bash
# Installs what is missing, fetches the small model, runs the tests; arguments go to pytest.
#   bash scripts/test.sh                                  everything
#   bash scripts/test.sh tests/unit -k masks              a part
#   bash scripts/test.sh -m "not slow and not model"      what needs neither time nor the model
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash scripts/install.sh
python=${VENV:-$root/.venv}/bin/python
case " $* " in
*"not model"*) ;;
*) "$python" scripts/fetch_model.py ;;
esac
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec "$python" -m pytest "$@"
