#!/usr/bin/env bash
# Makes a virtual environment with the real SGLang server on a CPU, from requirements-sglang-cpu.lock, and prints its
# interpreter as the last line. A second run does nothing.
#   bash scripts/install_sglang_cpu.sh [FOLDER]           default: $MDAPO_SGLANG_ENV, else .venv-sglang in the project
#   PYTHON=python3.11 bash scripts/install_sglang_cpu.sh  another interpreter (the lock is for 3.11)
#
# On a GPU install SGLang as its own documentation says, and name that environment in rollout.server_python.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:-${MDAPO_SGLANG_ENV:-$root/.venv-sglang}}
lock=$root/requirements-sglang-cpu.lock
stamp=$venv/.mdapo-sglang-stamp
need_mb=4000

fail() {
    printf 'install_sglang_cpu: %s\n' "$@" >&2
    exit 2
}

# Its word, not its exit code: /bin/true has a good one. Cut short, for what never stops talking.
suitable() {
    [ "$("$1" -c 'import sys; print(sys.version_info[:2] == (3, 11))' </dev/null 2>/dev/null | head -c 64)" = True ]
}

# Sets $python.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        suitable "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11, for which the lock is"
        python=$PYTHON
        return
    fi
    for python in python3.11 python3; do
        suitable "$python" && return
    done
    fail "no Python 3.11 found, for which the lock is (python3: $(python3 --version 2>&1 || true))" \
        "install one, or name it: PYTHON=/path/to/python3.11 bash scripts/install_sglang_cpu.sh"
}

current() {
    [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(sha256sum <"$lock")" ]
}

pip_install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "$@" 2>"$log" && return
    grep -v '^WARNING: Location' "$log" | tail -n 15 >&2
    if grep -qiE 'no space left|disk quota' "$log"; then
        fail "the disk is full: about $need_mb MB are needed for $venv"
    elif grep -qiE 'connection|timed? ?out|name resolution|network is unreachable|proxy' "$log"; then
        fail "the package index cannot be reached: check the network, or pip's settings (pip config list)"
    fi
    fail "pip could not install $lock"
}

# SGLang imports sgl_kernel, which has GPU builds only; a copy, so that the environment serves more than one checkout.
finish() {
    local from=$root/tests/sglang/stand_in/sgl_kernel/__init__.py
    local to=$venv/lib/python3.11/site-packages/sgl_kernel/__init__.py
    cmp -s "$from" "$to" || install -D -m 644 "$from" "$to"
    echo "$venv/bin/python"
    exit 0
}

if current; then finish; fi
started=$SECONDS
find_python
parent=$(dirname "$venv")
mkdir -p "$parent" 2>/dev/null && [ -w "$parent" ] || fail "$parent cannot be written"

# Two at once must not write the same environment: the second waits, and finds it made.
if command -v flock >/dev/null; then
    exec 9<"$parent"
    flock 9
    if current; then finish; fi
fi
free_mb=$(df -Pm "$parent" | awk 'NR == 2 {print $4}')
[ -x "$venv/bin/python" ] || [ "$free_mb" -ge "$need_mb" ] ||
    fail "$free_mb MB free for $venv, about $need_mb MB are needed"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
log=$work/log
rm -f "$stamp"
echo "install_sglang_cpu: $venv with $("$python" --version), once, two minutes or so"
"$python" -m venv --clear "$venv" >"$log" 2>&1 || {
    cat "$log" >&2
    fail "the virtual environment cannot be made (Debian and Ubuntu: apt-get install python3-venv)"
}
grep -E '^(sglang|torchvision)==' "$lock" >"$work/alone.txt"
grep -vE '^(sglang|torchvision)==' "$lock" >"$work/rest.txt"
pip_install -r "$work/rest.txt"
pip_install --no-deps -r "$work/alone.txt"
sha256sum <"$lock" >"$stamp"
echo "install_sglang_cpu: done in $((SECONDS - started)) s"
finish
