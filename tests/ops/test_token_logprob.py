"""token_logprob on every backend: values and gradients against float64, its error against plain torch's, repetition."""

from __future__ import annotations

import pytest
import torch
from backends import Backend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logprob_cases import Result, case, close, exact, ours, plain
from torch.utils._python_dispatch import TorchDispatchMode

from mdapo.ops import token_logprob as op

OP = "token_logprob_stats"
QUANTITIES = ("logp_R", "entropy_R", "grad_hidden_RH", "grad_weight_VH")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles in both directions for the sizes of a test."""
    for name, size in (("BYTES", 4 * 16 * 48), ("ROWS", 16)):
        monkeypatch.setitem(getattr(op, f"TILE_{name}"), "cpu", size)
        monkeypatch.setattr(op, f"DEVICE_TILE_{name}", size)


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("cuts", [[], [20], [1, 50, 96]])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_any_shards_of_the_vocabulary_give_what_log_softmax_gives(
    backend: Backend, rows: int, cuts: list[int], temperature: float
) -> None:
    inputs = case(rows, 97, device=backend.device)
    close(ours(inputs, temperature, cuts), exact(inputs, temperature))


@pytest.mark.parametrize("use", ["logp", "entropy", "both"])
@pytest.mark.parametrize("cuts", [[], [40]])
@pytest.mark.parametrize("temperature", [0.8, 1.0, 3.0])
@pytest.mark.usefixtures("small_tiles")
def test_gradients_of_either_output_match_float64_autograd(
    backend: Backend, use: str, cuts: list[int], temperature: float
) -> None:
    inputs = case(53, 131, device=backend.device, use=use)
    close(ours(inputs, temperature, cuts), exact(inputs, temperature))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(0, 8),
    vocab=st.integers(1, 90),
    hidden=st.integers(1, 20),
    temperature=st.floats(0.2, 4.0),
    size=st.sampled_from([0.1, 3.0, 30.0]),
    tile=st.tuples(st.integers(1, 9), st.integers(1, 2000)),
    data=st.data(),
)
def test_shapes_shards_and_tiles_of_any_size(
    backend: Backend,
    rows: int,
    vocab: int,
    hidden: int,
    temperature: float,
    size: float,
    tile: tuple[int, int],
    data: st.DataObject,
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, vocab - 1), max_size=3))) if vocab > 1 else []
    inputs = case(rows, vocab, hidden, dtype=torch.float64, device=backend.device, size=size)
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("cpu", "cuda", "npu"):
            patch.setitem(op.TILE_ROWS, kind, tile[0])
            patch.setitem(op.TILE_BYTES, kind, tile[1])
        close(ours(inputs, temperature, cuts), exact(inputs, temperature), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("size", [1.0, 5.0, 300.0])
def test_the_error_is_at_most_twice_that_of_plain_torch(
    backend: Backend, dtype: torch.dtype, temperature: float, size: float
) -> None:
    """Mean and largest error against float64, of the same rounded inputs."""
    inputs = case(64, 2111, 64, dtype=dtype, device=backend.device, size=size)
    want, found, other = exact(inputs, temperature), ours(inputs, temperature), plain(inputs, temperature)
    for name in QUANTITIES:
        for measure in (torch.mean, torch.max):
            mine, theirs = (
                measure((getattr(result, name).double() - getattr(want, name)).abs()).item()
                for result in (found, other)
            )
            assert mine <= 2 * theirs, f"{name}, {measure.__name__} error: {mine:.3g}, plain torch {theirs:.3g}"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradcheck_in_float64(backend: Backend, temperature: float, small_tiles: None) -> None:
    inputs = case(3, 53, 3, dtype=torch.float64, device=backend.device, size=2.0)

    def outputs(hidden_RH: torch.Tensor, weight_VH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return op.logprob_and_entropy(hidden_RH, weight_VH, inputs.targets_R, temperature=temperature)

    assert torch.autograd.gradcheck(outputs, (inputs.hidden_RH.requires_grad_(), inputs.weight_VH.requires_grad_()))


def test_a_second_derivative_is_refused(backend: Backend) -> None:
    inputs = case(3, 7, device=backend.device)
    hidden_RH = inputs.hidden_RH.requires_grad_()
    logp_R, _ = op.logprob_and_entropy(hidden_RH, inputs.weight_VH, inputs.targets_R)
    (grad_RH,) = torch.autograd.grad(logp_R.square().sum(), hidden_RH, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad_RH.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_ops_are_registered_as_torch_expects(backend: Backend, dtype: torch.dtype) -> None:
    exact_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    logits_RC = torch.randn(5, 48).to(backend.device, dtype)[:, :41]
    targets_R = torch.tensor([3, 9, 50, 0, 43], device=backend.device)
    stats_4R = torch.zeros(4, 5, device=backend.device, dtype=exact_dtype)
    terms_5R = torch.ones(5, 5, device=backend.device, dtype=exact_dtype)
    backend.opcheck("token_logprob_stats", stats_4R, logits_RC, targets_R, 3, 0.5)
    backend.opcheck("token_logprob_grad", logits_RC, targets_R, terms_5R, 3, 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_repeats_in_every_bit(backend: Backend, dtype: torch.dtype, small_tiles: None) -> None:
    inputs = case(40, 201, dtype=dtype, device=backend.device)
    first, second = ours(inputs), ours(inputs)
    for name in QUANTITIES:
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_depends_neither_on_threads_nor_on_its_neighbours(backend: Backend, dtype: torch.dtype) -> None:
    logits_RC = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)).to(backend.device, dtype)
    targets_R = torch.arange(0, 6400, 100, device=backend.device)

    def run(threads: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        torch.set_num_threads(threads)
        logits, targets = logits_RC[rows].clone(), targets_R[rows]
        stats_4R = torch.zeros(4, len(targets), device=backend.device)
        stats_4R[op.LARGEST] = -torch.inf
        torch.ops.mdapo.token_logprob_stats(stats_4R, logits, targets, 0, 0.9)
        terms_5R = torch.cat([stats_4R[:1], stats_4R[1:2].log(), torch.ones_like(stats_4R[:3])])
        torch.ops.mdapo.token_logprob_grad(logits, targets, terms_5R, 0, 0.9)
        return stats_4R, logits

    threads = torch.get_num_threads()
    try:
        whole, alone = run(1, slice(0, 64)), run(1, slice(17, 18))
        several = run(2, slice(0, 64))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(whole[0], several[0]) and torch.equal(whole[1], several[1])
    assert torch.equal(whole[0][:, 17:18], alone[0]) and torch.equal(whole[1][17:18], alone[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_weight_gradient_is_added_to_the_buffer(backend: Backend, dtype: torch.dtype, small_tiles: None) -> None:
    inputs = case(40, 201, dtype=dtype, device=backend.device)
    into_VH = torch.ones(inputs.weight_VH.shape, device=backend.device)
    hidden_RH, weight_VH = inputs.hidden_RH.requires_grad_(), inputs.weight_VH.requires_grad_()
    outputs = op.logprob_and_entropy(hidden_RH, weight_VH, inputs.targets_R, main_grad_VH=into_VH)
    torch.autograd.backward(outputs, [inputs.grad_logp_R, inputs.grad_entropy_R])
    assert weight_VH.grad is None and hidden_RH.grad is not None
    found = Result(outputs[0].detach(), outputs[1].detach(), hidden_RH.grad, into_VH - 1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    close(found, exact(inputs), rtol=tolerance, atol=tolerance)


class Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = [x.numel() for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *found])
        return out


def test_logits_never_exist_as_a_whole(backend: Backend, small_tiles: None) -> None:
    inputs = case(64, 240, 4, device=backend.device)
    with Largest() as largest:
        ours(inputs)
    assert largest.elements <= max(inputs.hidden_RH.numel(), inputs.weight_VH.numel(), 16 * 48) < 64 * 240
