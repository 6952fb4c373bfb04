"""A whole run small enough for tests: a random model with a byte-level tokenizer, questions, a reward plug-in, and the
command line that runs it in processes of their own, with a deadline each.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 200.0  # of one run; it takes about ten seconds on an idle machine
QUESTIONS = 24
TWO_RANKS = ("parallel.data=2", "tracking.replay=true")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = """
run: {{seed: 3, total_steps: 6, save_every: 1, eval_every: 4, keep_checkpoints: 9, threads: 1, init_timeout_s: 60}}
model: {{path: {model}, dtype: float32, max_context: 96}}
data:
  train_files: [{train}]
  val_files: [{val}]
  train_prompt_bsz: 2
  gen_batch_size: 3
  max_prompt_len: 48
environment: {{name: "{plugin}:Echo"}}
reward:
  functions: [{{name: "{plugin}:vowels"}}]
  workers: 1
rollout: {{n_resp_per_prompt: 4, max_turns: 2, max_turn_len: 8, max_response_len: 48, max_running: 16}}
algorithm: {{filter_groups: {{metric: score, max_num_gen_batches: 4}}}}
actor: {{lr: 2.0e-3, ppo_max_token_len: 128, clip_grad: 1.0}}
parallel: {{data: 1}}
"""


@dataclass(frozen=True)
class Material:
    """Paths of what a run needs."""

    folder: Path
    model: Path
    config: Path


def make_material(folder: Path) -> Material:
    model = save_model(folder / "model")
    questions = [f"{word} {i}?" for i in range(QUESTIONS // 4) for word in ("Where", "When", "Why", "Who")]
    for name, rows in (("train", questions), ("val", questions[:3])):
        lines = [json.dumps({"prompt": [{"role": "user", "content": q}], "uid": f"{name}-{q}"}) for q in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    config = folder / "run.yaml"
    files = {
        "train": folder / "train.jsonl",
        "val": folder / "val.jsonl",
        "plugin": Path(__file__).with_name("plugin.py"),
    }
    config.write_text(CONFIG.format(model=model, **files))
    return Material(folder, model, config)


def save_model(folder: Path) -> Path:
    """A Llama of 4 layers and 4 heads, random, with a byte-level ChatML tokenizer, as a Hugging Face folder."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = ["<|im_start|>", "<|im_end|>", "<|spare|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]  # an odd number
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=len(vocab), hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(4.0)  # replies that depend on what was asked
    model.save_pretrained(folder)
    return folder


@dataclass
class Outcome:
    """How a command ended, and all that it said."""

    code: int
    out: str
    err: str
    seconds: float


class Command:
    """One ``mdapo`` command in processes of its own. ``wait`` has a deadline and leaves no process behind."""

    def __init__(self, *arguments: str, file_limit_bytes: int | None = None, **environment: str) -> None:
        """``file_limit_bytes``: no file grows beyond it, as on a disk that is full."""

        def prepare() -> None:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's, under which the tests may run, is inherited
            if file_limit_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit_bytes, file_limit_bytes))

        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mdapo.cli", *arguments],
            env=rank_environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=prepare,
        )

    @property
    def family(self) -> list[psutil.Process]:
        """The command's process and all below it."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank."""
        found = [
            p for p in self.family if _environment(p).get("RANK") == str(number) and "mdapo.trainer" in p.cmdline()
        ]
        return found[0]

    def wait(self, *, deadline_s: float = DEADLINE_S) -> Outcome:
        family = self.family
        try:
            out, err = self.process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            family = self.family
            for process in family:
                _kill(process)
            out, err = self.process.communicate(timeout=10)
            raise TimeoutError(f"not done within {deadline_s:.0f} s:\n{out[-3000:]}\n{err[-3000:]}") from None
        return Outcome(self.process.returncode, out, err, time.monotonic() - self.started)


def rank_environment(**more: str) -> dict[str, str]:
    """The environment of a command: this one without what would lead it elsewhere."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("MASTER_PORT", "MASTER_ADDR", "SABOTAGE", "SLOW", "LOCAL_FOR_SERVERS")
    }
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MDAPO_DEVICE": "cpu", **more}


def mdapo(*arguments: str, file_limit_bytes: int | None = None, **environment: str) -> Outcome:
    return Command(*arguments, file_limit_bytes=file_limit_bytes, **environment).wait()


def wait_for(condition: Callable[[], object], *, deadline_s: float = DEADLINE_S, of: Command | None = None) -> None:
    """Until ``condition`` holds, which ``of`` must bring about before it ends."""
    end = time.monotonic() + deadline_s
    while not condition():
        if of is not None and of.process.poll() is not None:
            raise AssertionError(of.wait())
        if time.monotonic() > end:
            raise TimeoutError(f"{condition} did not come true within {deadline_s:.0f} s")
        time.sleep(0.05)


def metrics(run: Path, *, leave_out: Sequence[str] = ("time/", "rollout/tokens_per_s")) -> list[dict[str, Any]]:
    """``metrics.jsonl``, without what depends on the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(tuple(leave_out))} for row in rows]


def weights(run: Path) -> bytes:
    return (run / "hf" / "model.safetensors").read_bytes()


def trained_prompts(run: Path) -> list[str]:
    """Uids of all prompts trained on, step after step, from the replay."""
    from mdapo.data.wire import load_groups_file

    files = sorted((run / "replay").glob("step_*.safetensors"))
    return [group.prompt.uid for file in files for group in load_groups_file(file)]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.Error:
        pass  # gone already
