"""A whole run with tools: calls that the policy writes are run, answered and trained around, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tiny_run import Material, mdapo, metrics

from mdapo.data.chat import ChatFormat
from mdapo.data.wire import load_groups_file
from mdapo.environments.tools import load_tool
from mdapo.types import Message

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
CALL = '<tool_call>{"name":"calculator","arguments":{"expression":"6*7"}}</tool_call>'
ANSWER = "#### 42"
LESSONS = 250


def teach(model: Path, folder: Path, questions: list[str]) -> None:
    """Fit the tiny model to one way of using the tool: a random one would never write a call."""
    tools = (load_tool("calculator").declaration,)
    (folder / "tools.jinja").write_text(TEMPLATE)
    chat = ChatFormat.from_folder(str(model), str(folder / "tools.jinja"))

    def words(text: str) -> list[int]:
        return [*chat.tokenizer(text, add_special_tokens=False).input_ids, *chat.close_ids]

    rows, labels = [], []
    for question in questions:
        prompt = chat.prompt_ids([Message("user", question)], tools=tools)
        told = chat.observation_ids([Message("tool", "42")], after_stop=True)
        rows.append([*prompt, *words(CALL), *told, *words(ANSWER)])
        labels.append([*[-100] * len(prompt), *words(CALL), *[-100] * len(told), *words(ANSWER)])
    policy = transformers.AutoModelForCausalLM.from_pretrained(model)
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    ids, target = torch.tensor(rows), torch.tensor(labels)
    for _ in range(LESSONS):
        loss = policy(input_ids=ids, labels=target).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.02:
            break
    policy.save_pretrained(folder / "taught")
    chat.tokenizer.save_pretrained(folder / "taught")


@pytest.mark.parametrize("mode", ["sync", "partial"])
def test_a_run_with_tools_calls_them_and_trains_on_what_the_policy_wrote(
    material: Material, tmp_path: Path, mode: str
) -> None:
    """In mode partial, conversations are put off and go on; they end as the others do."""
    questions = [f"{word} 6*7?" for word in ("Yes", "Now", "And", "But")]
    teach(material.model, tmp_path, questions)
    rows = [{"question": q, "answer": "42", "uid": q, "tools": ["calculator"]} for q in questions]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {"name": "tool_use", "args": {"tools": ["calculator"], "answer": "####", "max_tool_calls": 3}}
    done = mdapo(
        "train",
        str(material.config),
        f"run.dir={tmp_path}",
        f"model.path={tmp_path / 'taught'}",
        f"model.chat_template={tmp_path / 'tools.jinja'}",
        "model.max_context=256",
        f"data.train_files=[{tmp_path / 'rows.jsonl'}]",
        f"data.val_files=[{tmp_path / 'rows.jsonl'}]",
        "data.max_prompt_len=72",
        f"environment={json.dumps(environment)}",
        "reward.functions=[{name: tool_use}]",
        "reward.workers=0",
        "rollout.max_turns=3",
        "rollout.max_turn_len=90",
        "rollout.max_response_len=180",
        "actor.ppo_max_token_len=512",
        "actor.lr=1e-4",
        "algorithm.filter_groups.enable=false",
        "run.total_steps=2",
        "run.eval_every=0",
        "tracking.replay=true",
        f"rollout.mode={mode}",
        *(["rollout.over_sampling=2.0", "rollout.max_running=6"] if mode == "partial" else []),
    )
    assert done.code == 0, (done.out, done.err)
    rows_of_metrics = metrics(tmp_path / "run")
    assert len(rows_of_metrics) == 2
    assert (rows_of_metrics[1]["rollout/groups_unfinished_in"] > 0) == (mode == "partial"), "none went on"
    episodes = [
        episode
        for file in sorted((tmp_path / "run" / "replay").glob("step_*.safetensors"))
        for group in load_groups_file(file)
        for episode in group.episodes
    ]
    called = [e for e in episodes if [m.role for m in e.messages[:3]] == ["user", "assistant", "tool"]]
    assert len(called) > len(episodes) / 2, "the taught policy calls"
    right = [e for e in called if e.messages[2].content == "42" and e.messages[-1].content == ANSWER]
    assert right and all(e.end == "done" and e.score is not None and e.score.value == 1.0 for e in right)
    assert all(e.score is not None and e.score.parts["tool_use/tool_answers"] >= 1 for e in called)
    for episode in right:
        kinds = [(turn.role, bool(turn.mask.any())) for turn in episode.turns]
        assert kinds == [("assistant", True), ("tool", False), ("assistant", True)]
        assert np.isnan(episode.turns[1].logps).all() and np.isfinite(episode.turns[0].logps).all()
