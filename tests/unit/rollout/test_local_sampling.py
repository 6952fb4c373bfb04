"""Sampling of the local engine: the right distribution, the right log-prob, reproducible."""

from __future__ import annotations

import pytest
import torch

from mdapo.rollout.engine import SamplingParams
from mdapo.rollout.local_sampling import sample
from mdapo.rollout.seeds import uniform


def draw(logits: torch.Tensor, params: SamplingParams, count: int = 4000) -> torch.Tensor:
    """Observed frequencies over uniforms that cover [0, 1) evenly."""
    uniforms = [(i + 0.5) / count for i in range(count)]
    ids, _ = sample(logits.expand(count, -1).clone(), [params] * count, uniforms)
    return torch.bincount(torch.tensor(ids), minlength=logits.shape[-1]) / count


@pytest.mark.parametrize("vocab", [5, 256, 700])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_are_the_softmax(vocab: int, temperature: float) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    seen = draw(logits, SamplingParams(1, temperature=temperature))
    assert (seen - (logits / temperature).softmax(-1)).abs().max() <= 1 / 4000


def test_logp_is_before_the_cuts_and_at_the_temperature() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(1),
        SamplingParams(1, temperature=0.7),
        SamplingParams(1, top_k=2),
        SamplingParams(1, temperature=0),
    ]
    ids, logps = sample(logits.clone(), params, [0.3] * 4)
    want = [(logits[i].double() / t).log_softmax(-1)[ids[i]].item() for i, t in enumerate([1, 0.7, 1, 1])]
    assert logps == pytest.approx(want, abs=1e-6)
    assert ids[3] == int(logits[3].argmax())


def test_top_k_then_top_p_keep_the_smallest_set() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert draw(logits, SamplingParams(1, top_k=2)).tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=1e-3)
    assert draw(logits, SamplingParams(1, top_p=0.65)).tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=1e-3)
    assert draw(logits, SamplingParams(1, top_p=0.75)).tolist() == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0], abs=1e-3)
    # 0.4 and 0.3 of the three left are 0.78 of them
    assert draw(logits, SamplingParams(1, top_k=3, top_p=0.75)).tolist() == pytest.approx(
        [4 / 7, 3 / 7, 0, 0], abs=1e-3
    )


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((600,), float("-inf"))
    logits[[3, 300, 500]] = 0.0
    for edge in (0.0, 1 / 3, 2 / 3, 1 - 2.0**-53):
        (token,), (logp,) = sample(logits[None].clone(), [SamplingParams(1)], [edge])
        assert token in (3, 300, 500)
        assert logp == pytest.approx(-1.0986123)


def test_non_finite_logits_are_an_error() -> None:
    logits = torch.zeros(2, 300)
    logits[1, 7] = float("nan")
    with pytest.raises(FloatingPointError):
        sample(logits, [SamplingParams(1)] * 2, [0.5, 0.5])


def test_uniforms_are_even_and_depend_on_seed_and_index() -> None:
    values = torch.tensor([uniform(seed, index) for seed in range(100) for index in range(100)], dtype=torch.float64)
    assert values.unique().numel() == 10_000
    assert (torch.histc(values, 10, 0, 1) / 10_000 - 0.1).abs().max() < 0.012
    columns = values.view(100, 100)
    assert abs(torch.corrcoef(torch.stack([columns[:, 0], columns[:, 1]]))[0, 1]) < 0.25
    assert uniform(3, 4) == uniform(3, 4) != uniform(4, 3)
