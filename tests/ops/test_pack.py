"""pack and unpack against loops over tokens, on every backend: layout, shards, gradients, edges, repetition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from backends import Backend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mdapo.ops.pack import Segments, pack, segments, segments_of_mask, unpack

OP = "pack"
FAST = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def same(found: Tensor, expected: Tensor) -> None:
    """Equal in every bit; else the first difference with both values."""
    assert found.dtype == expected.dtype and found.shape == expected.shape, (found.shape, expected.shape)
    found, expected = found.detach().cpu(), expected.detach().cpu()
    bits = [x.contiguous().reshape(-1, 1).view(torch.uint8) for x in (found, expected)]
    if not torch.equal(*bits):
        at = int((bits[0] != bits[1]).any(1).nonzero()[0])
        index = tuple(int(i) for i in np.unravel_index(at, found.shape))
        pytest.fail(f"differ first at {index}: {found[index]}, expected {expected[index]}")


def values(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Any bits but those of NaN."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-99, 99, shape, generator=generator).to(dtype).to(device)


# The expected values, token by token.


def packed_by_loop(flat_P: Tensor, layout: Segments) -> Tensor:
    """[T / cp, ...]: every token of every segment asks which chunk it is in, and whether the rank has it."""
    out = flat_P.new_zeros(layout.total // layout.cp, *flat_P.shape[1:])
    at = 0
    for start, length, begin, span in layout.runs_4M.t().tolist():
        assert begin == at * layout.cp
        chunk = span // (2 * layout.cp) if layout.cp > 1 else span
        chunks = [layout.cp_rank, 2 * layout.cp - 1 - layout.cp_rank] if layout.cp > 1 else [0]
        for number in chunks:
            for position in range(number * chunk, (number + 1) * chunk):
                if position < length:
                    out[at] = flat_P[start + position]
                at += 1
    assert at == len(out)
    return out


def unpacked_by_loop(packed_T: Tensor, layout: Segments, size: int) -> Tensor:
    """The transpose of `packed_by_loop`: where each packed token came from, it goes."""
    source_P = torch.arange(1, size + 1)
    back = packed_by_loop(source_P, layout)
    out = packed_T.new_zeros(size, *packed_T.shape[1:])
    for at, source in enumerate(back.tolist()):
        if source:
            out[source - 1] = packed_T[at]
    return out


@dataclass(frozen=True)
class Case:
    """Padded rows, their run of tokens, and the layout asked for."""

    size: int
    starts: list[int]
    lengths: list[int]
    layout: dict[str, Any]
    groups: list[list[int]] | None

    @property
    def mask_BS(self) -> Tensor:
        at_S = torch.arange(self.size)
        starts, lengths = torch.tensor(self.starts)[:, None], torch.tensor(self.lengths)[:, None]
        return (at_S >= starts) & (at_S < starts + lengths)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows, size = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    lengths = draw(st.lists(st.integers(0, size), min_size=rows, max_size=rows))
    starts = [draw(st.integers(0, size - length)) for length in lengths]
    cp = draw(st.sampled_from([1, 1, 2, 3, 4]))
    align = draw(st.integers(1, 5)) * (2 * cp if cp > 1 else 1)
    layout = {"align": align, "multiple": draw(st.integers(1, 24)), "cp": cp, "cp_rank": draw(st.integers(0, cp - 1))}
    groups = None
    if draw(st.booleans()):
        order = draw(st.permutations(range(rows)))[: draw(st.integers(0, rows))]
        cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=3)))
        groups = [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    return Case(size, starts, lengths, layout, groups)


@FAST
@given(case=cases(), seed=st.integers(0, 99), data=st.data())
def test_any_shape_is_packed_and_unpacked_as_by_loops(backend: Backend, case: Case, seed: int, data: Any) -> None:
    layout = segments_of_mask(case.mask_BS.to(backend.device), groups=case.groups, **case.layout)
    trailing = data.draw(st.lists(st.sampled_from([(), (1,), (3,), (16,), (2, 5)]), min_size=1, max_size=4))
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=len(trailing), max_size=len(trailing)))
    shape = (len(case.lengths), case.size)
    fields = {
        str(i): values((*shape, *rest), dtype, backend.device, seed + i)
        for i, (rest, dtype) in enumerate(zip(trailing, dtypes, strict=True))
    }
    packed = pack(fields, layout)
    unpacked = unpack(packed, layout)
    for name, field in fields.items():
        flat = field.flatten(0, 1).cpu()
        expected = packed_by_loop(flat, layout)
        same(packed[name], expected)
        same(unpacked[name].flatten(0, 1), unpacked_by_loop(expected, layout, len(flat)))


@FAST
@given(case=cases())
def test_groups_are_multiples_and_dummies_have_tokens(backend: Backend, case: Case) -> None:
    layout = segments_of_mask(case.mask_BS.to(backend.device), groups=case.groups, **case.layout)
    groups = [list(range(len(case.lengths)))] if case.groups is None else case.groups
    assert len(layout.bounds) == len(groups) + 1
    spans = np.diff(layout.cu_seqlens_M1)
    for group, (first, last) in zip(groups, pairwise(layout.bounds), strict=True):
        assert spans[first:last].sum() % case.layout["multiple"] == 0
        assert (spans[first:last] % case.layout["align"] == 0).all()
        assert last - first - len(group) in (0, 1)
        assert (spans[first + len(group) : last] > 0).all(), "an empty dummy"
    assert layout.cu_seqlens_M1[0] == 0 and layout.total == layout.cu_seqlens_M1[-1]
    assert layout.max_seqlen == spans.max(initial=0)
    on_device = layout.cu_seqlens_on(backend.device)
    assert on_device.dtype == torch.int32 and on_device.tolist() == layout.cu_seqlens_M1.tolist()


@FAST
@given(case=cases())
def test_positions_count_from_each_segments_start(backend: Backend, case: Case) -> None:
    layout = segments_of_mask(case.mask_BS.to(backend.device), groups=case.groups, **case.layout)
    spans = np.diff(layout.cu_seqlens_M1)
    whole_T = torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(n) for n in spans.tolist())])
    of_spans = torch.from_numpy(np.stack([layout.cu_seqlens_M1[:-1], spans, layout.cu_seqlens_M1[:-1], spans]))
    same(layout.positions_on(backend.device), packed_by_loop(whole_T, replace(layout, runs_4M=of_spans)))


def test_layout_of_three_rows(backend: Backend) -> None:
    layout = segments([2, 1, 3], multiple=4)
    rows = [torch.tensor(x, device=backend.device) for x in ([1, 2], [3], [4, 5, 6])]
    packed = pack({"ids": rows}, layout)["ids"]
    assert packed.tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    assert layout.cu_seqlens_M1.tolist() == [0, 2, 3, 6, 8]
    assert layout.positions_on(backend.device).tolist() == [0, 1, 0, 0, 1, 2, 0, 1]
    assert [row.tolist() for row in layout.split(unpack({"ids": packed}, layout)["ids"])] == [[1, 2], [3], [4, 5, 6]]


def test_padded_rows_in_packed_form(backend: Backend) -> None:
    layout = segments([2, 1], spans_N=[3, 3])
    rows = [torch.tensor(x, device=backend.device) for x in ([1, 2], [3])]
    assert pack({"ids": rows}, layout)["ids"].tolist() == [1, 2, 0, 3, 0, 0]
    assert layout.positions_on(backend.device).tolist() == [0, 1, 2, 0, 1, 2]


def test_lists_of_arrays_and_of_tensors_are_the_same(backend: Backend) -> None:
    arrays = [np.arange(n, dtype=np.float32)[:, None] + np.ones(2, np.float32) for n in (3, 0, 5)]
    layout = segments([3, 0, 5], align=4)
    of_tensors = pack({"x": [torch.from_numpy(a).to(backend.device) for a in arrays]}, layout)["x"]
    same(pack({"x": arrays}, layout)["x"], of_tensors)
    assert of_tensors.shape == (12, 2)


def test_one_sequence_of_seven_over_two_context_ranks_keeps_its_tokens(backend: Backend) -> None:
    """Case 16: padded to a multiple of 2 * cp, seven valid positions, the shards together equal cp 1."""
    row = torch.arange(1, 8, device=backend.device)
    shards = [segments([7], align=4, cp=2, cp_rank=rank) for rank in (0, 1)]
    packed = [pack({"ids": [row]}, shard)["ids"] for shard in shards]
    assert [p.tolist() for p in packed] == [[1, 2, 7, 0], [3, 4, 5, 6]]
    assert [s.positions_on(backend.device).tolist() for s in shards] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert shards[0].cu_seqlens_M1.tolist() == [0, 8]
    back = sum(unpack({"ids": p}, shard)["ids"] for p, shard in zip(packed, shards, strict=True))
    same(back, row)


@pytest.mark.parametrize("cp", [1, 2])
def test_gradients_are_those_of_finite_differences(backend: Backend, cp: int) -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]], device=backend.device)
    layout = segments_of_mask(mask, align=2 * cp, multiple=8, cp=cp, cp_rank=cp - 1, groups=[[3, 0], [1]])
    a, b = (torch.randn(4, 5, *rest, dtype=torch.float64, device=backend.device) for rest in ((), (3,)))
    a, b = a.requires_grad_(), b.requires_grad_()

    def there(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return tuple(pack({"a": a, "b": b, "ids": mask}, layout).values())[:2]

    def back(*packed: Tensor) -> tuple[Tensor, ...]:
        return tuple(unpack(dict(zip("ab", packed, strict=True)), layout).values())

    packed = tuple(x.detach().requires_grad_() for x in there(a, b))
    for function, inputs in ((there, (a, b)), (back, packed)):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_a_field_whose_gradient_nobody_wants_costs_none(backend: Backend) -> None:
    layout = segments([3, 2])
    used, unused = (torch.ones(5, device=backend.device).requires_grad_() for _ in range(2))
    packed = pack({"used": used, "ids": torch.arange(5, device=backend.device), "unused": unused}, layout)
    assert not packed["ids"].requires_grad
    (packed["used"] * torch.arange(5, device=backend.device)).sum().backward()
    assert used.grad is not None and used.grad.tolist() == [0, 1, 2, 3, 4]
    assert unused.grad is None or not unused.grad.any()


@pytest.mark.parametrize("cp", [1, 2])
def test_the_ops_keep_torchs_rules(backend: Backend, cp: int) -> None:
    layout = segments([3, 0, 5], align=4, multiple=16, cp=cp, cp_rank=0)
    fields = [values((8, *rest), torch.float32, backend.device).requires_grad_() for rest in ((), (3,))]
    fields.append(values((8,), torch.int64, backend.device))
    arguments = (layout.runs_4M, layout.total, cp, 0)
    packed = [p.detach() for p in torch.ops.mdapo.pack(fields, *arguments)]
    packed[0].requires_grad_()
    backend.opcheck("pack", fields, *arguments)
    backend.opcheck("unpack", packed, layout.runs_4M, 8, cp, 0)
    backend.opcheck("mask_spans", values((3, 7), torch.bool, backend.device))


# Edges.


def test_rows_without_tokens_give_segments_without_tokens(backend: Backend) -> None:
    mask = torch.zeros(3, 6, dtype=torch.bool, device=backend.device)
    layout = segments_of_mask(mask, align=4, multiple=8)
    field = values((3, 6, 2), torch.float32, backend.device).requires_grad_()
    packed = pack({"x": field}, layout)["x"]
    assert packed.shape == (0, 2) and layout.total == 0 and layout.max_seqlen == 0
    assert layout.cu_seqlens_M1.tolist() == [0, 0, 0, 0]
    assert layout.positions_on(backend.device).shape == (0,)
    assert not unpack({"x": packed}, layout)["x"].any()
    packed.sum().backward()


@pytest.mark.parametrize("shape", [(3, 0), (3, 4)])
def test_nothing_in_a_row_or_in_a_token(backend: Backend, shape: tuple[int, int]) -> None:
    layout = segments_of_mask(torch.ones(shape, dtype=torch.bool, device=backend.device))
    fields = {"x": values((*shape, 0), torch.float32, backend.device), "y": values(shape, torch.int8, backend.device)}
    packed = pack(fields, layout)
    assert packed["x"].shape == (layout.total, 0)
    same(unpack(packed, layout)["y"], fields["y"])


@pytest.mark.parametrize(("make", "name"), [
    (lambda x: x.transpose(0, 1), "transposed"), (lambda x: x[:, ::2], "strided"), (lambda x: x[1:], "offset"),
    (lambda x: x[:1].expand(6, -1), "expanded"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_fields_need_not_be_contiguous(backend: Backend, make: Any, name: str) -> None:
    field = make(values((6, 8), torch.int16, backend.device))
    mask = torch.ones(field.shape, dtype=torch.bool)
    mask[:, 0] = False
    mask[0] = False
    layout = segments_of_mask(mask.to(backend.device), align=4)
    packed = pack({"x": field}, layout)["x"]
    same(packed, packed_by_loop(field.contiguous().flatten().cpu(), layout))


@pytest.mark.parametrize("offset", range(17))
def test_bytes_at_every_offset_of_a_word(backend: Backend, offset: int) -> None:
    """16-byte loads and stores, whatever the distance between where bytes lie and where they go, from the first on."""
    buffer = values((620,), torch.uint8, backend.device)[offset : offset + 600]
    layout = segments([100, 37, 1, 300], starts_N=[0, 130 + offset, 190, 200 + 2 * offset], shape=(600,))
    packed = pack({"x": buffer}, layout)["x"]
    same(packed, packed_by_loop(buffer.cpu(), layout))
    same(unpack({"x": packed}, layout)["x"], unpacked_by_loop(packed.cpu(), layout, 600))


def test_a_wide_token_and_many_fields_in_one_call(backend: Backend) -> None:
    layout = segments([5, 0, 9], align=4, multiple=32)
    fields = {str(i): values((14, width), torch.bfloat16, backend.device, i) for i, width in enumerate([4099] * 40)}
    for name, packed in pack(fields, layout).items():
        same(packed, packed_by_loop(fields[name].cpu(), layout))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_masks_may_be_padded_on_both_sides_and_of_any_integers(backend: Backend, dtype: torch.dtype) -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).to(dtype).to(backend.device)
    layout = segments_of_mask(mask * 1 if dtype == torch.bool else mask * 3)
    assert layout.runs_4M[0].tolist() == [2, 4, 8, 12]
    assert layout.lengths_N.tolist() == [2, 4, 1, 0]


def test_rows_padded_behind_need_only_their_lengths(backend: Backend) -> None:
    mask = torch.arange(5) < torch.tensor([3, 0, 5])[:, None]
    by_mask, by_lengths = segments_of_mask(mask.to(backend.device)), segments([3, 0, 5], shape=(3, 5))
    field = values((3, 5), torch.int32, backend.device)
    same(pack({"x": field}, by_lengths)["x"], pack({"x": field}, by_mask)["x"])
    same(unpack(pack({"x": field}, by_lengths), by_lengths)["x"], torch.where(mask, field.cpu(), 0).int())


@FAST
@given(rows=st.lists(st.lists(st.booleans(), min_size=50, max_size=50), min_size=1, max_size=5))
def test_spans_of_any_mask(backend: Backend, rows: list[list[bool]]) -> None:
    spans = torch.ops.mdapo.mask_spans(torch.tensor(rows, device=backend.device)).cpu()
    for row, (first, end, gap) in zip(rows, spans.t().tolist(), strict=True):
        ones = [i for i, one in enumerate(row) if one]
        assert (first, end) == ((ones[0], ones[-1] + 1) if ones else (0, 0))
        assert gap == int(end - first != len(ones))


def test_repeated_calls_give_the_same_bits(backend: Backend) -> None:
    """Also with another number of threads, where there is something to divide."""
    lengths = np.random.default_rng(0).integers(0, 2000, 300)
    layout = segments(lengths, align=8)
    fields = {"x": values((int(lengths.sum()), 3), torch.float32, backend.device)}
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 1, 2, 3):
            torch.set_num_threads(threads)
            packed = pack(fields, layout)
            found.append((packed["x"], unpack(packed, layout)["x"]))
    finally:
        torch.set_num_threads(before)
    for packed, unpacked in found[1:]:
        same(packed, found[0][0])
        same(unpacked, found[0][1])
    same(found[0][1], fields["x"])


# What is refused.


def test_a_gap_in_a_row_is_named(backend: Backend) -> None:
    with pytest.raises(ValueError, match="row 1 has padding between"):
        segments_of_mask(torch.tensor([[True, True, False], [True, False, True]], device=backend.device))


BAD_RUNS = {
    "before the rows": ([-1, 2, 0, 2], 1),
    "behind the rows": ([9, 2, 0, 2], 1),
    "negative": ([0, -1, 0, 2], 1),
    "longer than its segment": ([0, 3, 0, 2], 1),
    "before the buffer": ([0, 2, -2, 2], 1),
    "behind the buffer": ([0, 2, 8, 4], 1),
    "not to be cut": ([0, 2, 0, 6], 2),
    "overflowing": ([2**62, 2**62, 0, 2**62], 1),
}


@pytest.mark.parametrize("name", BAD_RUNS)
@pytest.mark.parametrize("op", ["pack", "unpack"])
def test_runs_out_of_range_are_refused_by_the_kernel_too(backend: Backend, op: str, name: str) -> None:
    run, cp = BAD_RUNS[name]
    runs = torch.tensor(run)[:, None]
    tokens = 10 if op == "pack" else 8 // cp
    field = values((tokens,), torch.int32, backend.device)
    with pytest.raises((ValueError, RuntimeError), match="run"):
        getattr(torch.ops.mdapo, op)([field], runs, 8 if op == "pack" else 10, cp, 0)


def test_runs_that_overlap_cannot_be_unpacked(backend: Backend) -> None:
    layout = segments([4, 4], starts_N=[0, 2], shape=(8,))
    packed = pack({"x": torch.arange(8, device=backend.device)}, layout)["x"]
    assert packed.tolist() == [0, 1, 2, 3, 2, 3, 4, 5], "reading twice is fine"
    with pytest.raises((ValueError, RuntimeError), match="overlap"):
        unpack({"x": packed}, layout)


@pytest.mark.parametrize(("message", "arguments"), [
    ("nothing", {"lengths_N": []}),
    ("row 1 has a negative", {"lengths_N": [1, -1]}),
    ("row 0 of 4 tokens does not fit", {"lengths_N": [4], "spans_N": [3]}),
    ("multiples of 4", {"lengths_N": [4], "align": 2, "cp": 2}),
    ("multiples of 4", {"lengths_N": [4], "align": 4, "spans_N": [6], "cp": 2}),
    ("cp_rank 2 is one of cp 2", {"lengths_N": [4], "align": 4, "cp": 2, "cp_rank": 2}),
    ("at least 1", {"lengths_N": [4], "align": 0}),
    ("2 rows of up to 4 tokens", {"lengths_N": [4, 1], "shape": (2, 3)}),
    ("1 rows of up to 4 tokens", {"lengths_N": [4], "shape": (2, 4)}),
    ("lengths: a list of whole numbers, not float64", {"lengths_N": [2.5, 1.0]}),
    ("lengths: a list of whole numbers, not int64 of shape", {"lengths_N": [[1, 2]]}),
    ("lengths: one does not fit int64", {"lengths_N": np.array([1, 2**63], np.uint64)}),
    ("row 0 has 4611686018427387904 tokens, too many", {"lengths_N": [2**62]}),
    ("starts: there are 1, there must be 2", {"lengths_N": [1, 1], "starts_N": [0]}),
    ("spans: there are 3, there must be 2", {"lengths_N": [1, 1], "spans_N": [1, 1, 1]}),
    ("numbered from 0 to 1, not -1 to 0", {"lengths_N": [1, 1], "groups": [[0, -1]]}),
    ("numbered from 0 to 1, not 2 to 2", {"lengths_N": [1, 1], "groups": [[2]]}),
])  # fmt: skip
def test_requests_that_cannot_be_met_are_named(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        segments(**arguments)


def test_fields_of_other_shapes_are_named() -> None:
    layout = segments([2, 3])
    with pytest.raises(ValueError, match="field 'x' has shape"):
        pack({"x": torch.zeros(6)}, layout)
    with pytest.raises(ValueError, match="field 'x' has rows of other lengths"):
        pack({"x": [torch.zeros(3), torch.zeros(2)]}, layout)
    with pytest.raises(ValueError, match="field 'x' has 4 tokens"):
        unpack({"x": torch.zeros(4)}, layout)
    for move in (pack, unpack):
        with pytest.raises(ValueError, match="fields on cpu and meta"):
            move({"x": torch.zeros(5), "y": torch.zeros(5, device="meta")}, layout)
        with pytest.raises(ValueError, match="no fields"):
            move({}, layout)


def test_more_tokens_than_int32_counts_have_no_cu_seqlens() -> None:
    layout = segments([2**31 - 1], spans_N=[2**31 - 1])
    assert layout.cu_seqlens_on("cpu").tolist() == [0, 2**31 - 1]
    with pytest.raises(ValueError, match="int32"):
        replace(layout, cu_seqlens_M1=np.array([0, 2**31])).cu_seqlens_on("cpu")
