"""TRL's GRPOTrainer behind the benchmark's worker protocol: one step for each line on stdin, one JSON line back.

Runs in TRL's own virtual environment (bench_step.py makes it). Responses end at given lengths: what ``generate``
returns is overwritten by the end token from there on, which costs TRL exactly what real end tokens of a ragged batch
would cost (``generate`` runs until the longest row is done, the training batch is padded to it).
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time

os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false"}
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

WORK = json.loads(sys.argv[1])
torch.set_num_threads(WORK["threads"])
torch.manual_seed(0)
out = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # progress of the library goes to stderr, the protocol has stdout to itself


class Clock(TrainerCallback):
    """Waits for a command before each step, and reports after it."""

    step = 0
    generate_s = 0.0

    def on_step_begin(self, *_: object, **__: object) -> None:
        if sys.stdin.readline().strip() != "step":
            finish()
        self.started, self.generate_s = time.perf_counter(), 0.0

    def on_step_end(self, *_: object, **__: object) -> None:
        total = time.perf_counter() - self.started
        print(json.dumps({"seconds": total, "generate": self.generate_s, "train": total - self.generate_s}), file=out)
        self.step += 1


def finish() -> None:
    print(json.dumps({"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}), file=out)
    out.flush()
    os._exit(0)


def reward(completions: list[str], **_: object) -> list[float]:
    return [(hash(c) % 1000) / 1000 for c in completions]


tokenizer = AutoTokenizer.from_pretrained(WORK["model"], padding_side="left")
model = AutoModelForCausalLM.from_pretrained(WORK["model"], dtype=getattr(torch, WORK["dtype"]))
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
clock = Clock()
original = model.generate


def generate(*args: object, **kwargs: object) -> torch.Tensor:
    started = time.perf_counter()
    lengths = WORK["lengths"][clock.step % len(WORK["lengths"])]
    config = kwargs["generation_config"]
    config.max_new_tokens = config.min_new_tokens = max(lengths)
    rows = original(*args, **kwargs)
    for row, length in zip(rows, lengths, strict=True):
        row[WORK["prompt_len"] + length - 1 :] = tokenizer.eos_token_id
    clock.generate_s = time.perf_counter() - started
    return rows


model.generate = generate
samples = WORK["prompts"] * WORK["samples"]
new_tokens = max(max(lengths) for lengths in WORK["lengths"])
# All samples at once where their padded logits fit a laptop, else as many as do: 32 x 288 tokens took 19 GB.
micro = max(n for n in range(1, samples + 1) if samples % n == 0 and n * (WORK["prompt_len"] + new_tokens) <= 2304)
arguments = GRPOConfig(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=micro,
    gradient_accumulation_steps=samples // micro,
    num_generations=WORK["samples"],
    max_completion_length=new_tokens,
    max_steps=10_000,
    learning_rate=1e-6,
    logging_steps=100_000,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    bf16=WORK["dtype"] == "bfloat16",
    beta=0.0,
    loss_type="dapo",
    epsilon_high=0.28,
    temperature=1.0,
    gradient_checkpointing=False,
    disable_tqdm=True,
    generation_kwargs={"min_new_tokens": new_tokens},
)
trainer = GRPOTrainer(
    model=model,
    reward_funcs=reward,
    args=arguments,
    train_dataset=Dataset.from_list([{"prompt": text} for text in WORK["texts"]]),
    processing_class=tokenizer,
    callbacks=[clock],
)
print(json.dumps({"ready": True}), file=out)
trainer.train()
