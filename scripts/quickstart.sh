#!/usr/bin/env bash
# From a clean clone to a trained model on a laptop: environment, model, training, table before and after.
#   bash scripts/quickstart.sh run.seed=1              arguments are overrides of configs/quickstart.yaml
#   bash scripts/quickstart.sh rollout.engine=sglang   the same against a real SGLang server, which it installs
# The same command resumes a run that was stopped.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash scripts/install.sh
bin=${VENV:-$root/.venv}/bin

has_sglang() {
    "$1" -c 'import sys, importlib.util as u; sys.exit(u.find_spec("sglang") is None)' 2>/dev/null
}

# Sets $server to the Python of an environment with SGLang; "" for mdapo's own.
find_server() {
    server=
    if has_sglang "$bin/python"; then return; fi
    server=${MDAPO_SGLANG_ENV:+$MDAPO_SGLANG_ENV/bin/python}
    if [ -n "$server" ] && has_sglang "$server"; then return; fi
    local device
    device=$("$bin/python" -c 'from mdapo import device; print(device.current().kind)')
    if [ "$device" != cpu ]; then
        echo "quickstart: install SGLang for $device as its documentation says, in an environment of its own, and name" \
            "that: rollout.server_python=/path/to/bin/python" >&2
        exit 2
    fi
    server=$(bash scripts/install_sglang_cpu.sh | tee >(cat >&2) | tail -n 1)
}

engine=local named=
for word in "$@"; do
    case $word in
    rollout.engine=*) engine=$(tr -d "\"'" <<<"${word#*=}") ;;
    rollout.urls=* | rollout.server_python=*) named=yes ;;
    esac
done
if [ "$engine" = sglang ] && [ -z "$named" ]; then
    find_server
    if [ -n "$server" ]; then set -- "$@" "rollout.server_python=$server"; fi
fi
"$bin/python" scripts/fetch_model.py
exec "$bin/mdapo" train configs/quickstart.yaml "$@"
