"""megatron.* against the installed megatron-core."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mdapo.config import megatron_options
from mdapo.config.load import load
from mdapo.config.megatron_options import CLASSES, OWNED, Accepts, core_folder, fields
from mdapo.errors import UserError


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text("model: {path: m}\ndata: {train_files: [a.jsonl]}\n")
    return path


def problem(path: Path, option: str) -> str:
    with pytest.raises(UserError) as error:
        load(path, [f"megatron.{option}"])
    (line,) = error.value.problems
    return line.removesuffix(" (command line)")


@pytest.mark.parametrize(
    "option",
    [
        "transformer.deterministic_mode=true",
        "transformer.recompute_modules=[core_attn, mlp]",
        "transformer.no_rope_freq=[1, 0]",
        "transformer.no_rope_freq=4",
        "transformer.cross_entropy_fusion_impl=te",
        "transformer.num_microbatches_with_partial_activation_checkpoints=null",
        "transformer.init_method_std=1",
        "optimizer.optimizer_cpu_offload=true",
        "optimizer.optimizer_offload_fraction=1",
        "ddp.overlap_grad_reduce=true",
        "ddp.bucket_size=1000",
        "ddp.bucket_size=null",
    ],
)
def test_options_of_the_installed_version_pass(good: Path, option: str) -> None:
    load(good, [f"megatron.{option}"])


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("transformer.deterministc_mode=true", "did you mean megatron.transformer.deterministic_mode?"),
        ("optimizer.adam=1", "the installed megatron-core has no such option in its OptimizerConfig"),
        ("transformer.deterministic_mode=1", "must be true or false, not 1"),
        ("transformer.no_rope_freq=x", "must be a whole number or a list or null, not text 'x'"),
        ("transformer.cross_entropy_fusion_impl=x", "must be one of native, te, not text 'x'"),
        ("optimizer.loss_scale=big", "must be a number or null, not text 'big'"),
        ("ddp.bucket_size=1.5", "must be a whole number or null, not 1.5"),
        ("transformer.timers=1", "cannot be given in YAML: it takes a Python object"),
        ("optimizer.main_params_dtype=fp32", "cannot be given in YAML"),
        ("transformer.num_layers=4", "comes from the model folder (model.path)"),
        ("transformer.tensor_model_parallel_size=4", "use parallel.tensor"),
        ("transformer.sequence_parallel=true", "use parallel.sequence"),
        ("transformer.recompute_granularity=full", "use actor.recompute"),
        ("transformer.bf16=true", "use model.dtype"),
        ("transformer.hidden_dropout=0.1", "is 0: with dropout"),
        ("transformer.moe_router_topk=2", "is not supported: models are dense"),
        ("optimizer.lr=1", "use actor.lr"),
        ("optimizer.use_distributed_optimizer=true", "use parallel.distributed_optimizer"),
        ("ddp.average_in_collective=true", "the loss weights hold the global denominator"),
    ],
)
def test_other_options_are_refused_with_what_to_do(good: Path, option: str, says: str) -> None:
    assert says in problem(good, option)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("transformer.overlap_p2p_comm=false", "wrong gradients without any error"),
        ("transformer.batch_p2p_comm=true", "wrong gradients without any error"),
        ("transformer.perform_initialization=false", "counts the replicas of tensor-parallel ranks again"),
        ("transformer.transformer_impl=local", "attention and norm are its own"),
        ("transformer.context_parallel_size=2", "Transformer Engine's attention only"),
    ],
)
def test_combinations_that_core_computes_wrongly_cannot_be_asked_for(good: Path, option: str, says: str) -> None:
    assert says in problem(good, option)


def test_what_mdapo_sets_exists_in_the_installed_version() -> None:
    core = core_folder()
    assert core is not None
    for section, table in OWNED.items():
        known = fields(section, core)
        assert not [o for o in table if o not in known and not o.endswith("*")]


def test_fields_of_base_classes_count() -> None:
    core = core_folder()
    assert core is not None
    assert "tensor_model_parallel_size" in fields("transformer", core)  # of ModelParallelConfig
    assert len(fields("transformer", core)) > 200


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        ("bool", [True], [1, "true", None]),
        ("int", [1], [True, 1.0]),
        ("float", [1, 1.5], [True, "1"]),
        ("Optional[int]", [1, None], ["1"]),
        ("int | None", [1, None], ["1"]),
        ("Union[str, List[str]]", ["a", ["a"]], [1]),
        ("Literal['a', 'b']", ["a"], ["c", 1]),
        ("Optional[Literal['a']]", ["a", None], ["b"]),
        ("Dict[str, int]", [{"a": 1}], [[1]]),
        ("torch.dtype", [], ["float32", 1]),
        ("Optional[Callable]", [], [1, None]),
    ],
)
def test_annotations_say_which_values_fit(annotation: str, good: list[object], bad: list[object]) -> None:
    accepts = megatron_options._accepts(ast.parse(annotation, mode="eval").body)
    assert isinstance(accepts, Accepts)
    assert all(accepts.fits(value) for value in good)
    assert not any(accepts.fits(value) for value in bad)


def test_without_megatron_only_its_options_are_refused(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_options, "core_folder", lambda: None)
    load(good)
    with pytest.raises(UserError, match="megatron-core is not installed, so its options cannot be checked"):
        load(good, ["megatron.ddp.bucket_size=1"])


def test_each_section_names_a_class_that_is_there() -> None:
    core = core_folder()
    assert core is not None
    assert all((core / file).is_file() for _, file in CLASSES.values())
