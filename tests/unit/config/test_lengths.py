"""Lengths that adapt end at what context and memory allow, and always have room for the longest sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mdapo.config.lengths import longest_sequence, scaled, step_token_len, token_len
from mdapo.config.load import load
from mdapo.config.memory import SHARE, estimate, largest_micro_batch
from mdapo.config.model_facts import ModelFacts
from mdapo.config.plan import plan
from mdapo.config.render import render_plan
from mdapo.config.rules import check_rules
from mdapo.config.schema import Config
from mdapo.errors import UserError

SMOLLM2 = ModelFacts(
    architecture="LlamaForCausalLM", layers=30, hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152,
    max_positions=8192, tied=True, dtype="bfloat16", qkv_bias=False, qk_norm=False,
)  # fmt: skip
GIB = 1 << 30


def config(
    *, prompt: int = 200, response: int = 400, context: int = 1000, cap: int = 1000, n: int = 8, **adaptive: Any
) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m", "max_context": context},
            "data": {"train_files": ["d"], "max_prompt_len": prompt},
            "rollout": {
                "max_response_len": response,
                "n_resp_per_prompt": n,
                "adaptive_lengths": {"enable": True, **adaptive},
            },
            "algorithm": {"advantage_estimator": "group_norm", "policy_loss": "token_clip"},
            "actor": {"ppo_max_token_len": cap},
        }
    )


def told(found: Config) -> list[str]:
    return [f"{p.key}: {p.text}" for p in check_rules(found) if "adaptive" in p.key]


def test_what_cannot_grow_is_told_at_the_start() -> None:
    assert told(config()) == []
    (context,) = told(config(context=799))
    assert "1.5 x rollout.max_response_len=400 is 600" in context and "set model.max_context=800 or more" in context
    assert told(config(context=800)) == []
    (small,) = told(config(max_token_len=999))
    assert small.startswith("rollout.adaptive_lengths.max_token_len: 999 is less than actor.ppo_max_token_len=1000")
    (holds,) = told(config(cap=700, max_token_len=750))
    assert holds.startswith("rollout.adaptive_lengths.max_token_len: 750 is less than the longest sample, 800 tokens")
    (band,) = told(config(turns_below=4.0, hysteresis=1.5))
    assert band.startswith("rollout.adaptive_lengths.hysteresis: turns_below + hysteresis = 4 + 1.5 is more than")
    assert told(config(context=700, enable=False)) == []


def test_micro_batches_by_samples_have_no_cap_to_grow(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: m}\ndata: {train_files: [d]}\n")
    with pytest.raises(UserError, match=r"true needs actor\.use_dynamic_bsz=true"):
        load(file, ["rollout.adaptive_lengths.enable=true", "actor.use_dynamic_bsz=false"])


@settings(deadline=None)
@given(st.integers(1, 10**6), st.floats(0.001, 10.0), st.floats(0.0, 5.0))
def test_a_larger_scale_is_never_a_shorter_length(base: int, scale: float, more: float) -> None:
    assert 1 <= scaled(base, scale) <= scaled(base, scale + more)
    assert scaled(base, 1.0) == base


@settings(deadline=None)
@given(
    prompt=st.integers(1, 300),
    response=st.integers(1, 300),
    spare=st.integers(0, 400),
    longer=st.floats(1.0, 3.0),
    shorter=st.floats(0.1, 1.0),
    memory=st.integers(0, 3000) | st.none(),
    multiple=st.sampled_from([1, 2, 4]),
    share=st.floats(0.0, 1.0),
)
def test_a_step_has_room_for_its_longest_sample_and_never_passes_the_hard_cap(
    prompt: int,
    response: int,
    spare: int,
    longer: float,
    shorter: float,
    memory: int | None,
    multiple: int,
    share: float,
) -> None:
    cap = (prompt + response) + spare
    cfg = config(prompt=prompt, response=response, context=9999, cap=cap, longer=longer, shorter=shorter)
    largest = token_len(cfg, longer, memory_cap=memory)
    assert cap <= largest <= max(cap, scaled(cap, longer)) and (memory is None or largest <= max(cap, memory))
    most = min(longest_sequence(cfg), largest // multiple * multiple)  # what the start lets through
    assume(most > 0)
    longest = max(int(share * most), 1)
    for scale in (shorter, 1.0, longer):
        found = step_token_len(cfg, scale, longest=longest, multiple=multiple, memory_cap=memory)
        assert longest <= found // multiple * multiple
        assert token_len(cfg, scale, memory_cap=memory) <= found <= largest


@pytest.mark.parametrize("gib", [8, 24])
def test_the_largest_micro_batch_just_fills_its_share_of_the_memory(gib: int) -> None:
    cfg = config()
    found = largest_micro_batch(cfg, SMOLLM2, dp=1, micro_batches=1, device_bytes=gib * GIB)
    assert found > 500

    def needed(tokens: int) -> int:
        memory = estimate(config(cap=tokens, longer=1.0), SMOLLM2, dp=1, longest=1, micro_batches=1)
        return memory.training + memory.engine

    assert needed(found) <= SHARE * gib * GIB < needed(found + 2)
    assert largest_micro_batch(cfg, SMOLLM2, dp=1, micro_batches=1, device_bytes=1) == 0


def test_the_plan_shows_what_lengths_end_at_and_refuses_samples_that_memory_does_not_hold() -> None:
    cfg = config(n=8)
    roomy = plan(cfg, world_size=1, model=SMOLLM2, device_bytes=lambda ranks: 24 * GIB // ranks)
    assert roomy.problems == () and roomy.token_cap is not None and roomy.token_cap > 1500
    text = render_plan(roomy, cfg, SMOLLM2)
    assert "responses 280 / 400 / 600, micro-batches 700 / 1,000 / 1,500 tokens, below 2 / else / above 5 turns" in text
    assert f"micro-batches: {roomy.token_cap:,} by an estimate of memory, of which 80% may be filled" in text
    assert "prompt 200 + response 600" in text
    small = config(cap=600)
    tight = plan(small, world_size=1, model=SMOLLM2, device_bytes=lambda _: 3 * GIB)
    (problem,) = [p for p in tight.problems if "adaptive" in p.key]
    assert problem.key == "rollout.adaptive_lengths.longer" and "1.5 makes samples of 800 tokens" in problem.text
    known = config(cap=600, max_token_len=800)
    assert plan(known, world_size=1, model=SMOLLM2, device_bytes=lambda _: 3 * GIB).problems == ()
    assert plan(config(enable=False), world_size=1, model=SMOLLM2, device_bytes=lambda _: GIB).token_cap is None
