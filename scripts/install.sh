#!/usr/bin/env bash
# Makes .venv in the project from requirements.lock, installs mdapo into it, editable, and compiles its native ops where
# there is a compiler. A second run does nothing.
#   PYTHON=python3.12 bash scripts/install.sh     another interpreter (3.11 or newer)
#   VENV=/data/venv   bash scripts/install.sh     another place
#   MDAPO_BUILD=none  bash scripts/install.sh     no native ops (auto, none, cpu, cuda, npu: csrc/README.md)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$root/.venv}
stamp=$venv/.mdapo-stamp
need_mb=4000

fail() {
    printf 'install: %s\n' "$@" >&2
    exit 2
}

suitable() {
    # Its word, not its exit code: /bin/true has a good one. Cut short, for what never stops talking.
    [ "$("$1" -c 'import sys; print(sys.version_info >= (3, 11))' </dev/null 2>/dev/null | head -c 64)" = True ]
}

# Sets $python.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        suitable "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11 or newer" \
            "it says: $("$PYTHON" --version </dev/null 2>&1 | head -n 1 | head -c 200 || true)"
        python=$PYTHON
        return
    fi
    for python in python3 python3.11 python3.12 python3.13; do
        suitable "$python" && return
    done
    fail "no Python 3.11 or newer found (python3: $(python3 --version 2>&1 || true))" \
        "install one, or name it: PYTHON=/path/to/python3.11 bash scripts/install.sh"
}

# What the environment was made from. A change in the first line makes it anew, one in the second brings it up to date.
wanted() {
    echo "$root $(command -v "${PYTHON:-any}" || true)"
    (cd "$root" && cat requirements.lock requirements-data.lock setup.py) | sha256sum
}

current() {
    [ -x "$venv/bin/mdapo" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(wanted)" ]
}

pip_install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "$@" 2>"$log" && return
    grep -v '^WARNING: Location' "$log" | tail -n 15 >&2
    if grep -qiE 'no space left|disk quota' "$log"; then
        fail "the disk is full: about $need_mb MB are needed for $venv"
    elif grep -qiE 'connection|timed? ?out|name resolution|network is unreachable|proxy' "$log"; then
        fail "the package index cannot be reached: check the network, or pip's settings (pip config list)"
    fi
    fail "pip could not install: $*"
}

# Quick when nothing changed; without a compiler it says so in a line, and the plain-torch references serve.
native() {
    "$venv/bin/python" "$root/csrc/compile.py" || exit 2
}

if current; then
    native
    exit 0
fi
started=$SECONDS
find_python
parent=$(dirname "$venv")
mkdir -p "$parent" 2>/dev/null && [ -w "$parent" ] || fail "$parent cannot be written"

# Two at once (a test run and a training run) must not write the same environment: the second waits, and finds it made.
if command -v flock >/dev/null; then
    exec 9<"$parent"
    flock 9
    if current; then
        native
        exit 0
    fi
fi
free_mb=$(df -Pm "$parent" | awk 'NR == 2 {print $4}')
[ -x "$venv/bin/python" ] || [ "$free_mb" -ge "$need_mb" ] ||
    fail "$free_mb MB free for $venv, about $need_mb MB are needed"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
clear=
[ "$(head -n 1 "$stamp" 2>/dev/null)" = "$(wanted | head -n 1)" ] || clear=--clear
rm -f "$stamp"
echo "install: $venv with $("$python" --version), once, a few minutes"
"$python" -m venv $clear "$venv" >"$log" 2>&1 || {
    cat "$log" >&2
    fail "the virtual environment cannot be made (Debian and Ubuntu: apt-get install python3-venv)"
}
pip_install -r "$root/requirements.lock"
pip_install --no-deps -r "$root/requirements-data.lock"
MDAPO_BUILD=none pip_install --no-deps --no-build-isolation -e "$root"
native
wanted >"$stamp"
echo "install: done in $((SECONDS - started)) s"
