"""Batch and layout arithmetic, the model folder, and every layout that cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.config.load import Loaded, load
from mdapo.config.memory import estimate, stage_parameters
from mdapo.config.model_facts import ModelFacts, read_model
from mdapo.config.plan import RunPlan, balance_objective, file_problems, plan, require_plan
from mdapo.config.render import count, render_plan, size
from mdapo.config.schema import Config
from mdapo.errors import UserError

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SMOLLM2 = ModelFacts(
    architecture="LlamaForCausalLM", layers=30, hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152,
    max_positions=8192, tied=True, dtype="bfloat16", qkv_bias=False, qk_norm=False,
)  # fmt: skip
QWEN3_8B = ModelFacts(
    architecture="Qwen3ForCausalLM", layers=36, hidden=4096, ffn=12288, heads=32, kv_heads=8, head_dim=128,
    vocab=151936, max_positions=40960, tied=False, dtype="bfloat16", qkv_bias=False, qk_norm=True,
)  # fmt: skip
QWEN3_32B = replace(QWEN3_8B, layers=64, hidden=5120, ffn=25600, heads=64)
QWEN25_05B = ModelFacts(
    architecture="Qwen2ForCausalLM", layers=24, hidden=896, ffn=4864, heads=14, kv_heads=2, head_dim=64, vocab=151936,
    max_positions=32768, tied=True, dtype="bfloat16", qkv_bias=True, qk_norm=False,
)  # fmt: skip
RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def good(tmp_path: Path) -> Path:
    folder(tmp_path / "m", RAW)
    (tmp_path / "a.jsonl").write_text("{}\n")
    path = tmp_path / "good.yaml"
    path.write_text(
        f"model: {{path: {tmp_path}/m}}\ndata: {{train_files: [{tmp_path}/a.jsonl], val_files: [{tmp_path}/a.jsonl]}}\n"
    )
    return path


def folder(path: Path, raw: Any, *, without: str = "") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    files = {"config.json": json.dumps(raw), "model.safetensors": "x", "tokenizer.json": "{}"}
    for name, text in files.items():
        if name != without:
            (path / name).write_text(text)
    return path


def planned(path: Path, *overrides: str, world: int | None = None, model: ModelFacts | None = SMOLLM2) -> RunPlan:
    return plan(load(path, overrides).config, world_size=world, model=model)


def problems(path: Path, *overrides: str, world: int | None = None) -> list[str]:
    with pytest.raises(UserError) as error:
        require_plan(load(path, overrides), world_size=world)
    return [p.removesuffix(" (command line)") for p in error.value.problems]


@pytest.mark.parametrize(
    ("facts", "parameters"), [(SMOLLM2, 134_515_008), (QWEN3_8B, 8_190_735_360), (QWEN25_05B, 494_032_768)]
)
def test_parameters_are_those_of_the_published_models(facts: ModelFacts, parameters: int) -> None:
    assert facts.parameters == parameters
    tied_twice = facts.parameters + (facts.embedding_parameters if facts.tied else 0)
    assert stage_parameters(facts, tp=1, pp=1) == facts.parameters
    assert 2 * stage_parameters(facts, tp=1, pp=2) == pytest.approx(tied_twice, rel=1e-4)


def test_the_arithmetic_of_a_step(good: Path) -> None:
    found = planned(
        good,
        "data.train_prompt_bsz=12", "rollout.n_resp_per_prompt=4", "actor.ppo_mini_batch_size=6", "actor.ppo_epochs=2",
        "data.gen_batch_size=16", "actor.ppo_max_token_len=4000", "parallel.pipeline=2", "parallel.tensor=3",
        world=24,
    )  # fmt: skip
    assert not found.problems
    assert (found.world, found.dp, found.world_assumed) == (24, 4, False)
    assert (found.samples, found.gen_prompts) == (48, 16)
    assert (found.mini_batches, found.mini_samples, found.rank_samples) == (4, 24, 6)
    assert found.longest == 1536
    assert (found.micro_samples, found.micro_batches) == (2, 3)


def test_virtual_pipelines_round_micro_batches_up(good: Path) -> None:
    overrides = (
        "parallel.pipeline=2",
        "rollout.n_resp_per_prompt=3",
        "data.train_prompt_bsz=1",
        "actor.ppo_max_token_len=1600",
    )
    assert planned(good, *overrides).micro_batches == 3
    virtual = planned(good, *overrides, "parallel.virtual_pipeline=3")
    assert virtual.micro_batches == 4
    assert any("rounded up to a multiple of parallel.pipeline (2)" in n for n in virtual.notes)


def test_without_a_number_of_ranks_the_fewest_are_assumed(good: Path) -> None:
    found = planned(good, "parallel.pipeline=2", "parallel.data=4")
    assert (found.world, found.world_assumed, found.dp) == (8, True, 4)


@pytest.mark.parametrize(
    ("overrides", "world", "says"),
    [
        ("parallel.tensor=2", 2, "parallel.tensor: 2 does not divide the model's 9 attention heads, 3"),
        ("parallel.pipeline=4", 4, "parallel.pipeline: the model's 30 layers do not divide by"),
        ("parallel.pipeline=2 parallel.virtual_pipeline=2", 2, "parallel.pipeline: the model's 30 layers"),
        ("parallel.tensor=3", 4, "parallel.tensor: 4 ranks do not divide by parallel.tensor x"),
        ("parallel.pipeline=3", 2, "parallel.pipeline: 2 ranks do not divide by parallel.tensor x"),
        ("parallel.data=3", 2, "parallel.data: 3 does not fit: 2 ranks /"),
        ("data.train_prompt_bsz=3 rollout.n_resp_per_prompt=3", 2, "data.train_prompt_bsz: 3 x rollout.n_resp"),
        ("actor.ppo_mini_batch_size=1 rollout.n_resp_per_prompt=3", 2, "actor.ppo_mini_batch_size: 1 x rollout.n_resp"),
        ("model.max_context=9000", 1, "model.max_context: 9000 is more than the 8192 positions of the model"),
        ("parallel.tensor=3 parallel.sequence=true actor.ppo_max_token_len=1537 rollout.max_response_len=513", 3,
         "actor.ppo_max_token_len: 1537 holds no sample of"),
    ],
)  # fmt: skip
def test_a_layout_that_cannot_be_is_refused_with_what_could(good: Path, overrides: str, world: int, says: str) -> None:
    (problem,) = problems(good, *overrides.split(" "), world=world)
    assert problem.startswith(says)


@pytest.mark.parametrize(
    ("overrides", "world", "hint"),
    [
        ("parallel.tensor=2", 2, "set parallel.tensor=1 or 3"),
        ("parallel.pipeline=4", 4, "a product of 1, 2, 3, 5, 6, 10, 15 or 30 would"),
        ("parallel.tensor=3", 4, "start 3 or 6 ranks"),
        ("parallel.pipeline=3", 2, "start 3 ranks"),
        ("parallel.data=3", 2, "set parallel.data=2, or start 3 ranks"),
        ("data.train_prompt_bsz=3 rollout.n_resp_per_prompt=3", 2, "set data.train_prompt_bsz=2 or 4"),
        ("actor.ppo_mini_batch_size=1 rollout.n_resp_per_prompt=3", 2, "set actor.ppo_mini_batch_size=2"),
        (
            "data.train_prompt_bsz=7 actor.ppo_mini_batch_size=7 rollout.n_resp_per_prompt=3",
            2,
            "set actor.ppo_mini_batch_size=8 and data.train_prompt_bsz=8",
        ),
    ],
)
def test_the_hint_is_a_value_that_works(good: Path, overrides: str, world: int, hint: str) -> None:
    (problem,) = problems(good, *overrides.split(" "), world=world)
    assert problem.endswith(hint)


def test_all_that_is_wrong_is_told_at_once(good: Path) -> None:
    found = problems(
        good, "parallel.tensor=2", "parallel.pipeline=4", "parallel.data=7", "model.max_context=9000",
        "data.train_files=[nowhere.jsonl]", "model.tokenizer_path=no/folder", "model.chat_template=no.jinja", world=16,
    )  # fmt: skip
    keys = [p.split(":")[0] for p in found]
    assert sorted(keys) == sorted(
        ["model.tokenizer_path", "model.chat_template", "data.train_files.0", "parallel.data", "parallel.tensor",
         "parallel.pipeline", "model.max_context", "data.train_prompt_bsz"][:7]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "model", "world"),
    [
        ("dialog_base", QWEN3_8B, 8),
        ("dialog_distributed", QWEN3_32B, 64),
        ("dialog_npu", QWEN3_8B, 16),
        ("quickstart", SMOLLM2, 2),
    ],
)
def test_shipped_configurations_have_a_plan_that_fits(name: str, model: ModelFacts, world: int) -> None:
    loaded = load(CONFIGS / f"{name}.yaml")
    found = plan(loaded.config, world_size=world, model=model)
    assert found.problems == ()
    assert found.memory is not None
    assert found.memory.training < 80 << 30, "an 80 GB device"
    if name != "quickstart":
        assert found.memory.training < 60 << 30, "a 64 GB device too"


def test_memory_follows_the_formulae(good: Path) -> None:
    config = load(good, ["model.dtype=bfloat16", "rollout.max_running=2", "algorithm.kl.enable=true"]).config
    found = estimate(config, SMOLLM2, dp=4, longest=1536, micro_batches=3)
    n = SMOLLM2.parameters
    assert (found.parameters, found.gradients, found.optimizer, found.reference) == (2 * n, 4 * n, 12 * n // 4, 2 * n)
    assert found.engine == 2 * (n + 2 * 4096 * 2 * 30 * 3 * 64)
    assert found.vocabulary == (64 << 20) + 8192 * 576 * (3 * 2 + 4)
    fp32 = load(good, ["model.dtype=float32", "parallel.distributed_optimizer=false"]).config
    assert estimate(fp32, SMOLLM2, dp=4, longest=1536, micro_batches=3).optimizer == 8 * n
    full = load(good, ["actor.recompute=full"]).config
    assert estimate(full, SMOLLM2, dp=4, longest=1536, micro_batches=3).activations < found.activations / 9


@settings(max_examples=200, deadline=None)
@given(
    tp=st.integers(1, 9), pp=st.integers(1, 9), vpp=st.integers(1, 4), world=st.none() | st.integers(1, 100),
    groups=st.integers(1, 64), n=st.integers(1, 9), cap=st.integers(1, 10000), data=st.none() | st.integers(1, 9),
)  # fmt: skip
def test_any_layout_has_a_plan_and_its_problems_are_told_in_words(
    tp: int, pp: int, vpp: int, world: int | None, groups: int, n: int, cap: int, data: int | None
) -> None:
    base = load(CONFIGS / "quickstart.yaml").config
    config = base.model_copy(
        update={
            "parallel": base.parallel.model_copy(
                update={"tensor": tp, "pipeline": pp, "virtual_pipeline": vpp, "data": data, "sequence": tp > 1}
            ),
            "data": base.data.model_copy(update={"train_prompt_bsz": groups}),
            "rollout": base.rollout.model_copy(update={"n_resp_per_prompt": n}),
            "actor": base.actor.model_copy(update={"ppo_max_token_len": cap, "ppo_mini_batch_size": None}),
        }
    )
    found = plan(config, world_size=world, model=SMOLLM2)
    impossible = (found.world % (tp * pp)) or 9 % tp or 3 % tp or 30 % (pp * vpp) or (data or found.dp) != found.dp
    assert bool(impossible or groups * n % found.dp) <= bool(found.problems)
    assert found.micro_batches * found.micro_samples >= found.rank_samples
    assert found.rank_samples * found.dp >= found.mini_samples
    assert render_plan(found, config, SMOLLM2)


def test_the_table_is_aligned_and_says_the_numbers(good: Path) -> None:
    loaded = load(good, ["parallel.pipeline=2"])
    found, model = require_plan(loaded, world_size=4)
    text = render_plan(found, loaded.config, model)
    assert "prompts a step    8 groups x 8 episodes = 64 samples" in text
    assert "layout            tensor 1 x pipeline 2 x data 2, distributed optimizer" in text
    assert "135 M parameters" in text
    assert "an estimate" in text
    rows = text.split("\n\n")[0].split("\n")[1:]
    assert {line[:20].rstrip().count("  ") for line in rows} == {1}, "one column of labels"


@pytest.mark.parametrize(
    ("section", "keys", "objective"),
    [
        ("parallel", {}, "slowest"),
        ("parallel", {"tensor": 3}, "slowest"),
        ("transformer", {"expert_model_parallel_size": 1}, "slowest"),
        ("transformer", {"expert_model_parallel_size": 4}, "lockstep"),
        ("ddp", {"data_parallel_sharding_strategy": "optim_grads_params"}, "slowest"),
        ("ddp", {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim"}, "slowest"),
        ("ddp", {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}, "lockstep"),
    ],
)
def test_ranks_that_meet_in_every_micro_batch_are_levelled_in_lockstep(
    section: str, keys: dict[str, object], objective: str
) -> None:
    """Not by `load`: layouts that spread experts or weights are refused there as yet."""
    config = load(CONFIGS / "quickstart.yaml").config.model_dump()
    (config["parallel"] if section == "parallel" else config["megatron"][section]).update(keys)
    changed = Config.model_validate(config)
    assert balance_objective(changed) == objective
    text = render_plan(plan(changed, world_size=None, model=None), changed, None)
    assert ("which wait for each other in every micro-batch" in text) == (objective == "lockstep")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ((), True),
        (("algorithm.rollout_correction.tis_cap=2",), False),
        (("algorithm.filter_groups.carry_over=false",), False),
        (("algorithm.filter_groups.max_staleness=0",), False),
    ],
)
def test_stale_groups_without_a_correction_are_told(good: Path, changes: tuple[str, ...], told: bool) -> None:
    found = plan(load(good, changes).config, world_size=2, model=SMOLLM2)
    assert any("uncorrected" in note for note in found.notes) is told


def test_numbers_are_short() -> None:
    assert [count(n) for n in (8_190_735_360, 134_515_008, 1_500, 12)] == ["8.19 B", "135 M", "1.5 k", "12"]
    assert [size(n) for n in (3 << 30, 5 << 20, 512)] == ["3.0 GiB", "5.0 MiB", "0.5 KiB"]


def test_a_model_folder_is_read(tmp_path: Path) -> None:
    facts, found = read_model(folder(tmp_path / "m", RAW))
    assert not found
    assert facts == SMOLLM2


@pytest.mark.parametrize(
    ("raw", "without", "says"),
    [
        (RAW, "config.json", "no config.json in"),
        (RAW, "model.safetensors", "no *.safetensors in"),
        ([1], "", "must hold a JSON object"),
        ({**RAW, "architectures": ["MixtralForCausalLM"]}, "", "architecture MixtralForCausalLM is not supported"),
        ({**RAW, "num_hidden_layers": "30"}, "", "num_hidden_layers must be a positive whole number, not '30'"),
        ({**RAW, "vocab_size": 0}, "", "vocab_size must be a positive whole number, not 0"),
        ({**RAW, "hidden_size": True}, "", "hidden_size must be a positive whole number, not True"),
    ],
)
def test_what_is_wrong_with_a_model_folder_is_told(tmp_path: Path, raw: Any, without: str, says: str) -> None:
    _, found = read_model(folder(tmp_path / "m", raw, without=without))
    (problem,) = found
    assert says in problem.text
    assert problem.key == "model.path"


def test_broken_json_missing_shards_and_old_weights_are_told(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", RAW)
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}})
    )
    (problem,) = read_model(path)[1]
    assert "2 of 2 weight files are missing" in problem.text
    (path / "config.json").write_text("{")
    assert any("cannot be read as JSON" in p.text for p in read_model(path)[1])
    old = folder(tmp_path / "old", RAW, without="model.safetensors")
    (old / "pytorch_model.bin").write_text("x")
    (problem,) = read_model(old)[1]
    assert "pytorch_model.bin is of the old kind" in problem.text


def test_a_missing_model_folder_says_how_to_get_one(good: Path) -> None:
    (problem,) = problems(good, "model.path=Qwen/Qwen3-8B")
    assert "no such folder: Qwen/Qwen3-8B; nothing is downloaded: hf download Qwen/Qwen3-8B" in problem


@pytest.mark.parametrize(
    "path", ["models/Qwen3-8B", "./Qwen/Qwen3-8B", "../Qwen3-8B", "/models/Qwen3-8B", "Qwen3-8B", "mine/m"]
)
def test_a_path_is_not_taken_for_a_name_on_the_hub(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (problem,) = problems(good, f"model.path={path}")
    assert "no such folder" in problem and "hf download" not in problem


def files_of(loaded: Loaded) -> list[str]:
    return [f"{p.key}: {p.text}" for p in file_problems(loaded.config)]


def test_an_engine_that_is_not_there_is_never_replaced_by_another(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mdapo.config.plan.PACKAGE", tmp_path)
    (problem,) = files_of(load(good, ["rollout.engine=sglang", "rollout.urls=['http://h:1']"]))
    assert problem == "rollout.engine: this version of mdapo has no SGLang engine; use local"
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "sglang_engine.py").write_text("")
    assert files_of(load(good, ["rollout.engine=sglang", "rollout.urls=['http://h:1']"])) == []


def test_files_that_are_not_there_are_told(good: Path, tmp_path: Path) -> None:
    assert files_of(load(good)) == []
    assert files_of(load(good, ["data.train_files=[package:customer_service_train.jsonl]"])) == []
    (problem,) = files_of(load(good, ["data.train_files=[package:../x.jsonl]"]))
    assert "is not shipped with mdapo; there are customer_service_handover.jsonl" in problem
    (problem,) = files_of(load(good, ["debug.mode=train", "debug.replay=no/replay", "data.train_files=[no.jsonl]"]))
    assert problem == "debug.replay: no such folder: no/replay"
    (problem,) = files_of(load(good, ["algorithm.kl.enable=true", "model.ref_path=no/model"]))
    assert problem.startswith("model.ref_path: no such folder")
    assert files_of(load(good, ["model.ref_path=no/model"])) == [], "not used, not asked for"
    (tmp_path / "m" / "tokenizer.json").unlink()
    (problem,) = files_of(load(good))
    assert "no tokenizer in" in problem
