"""token_logprob where inputs are at their limits: nothing scored, one id, infinities, NaN, strides, large ids."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from backends import Backend
from logprob_cases import Case, case, close, exact, ours, over_shards
from torch import Tensor

from mdapo.ops import token_logprob as op

OP = "token_logprob_stats"
MOST = torch.iinfo(torch.int64).max


def new_stats(rows: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    stats_4R = torch.zeros(4, rows, device=device, dtype=dtype)
    stats_4R[op.LARGEST] = -torch.inf
    return stats_4R


def merge(stats_4R: Tensor, logits_RC: Tensor, targets: list[int], first_id: int = 0) -> Tensor:
    targets_R = torch.tensor(targets, device=logits_RC.device)
    torch.ops.mdapo.token_logprob_stats(stats_4R, logits_RC, targets_R, first_id, 1.0)
    return stats_4R


def test_nothing_scored_has_gradients_of_zero(backend: Backend) -> None:
    found = ours(case(0, 33, device=backend.device))
    assert found.logp_R.shape == found.entropy_R.shape == (0,) and found.grad_hidden_RH.shape == (0, 16)
    assert found.grad_weight_VH.shape == (33, 16) and not found.grad_weight_VH.any()


def test_a_shard_without_an_id_has_no_share(backend: Backend) -> None:
    """The last tensor-parallel rank of a small vocabulary may hold nothing but padding."""
    inputs = case(5, 33, device=backend.device)
    close(ours(inputs, cuts=[33]), exact(inputs))


def test_a_vocabulary_of_one_is_certain(backend: Backend) -> None:
    found = ours(case(5, 1, device=backend.device))
    assert all(not value.any() for value in vars(found).values())


@pytest.mark.parametrize("vocab", [15, 16, 17, 31, 33, 63, 65, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_vocabularies_that_no_vector_or_tile_divides(
    backend: Backend, vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(op.TILE_BYTES, "cpu", 4000)
    monkeypatch.setattr(op, "DEVICE_TILE_BYTES", 4000)
    inputs = case(7, vocab, dtype=dtype, device=backend.device)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    close(ours(inputs), exact(inputs), rtol=tolerance, atol=tolerance)


def test_a_target_in_no_shard_counts_as_a_logit_of_zero(backend: Backend) -> None:
    inputs = case(4, 20, device=backend.device)
    targets_R = torch.tensor([20, -1, MOST, -MOST - 1], device=backend.device)
    logp_R, _ = op.logprob_and_entropy(inputs.hidden_RH, inputs.weight_VH, targets_R)
    torch.testing.assert_close(logp_R, -(inputs.hidden_RH @ inputs.weight_VH.t()).logsumexp(-1))


@pytest.mark.parametrize("first_id", [0, 2**31 - 3, 2**40, MOST - 3])
def test_ids_of_any_size(backend: Backend, first_id: int) -> None:
    logits_RC = torch.tensor([[1.0, 2.0, 3.0]]).repeat(4, 1).to(backend.device)
    targets = [first_id, first_id + 2, min(first_id + 3, MOST), -5]
    stats_4R = merge(new_stats(4, backend.device), logits_RC, targets, first_id)
    assert stats_4R[op.TARGET].tolist() == [1.0, 3.0, 0.0, 0.0]


def test_rows_further_apart_than_32_bits_count(backend: Backend) -> None:
    apart = 2**31 + 64
    if backend.device == "cuda" and torch.cuda.mem_get_info()[0] < 3 * apart:
        pytest.skip("too little device memory")
    logits_RC = torch.empty(apart + 64, dtype=torch.bfloat16, device=backend.device).as_strided((2, 37), (apart, 1))
    values = torch.linspace(-2, 2, 128).view(2, 64).to(backend.device, torch.bfloat16)[:, :37]  # as aligned
    logits_RC.copy_(values)
    found, expected = new_stats(2, backend.device), new_stats(2, backend.device)
    assert torch.equal(merge(found, logits_RC, [0, 36]), merge(expected, values, [0, 36]))
    terms_5R = torch.ones(5, 2, device=backend.device)
    for logits in (logits_RC, values):
        torch.ops.mdapo.token_logprob_grad(logits, torch.tensor([0, 36], device=backend.device), terms_5R, 0, 1.0)
    assert torch.equal(logits_RC, values)


def masked(device: str, dead: list[int]) -> Case:
    """Logits of -inf at the ids ``dead``: the weight's last column is -inf there, the hidden state's 1 everywhere."""
    inputs = case(6, 40, device=device)
    inputs.hidden_RH[:, -1] = 1.0
    inputs.weight_VH[:, -1] = 0.0
    inputs.weight_VH[dead, -1] = -torch.inf
    alive = [i for i in range(40) if i not in dead]
    return replace(inputs, targets_R=torch.tensor(alive[:6], device=device))


@pytest.mark.parametrize("cuts", [[], [12], [12, 13]])
def test_logits_of_minus_infinity_have_no_share(backend: Backend, cuts: list[int]) -> None:
    """Also where a whole shard is at -inf. The hidden state's gradient is left out: it is 0 times -inf here."""
    dead = [*range(12), 30]
    inputs = masked(backend.device, dead)
    alive = [i for i in range(40) if i not in dead]
    position = {token: i for i, token in enumerate(alive)}
    kept = replace(
        inputs,
        weight_VH=inputs.weight_VH[alive],
        targets_R=torch.tensor([position[t] for t in inputs.targets_R.tolist()], device=backend.device),
    )
    found, expected = ours(inputs, 0.9, cuts), exact(kept, 0.9)
    torch.testing.assert_close(found.logp_R.double(), expected.logp_R, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.entropy_R.double(), expected.entropy_R, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.grad_weight_VH[alive].double(), expected.grad_weight_VH, rtol=1e-4, atol=1e-5)
    assert not found.grad_weight_VH[dead].any()


