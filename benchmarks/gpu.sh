#!/usr/bin/env bash
# All that mdapo has to say about a GPU, from source, without a network, in at most six minutes:
#   bash benchmarks/gpu.sh OUT
# Builds the native ops, runs their vectors on the device, looks for bad accesses and races (compute-sanitizer), measures
# the ops against their baselines, and a step of the Megatron actor in the shape of a 1.5B model. OUT/gpu.csv gets a row a
# result, with hardware, driver and date, OUT/<stage>.log what a stage said. A stage that cannot run is a row "not run
# (why)", the next one begins. To keep results: copy OUT/gpu.csv to benchmarks/results/<hardware>_<yyyy-mm>.csv.
#
# PYTHON (default python3) has a CUDA build of torch, numpy, safetensors, pytest, pytest-timeout, hypothesis.
# MDAPO_WHEELS is a folder of wheels with what the actor needs beyond that, fetched elsewhere for that Python:
#   pip download --no-deps --only-binary=:all: --python-version 3.12 -d wheels \
#       $(grep -iE '^(megatron-core|pydantic|pydantic_core|annotated-types|typing-inspection|typing_extensions)==' requirements.lock)
# Exit code: 0, also where a stage could not run; 1 where one failed; 2 without a GPU or OUT.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -eq 1 ] || { echo "usage: bash benchmarks/gpu.sh OUT (a folder for the results)" >&2; exit 2; }
if ! nvidia-smi -L 2>/dev/null | grep '^GPU' >/dev/null; then
    echo "gpu.sh: no GPU on this machine (nvidia-smi lists none): nothing was run" >&2
    exit 2
fi
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
python=${PYTHON:-python3}
export PYTHONPATH=$PWD:$out/site MDAPO_DEVICE=cuda MDAPO_BUILD=cuda PYTHONDONTWRITEBYTECODE=1
export HYPOTHESIS_STORAGE_DIRECTORY=$out/hypothesis MAX_JOBS=${MAX_JOBS:-$(nproc)}
toolkit=${CUDA_HOME:-/usr/local/cuda}/bin
nvcc=$(command -v "${NVCC:-$toolkit/nvcc}" nvcc | head -n 1)
failed=0 left=0
rm -f "$out/gpu.csv"

row() { "$python" benchmarks/gpu/rows.py "$out/gpu.csv" "$@"; }

# stage NAME SECONDS COMMAND...: what a stage leaves of its time, those behind it may use. Code 3: it cannot run here.
stage() {
    local name=$1 started=$SECONDS code=0
    left=$((left + $2))
    timeout -k 5 "$left" "${@:3}" >"$out/$name.log" 2>&1 || code=$?
    local taken=$((SECONDS - started)) last
    last=$(grep -v '^ *$' "$out/$name.log" | tail -n 1 | cut -c 1-200)
    case $code in
        0) row "$name" stage ok "" "$taken s; $last" ;;
        3) row "$name" stage "not run ($last)" ;;
        124 | 137) failed=1 && row "$name" stage "not run to its end (stopped after $left s)" "" "$last" ;;
        *) failed=1 && row "$name" stage "failed (code $code)" "" "$last" ;;
    esac
    left=$((left - taken))
    [ $left -ge 0 ] || left=0
}

build() {
    [ -n "$nvcc" ] || { echo "no nvcc"; return 3; }
    local capability
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
    export MDAPO_CUDA_ARCHS=$([ "$capability" = 90 ] && echo 90a || echo "$capability")
    "$python" csrc/compile.py || return 1
    if [ -n "${MDAPO_WHEELS:-}" ]; then
        "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$out/site" "$MDAPO_WHEELS"/*.whl
    fi
}

suite() {
    "$python" -m pytest -q -p no:cacheprovider tests/ops -k "cuda and not twin" || return 1
    # Without a library all of them are skipped, which is no success.
    "$python" -c 'from mdapo.ops.registry import native_backends as n
assert "cuda" in n()["pack"] and "cuda" in n()["token_logprob_stats"], "no CUDA kernels are loaded"'
}

sanitize() {
    local checker program=$out/cuda_kernels tool code=0
    checker=$(command -v "$toolkit/compute-sanitizer" compute-sanitizer | head -n 1)
    [ -n "$nvcc" ] || { echo "no nvcc"; return 3; }
    [ -n "$checker" ] || { echo "no compute-sanitizer"; return 3; }
    "$nvcc" -std=c++17 -O1 -lineinfo -arch=native --expt-relaxed-constexpr -Icsrc tests/ops/sanitize/cuda_kernels.cu \
        -o "$program" || return 1
    "$program" 200 || return 1
    for tool in memcheck racecheck initcheck; do
        if timeout 20 "$checker" --tool $tool --error-exitcode 9 "$program" 20 2>&1 | tee "$out/$tool.log"; then
            row sanitize "$tool" "0 findings" "" "pack, mask_spans, token_logprob; 20 random cases each"
        else
            row sanitize "$tool" "failed" "" "$(grep -m 2 '^=========' "$out/$tool.log" | tail -n 1 | cut -c 1-200)"
            code=1
        fi
    done
    return $code
}

actor() {
    "$python" -c "import megatron.core, pydantic" || { echo "no megatron-core or pydantic: set MDAPO_WHEELS"; return 3; }
    MDAPO_REQUIRE_NATIVE=1 "$python" -W ignore benchmarks/gpu/bench_actor.py "$out/gpu.csv"
}

export -f row build suite sanitize actor
export python out toolkit nvcc
stage build 80 bash -uo pipefail -c build
stage sanitize 60 bash -uo pipefail -c sanitize
stage ops 55 env MDAPO_REQUIRE_NATIVE=1 "$python" benchmarks/gpu/bench_ops.py "$out/gpu.csv"
stage actor 75 bash -uo pipefail -c actor
stage suite 80 bash -uo pipefail -c suite
echo && "$python" benchmarks/gpu/rows.py "$out/gpu.csv"
exit $failed
