"""token_logprob against what people write in plain torch: time, and memory in new processes.

    python benchmarks/ops/bench_token_logprob.py            4096 tokens; plain torch takes 5 GB for them
    python benchmarks/ops/bench_token_logprob.py 1024       times with fewer tokens, for a smaller machine

Baselines, both with autograd: *unfused*, full logits, log-softmax, gather, entropy; *chunked*, the same for 512 tokens
at a time under torch.utils.checkpoint, as trainers do to save memory.

Forward and backward of both outputs, in the shape of SmolLM2-135M. As in training, ours adds the weight's gradient to a
float32 buffer that is there anyway. Memory is what the process grows by at its peak (VmHWM, reset right before), with
the libraries' own buffers, without the gradient of the hidden states that is handed back.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import torch
from _goals import Goal, alternate, milliseconds, ratio, show
from torch import Tensor
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from mdapo import device
from mdapo.ops.token_logprob import logprob_and_entropy

TOKENS, HIDDEN, VOCAB = 4096, 576, 49152
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROVIDERS = ("unfused", "chunked", "ours")
ROUNDS, CHUNK = 4, 512


def plain(hidden_RH: Tensor, weight_VH: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
    log_p_RV = (hidden_RH @ weight_VH.t()).float().log_softmax(-1)
    logp_R = log_p_RV.gather(1, targets_R[:, None])[:, 0]
    return logp_R, -(log_p_RV.exp() * log_p_RV).sum(-1)


class Inputs:
    def __init__(
        self,
        tokens: int,
        dtype: torch.dtype,
        vocab: int = VOCAB,
        hidden: int = HIDDEN,
        where: torch.device = torch.device("cpu"),
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden_RH = torch.randn(tokens, hidden, generator=generator).to(where, dtype).requires_grad_()
        self.weight_VH = (torch.randn(vocab, hidden, generator=generator) / 20).to(where, dtype).requires_grad_()
        self.targets_R = torch.randint(0, vocab, (tokens,), generator=generator).to(where)
        grads_2R = torch.randn(2, tokens, generator=generator).to(where)
        self.grads = [grads_2R[0], grads_2R[1] / 100]
        self.main_grad_VH = torch.zeros(vocab, hidden, device=where)

    def ours(self) -> Tensor:
        outputs = logprob_and_entropy(self.hidden_RH, self.weight_VH, self.targets_R, main_grad_VH=self.main_grad_VH)
        return self._backward(outputs)

    def unfused(self) -> Tensor:
        return self._backward(plain(self.hidden_RH, self.weight_VH, self.targets_R))

    def chunked(self) -> Tensor:
        chunks = zip(self.hidden_RH.split(CHUNK), self.targets_R.split(CHUNK), strict=True)
        parts = [checkpoint(plain, hidden, self.weight_VH, targets, use_reentrant=False) for hidden, targets in chunks]
        logp, entropy = zip(*parts, strict=True)
        return self._backward((torch.cat(logp), torch.cat(entropy)))

    def _backward(self, outputs: tuple[Tensor, Tensor]) -> Tensor:
        """The log-probs, gradients dropped again."""
        torch.autograd.backward(outputs, self.grads)
        self.hidden_RH.grad = self.weight_VH.grad = None
        return outputs[0].detach()


def resident(field: str) -> int:
    """Bytes of this process by /proc: VmRSS now, VmHWM at its peak since that was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def extra_bytes(tokens: int, dtype: torch.dtype, how: str) -> int:
    """What one forward and backward adds to a process that has its inputs and its libraries. Once a process."""
    inputs = Inputs(tokens, dtype)
    getattr(Inputs(64, dtype, vocab=128), how)()  # what a library sets up at its first use, 35 MiB whatever the size
    ctypes.CDLL(None).malloc_trim(0)  # nothing freed before may be used again unseen
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    getattr(inputs, how)()
    return resident("VmHWM") - before - inputs.hidden_RH.nbytes


def memory_goal(name: str, tokens: int) -> Goal:
    """Of ours always for all tokens; plain torch's only where it was asked for as many."""
    extra = {}
    for how in PROVIDERS if tokens == TOKENS else PROVIDERS[2:]:
        command = [sys.executable, "-W", "ignore", __file__, str(TOKENS), "--memory", how, name]
        extra[how] = int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    logits = 4 * TOKENS * VOCAB
    what = f"{name}: extra memory over float32 logits"
    note = ", ".join(f"{how} {size / 2**20:.0f}" for how, size in extra.items()) + f" of {logits / 2**20:.0f} MiB"
    return Goal(what, extra["ours"] / logits, 1 / 16, at_most=True, note=note)


def time_goals(name: str, tokens: int) -> list[Goal]:
    inputs = Inputs(tokens, DTYPES[name])
    functions = {how: getattr(inputs, how) for how in PROVIDERS}
    for how in PROVIDERS[:2]:
        torch.testing.assert_close(inputs.ours(), functions[how](), rtol=0, atol=1e-3)
    seconds = alternate(functions, rounds=ROUNDS, repeat=1)
    note = ", ".join(f"{how} {milliseconds(times)}" for how, times in seconds.items())
    ratios = {how: ratio(seconds[how], seconds["ours"]) for how in PROVIDERS[:2]}
    return [Goal(f"{name}: faster than {how}", measured, 1.0, note=note) for how, measured in ratios.items()]


def measure(tokens: int = TOKENS) -> list[Goal]:
    device.current().activate()  # as a run does: freed memory is kept
    return [goal for name in DTYPES for goal in (memory_goal(name, tokens), *time_goals(name, tokens))]


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else TOKENS
    if "--memory" in sys.argv:
        print(extra_bytes(count, DTYPES[sys.argv[-1]], sys.argv[-2]))
    else:
        sys.exit(show(measure(count), title=f"token_logprob, {count} tokens"))
