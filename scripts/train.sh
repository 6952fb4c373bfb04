#!/usr/bin/env bash
# The plain torchrun line: one call on each machine, with the same arguments.
#   bash scripts/train.sh configs/dialog_distributed.yaml run.name=a parallel.tensor=4
# Environment: NNODES (1), NODE_RANK (0), MASTER_ADDR (127.0.0.1), MASTER_PORT (29500), NPROC_PER_NODE (GPUs here, else 2).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ $# -lt 1 ]; then
    sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
python=${VENV:-$root/.venv}/bin/python
if [ ! -x "$python" ]; then
    python=$(command -v python3 || true) # a container that has everything needs no .venv
    needed='import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, ("torch", "megatron", "typer"))))'
    if [ -n "${VENV:-}" ]; then
        echo "train: VENV=$VENV: no bin/python there; make it: VENV=$VENV bash scripts/install.sh" >&2
        exit 2
    elif [ -z "$python" ] || ! "$python" -c "$needed" 2>/dev/null; then
        echo "train: no $root/.venv, and ${python:-python3} has not what mdapo needs; run: bash scripts/install.sh" >&2
        exit 2
    fi
fi
gpus=$(nvidia-smi -L 2>/dev/null | wc -l || true)
nproc=${NPROC_PER_NODE:-$([ "$gpus" -gt 0 ] && echo "$gpus" || echo 2)}
nnodes=${NNODES:-1}
node_rank=${NODE_RANK:-0}
master=${MASTER_ADDR:-127.0.0.1}
port=${MASTER_PORT:-29500}
if [ "$nnodes" -gt 1 ] && [ -z "${MASTER_ADDR:-}" ]; then
    echo "train: NNODES=$nnodes wants MASTER_ADDR, the address of the machine with NODE_RANK=0" >&2
    exit 2
fi
for name in nproc:NPROC_PER_NODE nnodes:NNODES node_rank:NODE_RANK; do
    value=${name%%:*}
    if ! [[ ${!value} =~ ^[0-9]+$ ]]; then
        echo "train: ${name#*:}=${!value}: must be a whole number" >&2
        exit 2
    fi
done
if ! [[ ${OMP_NUM_THREADS-1} =~ ^0*[1-9][0-9]{0,3}(,0*[1-9][0-9]{0,3})*$ ]]; then
    echo "train: OMP_NUM_THREADS=$OMP_NUM_THREADS: must be a whole number from 1 on; unset it for the default" >&2
    exit 2
fi
if [ "$node_rank" -eq 0 ]; then # it listens there
    PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "$python" -m mdapo.trainer.launch "$port"
fi
export PYTHONUTF8=1 # torch reads files of its own in the locale's encoding, which they are not in
exec "$python" -m torch.distributed.run \
    --nnodes "$nnodes" --node-rank "$node_rank" --nproc-per-node "$nproc" \
    --master-addr "$master" --master-port "$port" \
    -m mdapo.trainer "$@"