def test_a_target_at_minus_infinity_has_no_chance(backend: Backend) -> None:
    inputs = masked(backend.device, [30])
    targets_R = torch.full((6,), 30, device=backend.device)
    logp_R, entropy_R = op.logprob_and_entropy(inputs.hidden_RH, inputs.weight_VH, targets_R)
    assert torch.equal(logp_R, torch.full_like(logp_R, -torch.inf)) and entropy_R.isfinite().all()


def test_a_row_at_minus_infinity_is_nan_as_in_log_softmax(backend: Backend) -> None:
    inputs = masked(backend.device, [*range(34)])
    inputs.weight_VH[:, -1] = -torch.inf
    logp_R, entropy_R = op.logprob_and_entropy(inputs.hidden_RH, inputs.weight_VH, inputs.targets_R)
    assert logp_R.isnan().all() and entropy_R.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cuts", [[], [10]])
def test_huge_logits_stay_finite_and_right(backend: Backend, dtype: torch.dtype, cuts: list[int]) -> None:
    """One id takes all: log-probs far below exp's range, entropy 0."""
    inputs = case(8, 30, dtype=dtype, device=backend.device, size=1e4)
    found, expected = ours(inputs, 1.0, cuts), exact(inputs)
    close(found, expected, rtol=1e-6 if dtype == torch.float32 else 2e-2, atol=2e-2)
    assert found.logp_R.min() < -1000 and found.entropy_R.abs().max() < 1e-2


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("cuts", [[], [20]])
def test_rows_without_a_gradient_leak_nothing(backend: Backend, value: float, cuts: list[int]) -> None:
    inputs = case(9, 50, device=backend.device)
    assert inputs.grad_logp_R is not None and inputs.grad_entropy_R is not None
    for grad_R in (inputs.grad_logp_R, inputs.grad_entropy_R):
        grad_R[[0, 4, 8]] = 0.0
    clean = ours(inputs, cuts=cuts)
    inputs.hidden_RH[[0, 4, 8]] = value
    found = ours(inputs, cuts=cuts)
    assert torch.equal(found.grad_weight_VH, clean.grad_weight_VH)
    assert torch.equal(found.grad_hidden_RH, clean.grad_hidden_RH) and not found.grad_hidden_RH[[0, 4, 8]].any()
    rest = [1, 2, 3, 5, 6, 7]
    assert torch.equal(found.logp_R[rest], clean.logp_R[rest]) and found.logp_R[[0, 4, 8]].isnan().all()


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0x7FC001FF, -1])
@pytest.mark.parametrize("column", [0, 17, 40])
def test_a_nan_of_any_bits_is_noticed(backend: Backend, bits: int, column: int) -> None:
    logits_RC = torch.zeros(2, 41, device=backend.device)
    logits_RC[0, column] = torch.tensor([bits], dtype=torch.int32).view(torch.float32)[0]
    stats_4R = merge(new_stats(2, backend.device), logits_RC, [3, 3], 0)
    assert stats_4R[op.SUM].isnan().tolist() == [True, False]


@pytest.mark.parametrize("temperature", [10.0, 0.7, 0.1, 0.01, 1e-4, 1e-6])
def test_the_likeliest_id_is_never_more_than_certain(backend: Backend, temperature: float) -> None:
    """Its logit is the largest to the last bit, however the products by 1 / temperature are rounded."""
    inputs = case(200, 500, hidden=64, device=backend.device, size=3.0)
    targets_R = (inputs.hidden_RH @ inputs.weight_VH.t()).argmax(1)
    found_R, _ = op.logprob_and_entropy(inputs.hidden_RH, inputs.weight_VH, targets_R, temperature=temperature)
    logits_RV = (inputs.hidden_RH.double() @ inputs.weight_VH.double().t()) / temperature
    exact_R = logits_RV.log_softmax(1).gather(1, targets_R[:, None])[:, 0]
    plain_RV = (inputs.hidden_RH @ inputs.weight_VH.t()) / temperature
    plain_R = plain_RV.log_softmax(1).gather(1, targets_R[:, None])[:, 0]
    assert found_R.max() <= 0
    assert (found_R - exact_R).abs().max() <= 2 * (plain_R - exact_R).abs().max() + 1e-6


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf"), 1e-30, 1e300])
def test_a_temperature_that_is_none_is_refused(temperature: float) -> None:
    inputs = case(4, 20, device="cpu")
    with pytest.raises(ValueError, match=r"temperature: from 1e-06 to 1e\+06"):
        op.logprob_and_entropy(inputs.hidden_RH, inputs.weight_VH, inputs.targets_R, temperature=temperature)


