"""The actor: the only part that imports megatron. Importing it readies this process's device for megatron-core."""

from mdapo import device

device.prepare_megatron()

if device.current().kind == "cpu":
    from megatron.core.tensor_parallel import random as _random

    from mdapo.device import cuda_stand_in

    cuda_stand_in.install_random(_random)
