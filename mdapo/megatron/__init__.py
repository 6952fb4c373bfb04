"""The actor: the only part that imports megatron. Importing it readies this process's device for megatron-core."""

import warnings

from mdapo import device

# Core tells every rank that Apex and Transformer Engine are absent, which mdapo knows and doesn't need, and reads
# ``.grad`` of views on its way through the parameters.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")

device.prepare_megatron()

if device.current().kind == "cpu":
    from megatron.core.tensor_parallel import random as _random

    from mdapo.device import cuda_stand_in

    cuda_stand_in.install_random(_random)
