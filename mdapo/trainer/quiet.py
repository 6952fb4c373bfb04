"""Warnings of the parts we stand on that say nothing to people who run this; by message, all others are shown."""

from __future__ import annotations

import warnings

# Start of the message (a regular expression), and why it may go unseen.
KNOWN = {
    # Core looks for the kernels of Transformer Engine and Apex; start-up says what is used instead.
    r"(Transformer Engine and )?Apex (is|are) not installed": UserWarning,
    # Core reads an option of its own that it has renamed; nothing of the user's.
    r"full scope is deprecated": UserWarning,
    # The stand-in for CUDA tensors passes every attribute of a tensor on; nobody wants the gradient of an inner one.
    r"The \.grad attribute of a Tensor that is not a leaf Tensor": UserWarning,
    # Core's checkpoints are made of torch's ShardedTensor.
    r"Please use DTensor instead": FutureWarning,
    # Core 0.16.1 calls collectives by names that torch 2.13 renamed; they do the same.
    r"`torch\.distributed\.\w+` is deprecated": FutureWarning,
}


def silence_known_warnings() -> None:
    """Call once in a process, before megatron is imported."""
    for message, category in KNOWN.items():
        warnings.filterwarnings("ignore", message=message, category=category)
