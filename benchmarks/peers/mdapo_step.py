"""mdapo's own step behind the benchmark's worker protocol (see trl_step.py): the same prompts, lengths, dtype and
threads.

The dynamic batch is replaced by one that asks for fixed work (given prompts, responses of given lengths, random
rewards); engine, batching, actor, weight sync and the step itself are the ones that a run uses.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

WORK = json.loads(sys.argv[1])
os.environ["OMP_NUM_THREADS"] = str(WORK["threads"])
out = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

import numpy as np  # noqa: E402  (threads are set before torch is imported)

from mdapo.config.load import load  # noqa: E402
from mdapo.rollout.dynamic_batch import Collected  # noqa: E402
from mdapo.rollout.engine import Completion, Request, SamplingParams  # noqa: E402
from mdapo.rollout.local_engine import LocalEngine  # noqa: E402
from mdapo.trainer.flow import Trainer  # noqa: E402
from mdapo.trainer.step import step  # noqa: E402
from mdapo.types import Episode, Group, Message, Prompt, Score, Turn  # noqa: E402


class FixedWork:
    """Stands where the live rollout stands, on its engine and event loop."""

    def __init__(self, loop: asyncio.Runner, engine: LocalEngine, prompt_ids: list[list[int]]) -> None:
        self.loop, self.engine, self.prompt_ids, self.steps = loop, engine, prompt_ids, 0
        self.rng = np.random.default_rng(0)

    def collect(self, *, version: int, stop: object) -> Collected:
        return self.loop.run(self._collect(version))

    async def _collect(self, version: int) -> Collected:
        n, lengths = WORK["samples"], WORK["lengths"][self.steps % len(WORK["lengths"])]
        first = self.steps * WORK["prompts"]
        prompts = [self.prompt_ids[(first + i // n) % len(self.prompt_ids)] for i in range(len(lengths))]
        requests = [
            Request(ids, SamplingParams(max_new_tokens=m, ignore_eos=True), session=f"{i}", group=f"{i // n}", seed=i)
            for i, (ids, m) in enumerate(zip(prompts, lengths, strict=True))
        ]
        await self.engine.abort()
        done = await asyncio.gather(*(self.engine.generate(request) for request in requests))
        self.steps += 1
        episodes = [self._episode(i, ids, c, version) for i, (ids, c) in enumerate(zip(prompts, done, strict=True))]
        groups = [episodes[i : i + n] for i in range(0, len(episodes), n)]
        return Collected(groups=tuple(Group(g[0].prompt, tuple(g), version) for g in groups), stats={})

    def _episode(self, i: int, prompt_ids: list[int], completion: Completion, version: int) -> Episode:
        ids, logps = np.array(completion.ids, np.int32), np.array(completion.logps, np.float32)
        turn = Turn("assistant", ids, np.ones(len(ids), bool), logps, version, completion.finish)
        prompt = Prompt(uid=str(i // WORK["samples"]), row=0, messages=(Message("user", ""),))
        score = Score(value=float(self.rng.random()), outcome=0.0)
        return Episode(prompt, i % WORK["samples"], np.array(prompt_ids, np.int32), (turn,), (), "done", score)

    def trained(self, collected: Collected) -> None:
        pass

    def close(self) -> None:
        self.loop.run(self.engine.close())


def configuration(folder: str) -> list[str]:
    """Overrides that make the run the peer's: on-policy, one optimizer step, nothing written but the metrics."""
    rows = Path(folder, "rows.jsonl")
    rows.write_text(json.dumps({"question": "1?", "answer": "#### 1"}) + "\n")
    return [
        *(f"model.path={WORK['model']}", f"model.dtype={WORK['dtype']}", f"model.max_context={WORK['context']}"),
        *(f"run.dir={folder}", "run.name=bench", f"run.threads={WORK['threads']}", f"data.train_files=[{rows}]"),
        *(f"data.train_prompt_bsz={WORK['prompts']}", f"rollout.n_resp_per_prompt={WORK['samples']}"),
        *(
            f"rollout.max_running={WORK['prompts'] * WORK['samples']}",
            f"rollout.max_response_len={max(map(max, WORK['lengths']))}",
        ),
        *(
            f"data.max_prompt_len={WORK['prompt_len']}",
            "environment.name=gsm8k",
            "tracking.episodes_per_step=0",
            "actor.lr=1e-6",
        ),
        *(f"actor.ppo_max_token_len={WORK['micro_tokens']}", "algorithm.filter_groups.enable=false"),
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")
        config.write_text("model: {path: none}\ndata: {train_files: []}\n")
        with Trainer(load(config, configuration(folder))) as trainer:
            trainer.resume()
            trainer.sync()
            trainer.rollout = FixedWork(trainer.loop, trainer.engine, WORK["prompt_ids"])
            print(json.dumps({"ready": True}), file=out)
            while sys.stdin.readline().strip() == "step":
                started = time.perf_counter()
                record = step(trainer)
                seconds = time.perf_counter() - started
                times = {"generate": record.metrics["time/collect"], "train": seconds - record.metrics["time/collect"]}
                print(json.dumps({"seconds": seconds, **times}), file=out)
    print(json.dumps({"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}), file=out)


if __name__ == "__main__":
    main()
