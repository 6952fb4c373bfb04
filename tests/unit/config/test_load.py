"""From files to a configuration, or to every problem at once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mdapo.config.foreign import ELSEWHERE, VERL
from mdapo.config.load import Loaded, load
from mdapo.config.words import keys_of, section_of
from mdapo.errors import UserError

from .key_table import rows

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
GOOD = "model:\n  path: models/x\ndata:\n  train_files: [a.jsonl]\n"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as error:
        load(path, overrides)
    assert error.value.exit_code == 2
    return error.value.problems


def one(path: Path, *overrides: str) -> str:
    (problem,) = problems(path, *overrides)
    return problem.removesuffix(" (command line)")


def test_a_number_without_a_dot_is_a_number(good: Path) -> None:
    assert load(good, ["actor.lr=1e-6"]).config.actor.lr == 1e-6


def test_a_whole_number_serves_as_a_number(good: Path) -> None:
    value = load(good, ["rollout.temperature=1"]).config.rollout.temperature
    assert value == 1.0
    assert isinstance(value, float)


def test_sources_name_the_place_of_each_key(good: Path) -> None:
    sources = load(good, ["run.seed=3"]).sources
    assert sources["model.path"] == f"{good}:2"
    assert sources["run.seed"] == "command line"
    assert "run.name" not in sources


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("algorithm.clip_ratio_hgih=0.3", "unknown key, did you mean algorithm.clip_ratio_high?"),
        ("actor.clip_ratio_high=0.3", "unknown key, did you mean algorithm.clip_ratio_high?"),
        ("lr=1", "unknown key, did you mean actor.lr?"),
        ("actr=1", "unknown key, did you mean actor?"),
        ("zzz=1", "unknown key"),
        ("actor.lerning_rate=1", "unknown key, did you mean actor.lr?"),
        ("learning_rate=1", "unknown key, did you mean actor.lr?"),
        ("actor.optim.lr=1", "unknown key, did you mean actor.lr?"),
        ("batch_size=1", "unknown key, did you mean data.train_prompt_bsz?"),
        ("rollout.max_tokens=1", "unknown key, did you mean rollout.max_response_len?"),
        (
            "algorithm.turn_credit=0.5",
            "unknown key, did you mean algorithm.advantage.credit and algorithm.advantage.turn_share?",
        ),
        ("reward.overlong_buffer_cfg.len=long", "must be a whole number, or auto, not text 'long'"),
        ("reward.overlong_buffer_cfg.len=0", "must be at least 1, or auto, not 0"),
        ("actor.share_prefix=no", "must be auto, or true or false, not text 'no'"),
        ("rollout.n=1", "unknown key, did you mean rollout.n_resp_per_prompt?"),
        ("num_generations=1", "unknown key, did you mean rollout.n_resp_per_prompt?"),
        (
            "actor.clip_ratio=1",
            "unknown key, did you mean algorithm.clip_ratio_low and algorithm.clip_ratio_high?",
        ),
        ("algorithm.kl_coef=1", "unknown key, did you mean algorithm.kl.coef?"),
        ("trainer.total_steps=1", "unknown key, did you mean run.total_steps?"),
        ("actor.micro_batch_size=1", "unknown key, did you mean actor.ppo_micro_batch_size?"),
        ("parallel.tensor='2'", "must be a whole number, not text '2'"),
        ("parallel.tensor=2.0", "must be a whole number, not 2.0"),
        ("parallel.tensor=true", "must be a whole number, not true"),
        ("parallel.tensor=null", "must be a whole number, not nothing (null)"),
        ("parallel.tensor=[1]", "must be a whole number, not a list"),
        ("actor.lr='1e-6'", "must be a number, not text '1e-6'"),
        ("actor.lr=true", "must be a number, not true"),
        ("actor.lr=1e999", "must be a finite number, not inf"),
        ("parallel.sequence=yes", "must be true or false, not text 'yes'"),
        ("parallel.sequence=1", "must be true or false, not 1"),
        ("run.name=1", "must be text, not 1"),
        ("data.val_files=a.jsonl", "must be a list, not text 'a.jsonl'"),
        ("rollout.engine_args=[1]", "must be a mapping of names to values, not a list"),
        ("actor=5", "must be a section with keys of its own, not 5"),
        ("actor.lr=-1", "must be at least 0, not -1"),
        ("rollout.temperature=0", "must be at least 0.01, not 0"),
        ("rollout.temperature=1e-300", "must be at least 0.01, not 1e-300"),
        ("rollout.val.temperature=1e300", "must be at most 100, not 1e+300"),
        ("actor.lr=1e300", "must be at most 1, not 1e+300"),
        ("actor.eps=1e-300", "must be at least 1e-20, not 1e-300"),
        ("algorithm.kl.coef=1e300", "must be at most 1000000, not 1e+300"),
        ("algorithm.entropy_coef=-1e300", "must be at least -1000000, not -1e+300"),
        ("rollout.val.temperature=1e-300", "must be 0 (greedy) or at least 0.01, not 1e-300"),
        ("algorithm.gamma=1.5", "must be at most 1, not 1.5"),
        ("rollout.engine=sglagn", "must be one of local, sglang, not text 'sglagn'; did you mean sglang?"),
        ("algorithm.kl.estimator=3", "must be one of k1, k2, k3, not 3"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(good: Path, override: str, says: str) -> None:
    assert one(good, override) == f"{override.split('=')[0]}: {says}"


def test_an_empty_text_in_a_list_is_named(good: Path) -> None:
    assert one(good, "rollout.stop=['.', '']") == "rollout.stop.1: must not be empty"


def test_every_number_has_bounds_so_that_none_ends_as_infinity_in_the_middle_of_a_run() -> None:
    numbers = [(key, words) for key, words, _ in rows() if words.startswith("number")]
    assert len(numbers) > 20
    assert [key for key, words in numbers if "<" not in words or ">" not in words] == []


def test_verls_names_are_known(good: Path) -> None:
    readme = (Path(__file__).resolve().parents[3] / "configs" / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([a-z_.]+)` \| .* \| `([\w.]+)` \|$", readme, flags=re.MULTILINE)
    assert len(listed) > 50
    foreign = {theirs: ours for ours, theirs in listed if theirs != ours}
    assert foreign == VERL
    found = [p.removesuffix(" (command line)") for p in problems(good, *(f"{theirs}=1" for theirs in foreign))]
    assert sorted(found) == sorted(f"{theirs}: unknown key, did you mean {ours}?" for theirs, ours in foreign.items())


def test_names_from_elsewhere_lead_to_keys_that_there_are() -> None:
    ours = {key for key, _, _ in rows()}
    assert {key for text in ELSEWHERE.values() for key in text.split(" and ")} <= ours
    assert set(VERL.values()) <= ours


def test_a_list_of_nothing_but_a_wrong_entry_is_one_problem(good: Path) -> None:
    assert problems(good, "data.train_files=[null]") == [
        "data.train_files.0: must be text, not nothing (null) (command line)"
    ]


def test_list_entries_are_named_by_their_number(good: Path) -> None:
    found = problems(good, "reward.functions=[{name: gsm8k}, {nmae: x}]", "data.val_files=[a, 3]", "actor.betas=[0.9]")
    assert [p.removesuffix(" (command line)") for p in found] == [
        "data.val_files.1: must be text, not 3",
        "reward.functions.1.name: must be set",
        "reward.functions.1.nmae: unknown key, did you mean reward.functions.1.name?",
        "actor.betas.1: must be set",
    ]


def test_missing_keys_are_named_even_when_their_section_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("run: {seed: 1}\n")
    assert problems(path) == ["model.path: must be set", "data.train_files: must be set"]


def test_problems_of_every_kind_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "model:\n  pth: x\nparallel:\n  tensor: '2'\n  sequence: true\n  virtual_pipeline: 2\n"
        "megatron:\n  ddp:\n    bucket_siz: 1\nrun:\n  name: ${run.nam}\n"
    )
    assert sorted(problems(path, "rollout.n_resp_per_prompt=1")) == sorted(
        [
            f"run.name: ${{run.nam}}: no such key, did you mean ${{run.name}}? ({path}:11)",
            "model.path: must be set",
            "data.train_files: must be set",
            f"model.pth: unknown key, did you mean model.path? ({path}:2)",
            f"parallel.tensor: must be a whole number, not text '2' ({path}:4)",
            # sequence parallelism is not blamed: whether it fits depends on the broken key
            f"parallel.virtual_pipeline: 2 needs parallel.pipeline of at least 2 ({path}:6)",
            "rollout.n_resp_per_prompt: 1 leaves group_norm nothing to compare; set at least 2 (command line)",
            "megatron.ddp.bucket_siz: the installed megatron-core has no such option in its "
            f"DistributedDataParallelConfig, did you mean megatron.ddp.bucket_size? ({path}:9)",
        ]
    )


def test_references_take_values_and_defaults_with_their_type(good: Path) -> None:
    overrides = [
        "data.gen_batch_size=${data.train_prompt_bsz}",
        "data.val_files=${data.train_files}",
        "run.name=run-${run.seed}-${algorithm.name}",
        "actor.min_lr=${actor.lr}",
        "actor.lr=${algorithm.kl.coef}",
    ]
    config = load(good, overrides).config
    assert config.data.gen_batch_size == 8
    assert config.data.val_files == ["a.jsonl"]
    assert config.run.name == "run-0-dapo"
    assert config.actor.min_lr == config.actor.lr == 0.001


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("${run.name}", "'${run.name}' leads in a circle back to itself"),
        ("${run.dir}", "'${run.dir}' leads in a circle back to itself"),
        ("${model.pth}", "${model.pth}: no such key, did you mean ${model.path}?"),
        ("${zzzzzz}", "${zzzzzz}: no such key"),
        ("${oc.env:HOME}", "only references such as ${data.train_prompt_bsz} can be used, not '${oc.env:HOME}'"),
        ("${env:HOME}", "only references such as"),
        ("a${", "only references such as"),
        ("${${run.dir}}", "only references such as"),
        ("${.name}", "only references such as"),
    ],
)
def test_a_reference_that_leads_nowhere_is_named(good: Path, reference: str, says: str) -> None:
    found = problems(good, "run.dir=${run.name}", f"run.name={reference}")
    assert any(p.startswith(f"run.name: {says}") for p in found), found


def test_environment_variables_cannot_leak_in(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_PLACE", "leaked-value")
    for text in ("${oc.env:SECRET_PLACE}", "$SECRET_PLACE", "${oc.decode:${oc.env:SECRET_PLACE}}"):
        try:
            shown = load(good, [f"data.system_prompt={text}"]).resolved_yaml()
        except UserError as error:
            shown = str(error)
        assert "leaked-value" not in shown


def test_null_takes_away_an_inherited_mapping(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(GOOD + "environment: {name: x, args: {a: 1}}\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\nenvironment: {args: null}\n")
    assert load(tmp_path / "b.yaml").config.environment.args == {}
    assert load(tmp_path / "b.yaml", ["environment.args.b=2"]).config.environment.args == {"b": 2}


@pytest.mark.parametrize("file", sorted(p.name for p in CONFIGS.glob("*.yaml") if p.name != "base.yaml"))
def test_shipped_configurations_load_and_survive_being_written(file: str, tmp_path: Path) -> None:
    loaded = load(CONFIGS / file)
    again = tmp_path / "again.yaml"
    again.write_text(loaded.resolved_yaml(), encoding="utf-8")
    assert load(again).config == loaded.config


def test_the_base_configuration_only_lacks_model_and_data() -> None:
    assert problems(CONFIGS / "base.yaml") == ["model.path: must be set", "data.train_files: must be set"]


def test_text_that_looks_like_something_else_survives_being_written(good: Path, tmp_path: Path) -> None:
    for text in ("1e5", "yes", "null", "12:30", "a: b", "\\${run.name}", "line\nbreak", "ünï"):
        loaded = load(
            good, [f"data.system_prompt={text!r}" if "\n" not in text else 'data.system_prompt="line\\nbreak"']
        )
        again = tmp_path / "again.yaml"
        again.write_text(loaded.resolved_yaml(), encoding="utf-8")
        assert load(again).config == loaded.config


def test_secrets_are_not_written(good: Path) -> None:
    shown = load(
        good,
        [
            "rollout.engine=sglang",
            "rollout.engine_args={hub_token: hide-me-1, tokenizer_mode: slow, max_total_tokens: 5}",
            "environment={name: x, args: {token: hide-me-2, nested: {password: hide-me-3}, key: hide-me-4}}",
            "reward.functions=[{name: 'a:b', args: {OPENAI_API_KEY: hide-me-5}}]",
        ],
    ).resolved_yaml()
    assert "hide-me" not in shown
    assert shown.count("<redacted>") == 5
    assert "tokenizer_mode: slow" in shown
    assert "max_total_tokens: 5" in shown
    assert "prompt_key: prompt" in shown
    shown = load(good, ["rollout.engine=sglang", "rollout.urls=['http://me:hide-me@host:1']"]).resolved_yaml()
    assert "http://<redacted>@host:1" in shown


def test_configuration_needs_no_torch_and_only_what_it_uses() -> None:
    """Case: ``mdapo check`` answers configuration errors at once."""
    code = (
        "import sys; from mdapo.config.load import load; import mdapo.config.plan, mdapo.config.render, mdapo.check\n"
        f"load({str(CONFIGS / 'dialog_distributed.yaml')!r}, ['megatron.transformer.deterministic_mode=true'])\n"
        "print(*sorted({'torch', 'transformers', 'megatron.core', 'omegaconf', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == ""


KEYS = [key for key, field in keys_of() if section_of(field.annotation) is not field.annotation]
VALUES = st.sampled_from(
    """1|0|-1|1e-6|1e999|2.5|true|null|''|x|[]|[1, a]|[{a: 1}]|{}|{a: {b: 1}}|local|sglang|train|gmpo|???
    ${run.seed}|${run.name}|${a|'${'|['${run.seed}']|11111111111111111111111111111111111111111111111111111""".replace(
        "\n", "|"
    ).split("|")
)
MANGLE = st.sampled_from(["{}", "{}x", "{}.x", "x{}", "{}.0", "{}.a.b"])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from([*KEYS, "model", "data", "actor", "base"]), MANGLE, VALUES), min_size=1, max_size=6
    )
)
def test_a_mutated_configuration_loads_or_is_refused_in_words(
    good: Path, mutations: list[tuple[str, str, str]]
) -> None:
    overrides = [f"{form.format(key)}={value}" for key, form, value in mutations]
    try:
        loaded = load(good, overrides)
    except UserError as error:
        assert error.problems
        assert all(": " in p and "\n" not in p and "pydantic" not in p for p in error.problems)
    else:
        assert isinstance(loaded, Loaded)
        assert loaded.resolved_yaml()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_mutated_file_loads_or_is_refused_in_words(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    text = (CONFIGS / "dialog_distributed.yaml").read_text().split("\n", 5)[-1].replace("dialog_base", "none") + GOOD
    lines = text.split("\n")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(lines) - 1))
        kind = data.draw(st.sampled_from(["drop", "twice", "indent", "cut", "junk"]))
        junk = data.draw(st.text(alphabet=":-[]{}&*!|>'\"%@`#, \tax1\x07é", max_size=6))
        line = lines[at]
        new = {
            "drop": [],
            "twice": [line, line],
            "indent": [" " + line],
            "cut": [line[: len(line) // 2]],
            "junk": [line + junk],
        }
        lines[at : at + 1] = new[kind]
        lines = lines or [""]
    path = tmp_path_factory.mktemp("m") / "x.yaml"
    path.write_text("\n".join(lines), encoding="utf-8")
    try:
        load(path)
    except UserError as error:
        assert error.problems


DEADLINES = {key for key, _ in keys_of() if key.endswith("timeout_s")}


def test_a_deadline_that_no_wait_can_have_is_refused(good: Path) -> None:
    """poll() takes milliseconds in 32 bits, and a process group refuses both ends."""
    assert {
        "environment.timeout_s",
        "run.init_timeout_s",
        "reward.timeout_s",
        "rollout.episode_timeout_s",
        "rollout.start_timeout_s",
        "sync.timeout_s",
    } == DEADLINES
    for key in DEADLINES:
        for value in ("1e9", "1e30"):
            assert one(good, f"{key}={value}").startswith(f"{key}: must be at most 86400, not ")
        assert one(good, f"{key}=1e-9").startswith(f"{key}: must be at least ")
        assert load(good, ["run.init_timeout_s=86400", f"{key}=86400"]).sources[key] == "command line"


def test_a_current_folder_that_is_gone_is_named(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UserError, match="the current folder cannot be used"):
        load(good)
