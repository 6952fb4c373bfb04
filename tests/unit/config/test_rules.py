"""Keys that contradict each other, one rule a line; and the presets."""

from __future__ import annotations

from pathlib import Path

import pytest

from mdapo.config.load import load
from mdapo.config.presets import PRESETS, resolve_algorithm
from mdapo.config.schema import Algorithm
from mdapo.errors import UserError


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text("model: {path: m}\ndata: {train_files: [a.jsonl]}\n")
    return path


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("run.name=a/b", "run.name: names a folder: letters, digits, - _ . + = only, not 'a/b'"),
        ("run.name=..", "run.name: names a folder"),
        ("run.name=''", "run.name: names a folder"),
        (f"run.name={'a' * 241}", "run.name: is longer than 240 bytes"),
        (f"run.dir=runs/{'é' * 121}/x", "run.dir: has a folder whose name is longer than 240 bytes"),
        ("run.total_steps=99999999999999999999999", "run.total_steps: must be at most 2147483647"),
        ("run.dir=''", "run.dir: must not be empty"),
        ("model.path=''", "model.path: must not be empty"),
        ("run.eval_every=5", "run.eval_every: is 5, but data.val_files is empty"),
        ("model.max_context=1535", "model.max_context: 1535 is less than data.max_prompt_len +"),
        ("actor.ppo_max_token_len=1535", "actor.ppo_max_token_len: 1535 is less than the longest sample, 1024 + 512"),
        ("rollout.max_turn_len=513", "rollout.max_turn_len: 513 is more than rollout.max_response_len=512"),
        (
            "actor.share_prefix=true actor.use_remove_padding=false",
            "actor.share_prefix: true needs actor.use_remove_padding=true",
        ),
        ("reward.overlong_buffer_cfg={enable: true, len: 513}", "reward.overlong_buffer_cfg.len: 513 is more than"),
        ("data.train_files=[]", "data.train_files: names no file"),
        ("data.gen_batch_size=1 data.train_prompt_bsz=11", "data.gen_batch_size: 10 rounds"),
        ("actor.ppo_mini_batch_size=3", "actor.ppo_mini_batch_size: 3 does not divide data.train_prompt_bsz=8"),
        ("actor.ppo_mini_batch_size=16", "actor.ppo_mini_batch_size: 16 does not divide data.train_prompt_bsz=8"),
        ("rollout.val.temperature=1e-9", "rollout.val.temperature: must be 0 (greedy) or at least 0.01, not 1e-09"),
        ("rollout.urls=['http://h:1']", "rollout.urls: are for rollout.engine=sglang"),
        ("rollout.engine_args={a: 1}", "rollout.engine_args: are SGLang's options; the local engine has none"),
        ("rollout.engine=sglang rollout.dtype=float32", "rollout.dtype: is for the local engine"),
        ("rollout.engine=sglang rollout.urls=[host:1]", "rollout.urls.0: must look like http://host:port"),
        ("rollout.engine=sglang rollout.urls=['http://h:1'] rollout.engine_args={a: 1}", "rollout.engine_args: are"),
        (
            "rollout.engine=sglang rollout.urls=['http://h:1'] rollout.router=h:1",
            "rollout.router: must look like http://host:port, not 'h:1'",
        ),
        ("rollout.router=http://h:1", "rollout.router: is for the servers of rollout.urls, which is empty"),
        ("rollout.key_file=k", "rollout.key_file: is for the servers of rollout.urls, which is empty"),
        ("rollout.engine=sglang rollout.top_k=1 rollout.temperature=0.7", "rollout.top_k: 1 is greedy to SGLang"),
        ("rollout.mode=async", "rollout.mode: async needs servers beside the trainer (rollout.engine=sglang)"),
        ("rollout.mode=partial rollout.max_staleness=0", "rollout.max_staleness: 0 lets no conversation"),
        ("rollout.mode=partial rollout.over_sampling=2.1", "rollout.over_sampling: 2.1 begins more groups than"),
        ("rollout.mode=partial algorithm.filter_groups.carry_over=false", "algorithm.filter_groups.carry_over: false"),
        ("rollout.over_sampling=0.5", "rollout.over_sampling: must be at least 1"),
        ("algorithm.rollout_correction.rollout_rs=token", "algorithm.rollout_correction.rollout_rs_threshold: must be"),
        ("algorithm.gamma=0.9 algorithm.advantage.credit=turn", "algorithm.gamma: 0.9 is the discount of"),
        ("algorithm.rollout_correction.rollout_is_threshold=0.9", "algorithm.rollout_correction.rollout_is_thres"),
        ("rollout.n_resp_per_prompt=1", "rollout.n_resp_per_prompt: 1 leaves group_norm nothing to compare"),
        ("rollout.n_resp_per_prompt=1 algorithm.name=rloo", "rollout.n_resp_per_prompt: 1 leaves rloo nothing"),
        ("rollout.n_resp_per_prompt=1 algorithm.name=reinforce++", "algorithm.filter_groups.enable: true would"),
        ("algorithm.clip_ratio_low=1", "algorithm.clip_ratio_low: 1 clips nothing"),
        ("actor.min_lr=1", "actor.min_lr: 1 is more than actor.lr=1e-06"),
        ("actor.betas=[0.9, 1]", "actor.betas: must be two numbers from 0 to below 1, not [0.9, 1.0]"),
        ("actor.lr_decay=cosine actor.lr_warmup_steps=100", "actor.lr_warmup_steps: 100 leaves no step to decay"),
        ("rollout.engine=sglang sync.timeout_s=601", "sync.timeout_s: 601 is more than run.init_timeout_s=600"),
        ("sync.dir=/x", "sync.dir: is where sync.mode=disk writes"),
        ("sync.dir=/x sync.mode=tensor", "sync.dir: is where sync.mode=disk writes"),
        ("sync.dir='' sync.mode=disk", "sync.dir: must not be empty"),
        (
            "rollout.engine=sglang rollout.urls=['http://127.0.0.1:1', 'http://h:1'] sync.mode=tensor",
            "sync.mode: tensor passes weights in this machine's memory, http://h:1 is on another",
        ),
        ("parallel.virtual_pipeline=2", "parallel.virtual_pipeline: 2 needs parallel.pipeline of at least 2"),
        ("parallel.sequence=true", "parallel.sequence: true needs parallel.tensor of at least 2"),
        ("debug.mode=train", "debug.replay: must name a run's replay/ folder when debug.mode=train"),
        ("debug.mode=train debug.replay=runs/run/replay", "run.name: run is the run that debug.replay recorded"),
        ("debug.replay=runs/x/replay", "debug.replay: is read only with debug.mode=train, not full"),
        ("debug.replay=runs/x/replay debug.mode=rollout", "debug.replay: is read only with debug.mode=train"),
    ],
)  # fmt: skip
def test_a_contradiction_is_named_with_its_numbers(good: Path, overrides: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        load(good, _split(overrides))
    (problem,) = error.value.problems
    assert problem.startswith(says)
    assert problem.endswith(("(command line)", f"({good}:1)")), "the place of a key that took part"


@pytest.mark.parametrize(
    "overrides",
    [
        "model.max_context=1536",
        "actor.ppo_max_token_len=1536",
        "actor.ppo_max_token_len=10 actor.over_cap=alone",
        "actor.ppo_max_token_len=10 actor.use_dynamic_bsz=false",
        "rollout.max_turn_len=512",
        "data.gen_batch_size=1 data.train_prompt_bsz=10",
        "data.gen_batch_size=1 data.train_prompt_bsz=11 algorithm.filter_groups.enable=false",
        "actor.ppo_mini_batch_size=8",
        "rollout.n_resp_per_prompt=1 algorithm.name=reinforce++ algorithm.filter_groups.enable=false",
        "algorithm.name=gmpo algorithm.clip_ratio_low=1.5",
        "run.init_timeout_s=60",
        "debug.mode=train debug.replay=x data.train_files=[]",
        "rollout.engine=sglang rollout.urls=['https://h:30000/']",
        "rollout.engine=sglang rollout.urls=['http://localhost:1','http://[::1]:2'] sync.mode=tensor",
        "rollout.engine=sglang rollout.urls=['http://h:1'] sync.mode=disk sync.dir=/x",
        "parallel.pipeline=2 parallel.virtual_pipeline=2",
        "run.name=v1.2-a_b+c=d",
        "algorithm.gamma=0.9 algorithm.advantage.credit=turn algorithm.advantage.turn_share=0.5",
    ],
)
def test_what_just_fits_is_let_through(good: Path, overrides: str) -> None:
    load(good, _split(overrides))


def _split(overrides: str) -> list[str]:
    """Words that hold a ``=`` begin an override."""
    result: list[str] = []
    for word in overrides.split(" "):
        if "=" in word:
            result.append(word)
        else:
            result[-1] += f" {word}"
    return result


@pytest.mark.parametrize("name", PRESETS)
def test_each_algorithm_fills_what_is_not_set_and_keeps_what_is(good: Path, name: str) -> None:
    loaded = load(good, [f"algorithm.name={name}"]).config.algorithm
    assert {k: getattr(loaded, k) for k in PRESETS[name]} == PRESETS[name]
    own = load(good, [f"algorithm.name={name}", "algorithm.clip_ratio_high=0.5"]).config.algorithm
    assert own.clip_ratio_high == 0.5
    assert own.clip_ratio_low == PRESETS[name]["clip_ratio_low"]
    assert own.clip_ratio_c is None


def test_every_name_has_a_preset_of_valid_values() -> None:
    for name in Algorithm.model_fields["name"].annotation.__args__:  # type: ignore[union-attr]
        Algorithm.model_validate(resolve_algorithm(Algorithm(name=name)).model_dump())


def test_dapo_is_as_published(good: Path) -> None:
    dapo = load(good).config.algorithm
    assert (dapo.clip_ratio_low, dapo.clip_ratio_high) == (0.2, 0.28)
    assert (dapo.advantage_estimator, dapo.loss_agg_mode) == ("group_norm", "token-mean")
    assert not dapo.kl.enable
    assert dapo.filter_groups.enable


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("actor.ppo_mini_batch_size=3", "actor.ppo_mini_batch_size=2 or 4"),
        ("actor.ppo_mini_batch_size=16", "actor.ppo_mini_batch_size=8"),
        ("data.gen_batch_size=1 data.train_prompt_bsz=11", "data.gen_batch_size=2 or more"),
        ("model.max_context=1535", "model.max_context=1536 or more, or shorten those"),
        ("actor.ppo_max_token_len=1535", "actor.ppo_max_token_len=1536 or more, or actor.over_cap=alone"),
    ],
)
def test_the_remedy_names_its_key_and_a_value_that_works(good: Path, overrides: str, key: str) -> None:
    with pytest.raises(UserError) as error:
        load(good, _split(overrides))
    (problem,) = error.value.problems
    assert f"; set {key} (" in problem
    load(good, _split(f"{overrides} {key.partition(' or ')[0]}"))
