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


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Says the version of its SGLang as an interpreter would; there is none of it here."""
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho '\"0.5.19\"'\n")
    fake.chmod(0o755)
    return fake


def servers_of(config: Path, *overrides: str) -> dict[str, str]:
    report = check(config, ["rollout.engine=sglang", *overrides])
    assert report.problems == (), report.problems
    [block] = [part for part in report.text.split("\n\n") if part.startswith("# servers")]
    return {line.split(None, 1)[0]: line.split(None, 1)[1] for line in block.split("\n")[1:]}


def test_servers_are_shown_with_their_python_their_place_and_what_a_sync_moves(config: Path, python: Path) -> None:
    own = f"rollout.server_python={python}"
    found = servers_of(config, own, "rollout.num_servers=2", "sync.check=true", "model.dtype=float32")
    assert found["SGLang"] == f"0.5.19, {python}"
    assert found["servers"] == "2 on cpu, beside the actor: they share its cores"
    parameters = require_facts(config.parent / "m").parameters
    assert found["sync"].startswith("tensor (chosen): shared memory; ")
    assert f"{4 * parameters / 2**20:.1f} MiB" in found["sync"] or f"{4 * parameters / 2**10:.1f} KiB" in found["sync"]
    assert found["sync"].endswith("in buckets of 512 MiB")
    assert found["sync.check"] == "after each sync, log-probs within 0.0001 of the actor's"
    found = servers_of(config, own, "sync.mode=disk", "sync.dir=/share/w", "sync.bucket_mb=64")
    assert found["sync"].startswith("disk: safetensors in /share/w; ")
    assert found["sync"].endswith("in buckets of 64 MiB")
    assert "sync.check" not in found


def test_servers_of_others_are_named(config: Path) -> None:
    found = servers_of(config, "rollout.urls=['http://127.0.0.1:1', 'http://127.0.0.1:2']", "sync.mode=distributed")
    assert found["servers"] == "http://127.0.0.1:1, http://127.0.0.1:2: running already, of others"
    assert found["sync"].startswith("distributed: broadcast, each byte once to all servers; ")


def test_a_server_that_there_is_no_way_to_is_a_problem_of_the_check(config: Path) -> None:
    report = check(config, ["rollout.engine=sglang", "rollout.urls=['http://no-such-host.invalid:1']"])
    assert report.exit_code == 2
    assert "no-such-host.invalid:1: no way there" in report.problems[0]


def test_the_local_engine_has_no_servers(config: Path) -> None:
    assert "# servers" not in check(config).text