def test_a_vocabulary_of_no_ids_is_refused() -> None:
    inputs = case(4, 20, device="cpu")
    with pytest.raises(ValueError, match="an empty vocabulary"):
        op.logprob_and_entropy(inputs.hidden_RH, inputs.weight_VH[:0], inputs.targets_R)


def test_a_row_of_nan_with_a_gradient_is_not_hidden(backend: Backend) -> None:
    """Whoever trains on it must see it: the optimizer step is skipped."""
    inputs = case(9, 50, device=backend.device)
    inputs.hidden_RH[4, 2] = torch.nan
    found = ours(inputs)
    assert found.logp_R.isnan().tolist() == [i == 4 for i in range(9)]
    assert found.grad_hidden_RH.isnan().any(1).tolist() == [i == 4 for i in range(9)]
    assert found.grad_weight_VH.isnan().any(1).all()


def strided(x: Tensor) -> Tensor:
    wide = torch.full((x.shape[0], 2 * x.shape[1]), torch.nan, dtype=x.dtype, device=x.device)
    wide[:, ::2] = x
    return wide[:, ::2]


@pytest.mark.parametrize("change", [lambda x: x.t().contiguous().t(), strided], ids=["transposed", "strided"])
def test_inputs_need_not_be_contiguous(backend: Backend, change) -> None:
    inputs = case(9, 50, device=backend.device)
    assert inputs.grad_logp_R is not None
    apart = torch.stack([inputs.targets_R, inputs.grad_logp_R.long()], dim=1)
    other = Case(
        change(inputs.hidden_RH),
        change(inputs.weight_VH),
        apart[:, 0],
        inputs.grad_logp_R.repeat(2).view(2, 9).t()[:, 0],
        inputs.grad_entropy_R,
    )
    assert not other.targets_R.is_contiguous() and not other.weight_VH.is_contiguous()
    close(ours(other), ours(inputs))


def test_tiles_may_come_in_any_number(backend: Backend) -> None:
    logits_RC = torch.randn(3, 100, generator=torch.Generator().manual_seed(1)).to(backend.device)
    whole = merge(new_stats(3, backend.device), logits_RC, [0, 50, 99])
    for width in (1, 7, 64):
        stats_4R = new_stats(3, backend.device)
        for first in range(0, 100, width):
            merge(stats_4R, logits_RC[:, first : first + width], [0, 50, 99], first)
        torch.testing.assert_close(stats_4R, whole)
        assert torch.equal(stats_4R[[op.LARGEST, op.TARGET]], whole[[op.LARGEST, op.TARGET]])


def test_shards_far_apart_merge_without_overflow(backend: Backend) -> None:
    stats = [
        merge(new_stats(2, backend.device), torch.full((2, 5), x).to(backend.device), [9, 9]) for x in (-3e38, 3e38)
    ]
    total_4R = over_shards(stats)
    assert total_4R[op.SUM].tolist() == [5.0, 5.0] and total_4R[op.MOMENT].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "change",
    [
        {"targets_R": torch.zeros(2, dtype=torch.int32)},
        {"targets_R": torch.zeros(3, dtype=torch.int64)},
        {"stats_4R": torch.zeros(3, 2)},
        {"stats_4R": torch.zeros(4, 2, dtype=torch.float64)},
        {"logits_RC": torch.zeros(2, 8, dtype=torch.int32)},
        {"logits_RC": torch.zeros(8, 2).t()},
        {"first_id": -1},
        {"temperature": 0.0},
    ],
    ids=["targets int32", "targets [3]", "stats [3, R]", "stats float64", "logits int32", "columns apart", "id", "t"],
)
def test_kernels_refuse_what_they_cannot_do(backend: Backend, change: dict) -> None:
    if backend.instead():
        pytest.skip("a check of compiled kernels")
    arguments = {
        "stats_4R": new_stats(2, backend.device),
        "logits_RC": torch.zeros(2, 8),
        "targets_R": torch.zeros(2, dtype=torch.int64),
        "first_id": 0,
        "temperature": 1.0,
    } | change
    moved = [x.to(backend.device) if isinstance(x, Tensor) else x for x in arguments.values()]
    with pytest.raises(RuntimeError, match="token_logprob:"):
        torch.ops.mdapo.token_logprob_stats(*moved)
