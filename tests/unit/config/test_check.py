"""``mdapo check``: configuration, plan and one conversation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mdapo.check import REPLY, check
from mdapo.config.model_facts import require_facts

from ..data.templates import SMOLLM2, small_tokenizer

RAW = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = tmp_path / "m"
    small_tokenizer(SMOLLM2).save_pretrained(model)
    (model / "config.json").write_text(json.dumps(RAW))
    facts = require_facts(model)
    save_file({name: torch.zeros(shape) for name, shape in facts.weight_shapes().items()}, model / "model.safetensors")
    path = tmp_path / "x.yaml"
    path.write_text(
        f"model: {{path: {model}}}\n"
        "data: {train_files: [package:customer_service_train.jsonl]}\n"
        "environment: {name: customer_service}\n"
        "rollout: {max_turns: 4}\n"
    )
    return path


def test_a_good_configuration_shows_all_three_parts(config: Path) -> None:
    report = check(config, ["run.seed=3"], world_size=2)
    assert report.exit_code == 0
    assert report.problems == ()
    assert "seed: 3" in report.text
    assert "layout            tensor 1 x pipeline 1 x data 2" in report.text
    assert "training prompts: " in report.text
    assert "chat template: append-only" in report.text


def test_weights_that_are_not_the_models_are_a_problem(config: Path, tmp_path: Path) -> None:
    (tmp_path / "m" / "config.json").write_text(json.dumps(RAW | {"hidden_size": 128}))
    report = check(config)
    assert report.exit_code == 2
    assert any("weights that do not fit config.json" in problem for problem in report.problems)


def test_the_conversation_shows_every_token_with_its_mask(config: Path) -> None:
    shown = check(config).text.split("# one conversation")[1]
    rows = [line.split(" │ ", 1) for line in shown.split("\n") if " │ " in line]
    spoken = "".join(text.replace("·", "") for mask, text in rows if mask.strip() == "1")
    heard = "".join(text.replace("·", "") for mask, text in rows if mask.strip() == "0")
    assert spoken == (REPLY + "<|im_end|>") * 2
    assert heard.count("<|im_start|>assistant⏎") == 2, "a header for each of the two turns"
    assert heard.count("<|im_start|>user⏎") == 2, "the opening and the customer's answer"
    assert "⏎<|im_start|>user" in heard, "the separator after the policy's turn is there, with mask 0"
    tokens = sum(int(n) for n in re.findall(r"^[a-z]+, (\d+) tokens$", shown, re.MULTILINE))
    assert f"of {tokens} tokens" in shown
    assert "reward: " in shown


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["actor.lrr=1"], "actor.lrr: unknown key, did you mean actor.lr? (command line)"),
        (["parallel.tensor=3"], "parallel.tensor: 3 does not divide the model's 4 attention heads"),
        (["data.train_files=[nowhere.jsonl]"], "data.train_files.0: no such file: nowhere.jsonl"),
        (["environment.name=custmer_service"], "did you mean customer_service?"),
        (["environment.args.patiense=1"], "has no argument patiense, did you mean patience?"),
        (["environment.args.patience=0"], "environment.name=customer_service: refuses"),
        (["reward.functions=[{name: nothing}]"], "nothing"),
        (["data.max_prompt_len=3"], "data.max_prompt_len=3"),
    ],
)
def test_a_problem_of_any_part_ends_in_one_message_and_exit_code_2(
    config: Path, overrides: list[str], says: str
) -> None:
    report = check(config, overrides)
    assert report.exit_code == 2
    assert any(says in p for p in report.problems), report.problems
    assert report.text.endswith("\n".join(report.problems))


def test_a_broken_row_is_named_with_file_and_line(config: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": [{"role": "user", "content": "Hi."}]}\n{"prompt": \n')
    report = check(config, [f"data.train_files=[{rows}]", "environment.name=single_turn"])
    assert report.exit_code == 2
    assert any(p.startswith(f"{rows}:2") for p in report.problems)
    rows.write_text("")
    report = check(config, [f"data.train_files=[{rows}]", "environment.name=single_turn"])
    assert any("the data set is empty" in p for p in report.problems)
    assert any("reward" in p for p in report.problems), "single_turn has no reward of its own: told as well"


def test_training_from_a_replay_shows_no_conversation(config: Path, tmp_path: Path) -> None:
    report = check(config, ["debug.mode=train", f"debug.replay={tmp_path}"])
    assert report.exit_code == 0
    assert "# one conversation" not in report.text
