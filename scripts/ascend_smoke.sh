#!/usr/bin/env bash
# For a machine with an Ascend NPU (Atlas A2 or A3), CANN 8.5 and torch_npu: builds the native ops from source and runs
# their vectors on the device. The kernels were tested on a host twin only; a report of this script's output is welcome.
#   source /usr/local/Ascend/ascend-toolkit/set_env.sh
#   SOC_VERSION=Ascend910B3 bash scripts/ascend_smoke.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${ASCEND_HOME_PATH:?run CANN\'s set_env.sh first}" "${SOC_VERSION:?as npu-smi info shows it, such as Ascend910B3}"
python=${PYTHON:-python}
MDAPO_BUILD=npu "$python" csrc/compile.py
export MDAPO_TEST_NPU=device PYTHONPATH=$PWD
"$python" -m pytest -q tests/ops/test_pack.py tests/ops/test_token_logprob.py tests/ops/test_token_logprob_edges.py -k npu
