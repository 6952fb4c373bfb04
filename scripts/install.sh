#!/usr/bin/env bash
# Makes .venv in the project from requirements.lock and installs mdapo into it, editable. A second run does nothing.
#   PYTHON=python3.12 bash scripts/install.sh     another interpreter (3.11 or newer)
#   VENV=/data/venv   bash scripts/install.sh     another place
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$root/.venv}
need_mb=${NEED_MB:-4000}

fail() {
    printf 'install: %s\n' "$@" >&2
    exit 2
}

stamp_now() {
    (cd "$root" && cat requirements.lock requirements-data.lock setup.py && echo "$root ${PYTHON:-}") | sha256sum | cut -d' ' -f1
}

suitable() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        suitable "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11 or newer" \
            "it says: $("$PYTHON" --version 2>&1 || true)"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.11 python3.12 python3.13; do
        if suitable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer found (python3 is: $(python3 --version 2>&1 || echo missing))" \
        "install one, or name it: PYTHON=/path/to/python3.11 bash scripts/install.sh"
}

pip_install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "$@" 2>"$log" && return
    grep -v '^WARNING: Location' "$log" | tail -15 >&2
    if grep -qiE 'no space left|disk quota' "$log"; then
        fail "the disk is full; about $need_mb MB are needed below $venv"
    elif grep -qiE 'connection|timed? ?out|name resolution|network is unreachable|proxy' "$log"; then
        fail "the package index cannot be reached; check the network, or pip's index settings (pip config list)"
    fi
    fail "pip could not install: $*"
}

if [ "$(cat "$venv/.mdapo-stamp" 2>/dev/null || true)" = "$(stamp_now)" ] && [ -x "$venv/bin/mdapo" ]; then
    exit 0
fi
started=$SECONDS
python=$(find_python)
mkdir -p "$venv" 2>/dev/null || fail "$venv cannot be written"
free_mb=$(df -Pm "$venv" | awk 'NR == 2 {print $4}')
[ "$free_mb" -ge "$need_mb" ] || fail "$free_mb MB free below $venv, about $need_mb MB are needed"

# Two installs at once (a test run and a training run) must not write the same folder.
exec 9>"$venv/.mdapo-lock"
flock 9 2>/dev/null || true
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "install: $venv ($("$python" --version), once, a few minutes)"
"$python" -m venv "$venv" >"$log" 2>&1 || {
    cat "$log" >&2
    fail "the virtual environment cannot be made (Debian: apt-get install python3-venv)"
}
pip_install -r "$root/requirements.lock"
pip_install --no-deps -r "$root/requirements-data.lock"
pip_install --no-deps --no-build-isolation -e "$root"
stamp_now >"$venv/.mdapo-stamp"
echo "install: done in $((SECONDS - started)) s"
