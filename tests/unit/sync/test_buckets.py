"""A stream of weights cut into buckets: nothing lost, nothing twice, no more memory than promised."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from recording import NBYTES, SHAPES, weights
from safetensors.torch import load
from torch import Tensor

from mdapo.sync import buckets as buckets_module
from mdapo.sync.buckets import Bucket, Duplicated, PlainBuffer, cut
from mdapo.sync.safetensors_file import ALIGNMENT, header


def collected(stream: Iterator[Bucket]) -> tuple[dict[str, Tensor], list[int]]:
    """Copies of all tensors, and the buckets' sizes."""
    found: dict[str, Tensor] = {}
    sizes = []
    for bucket in stream:
        sizes.append(bucket.nbytes)
        assert sum(piece.nbytes for piece in bucket.pieces) == bucket.nbytes, "without gaps"
        for piece in bucket.pieces:
            assert piece.name not in found
            found[piece.name] = bucket.tensor(piece).clone()
    return found, sizes


@pytest.mark.parametrize("bucket_bytes", [1, 64, 400, 1280, 5000, 10**6])
def test_every_weight_arrives_once_in_order_and_no_bucket_is_larger_than_it_must_be(bucket_bytes: int) -> None:
    found, sizes = collected(cut(weights(), bucket_bytes=bucket_bytes, take=PlainBuffer(torch.device("cpu")).take))
    assert list(found) == list(SHAPES)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights())
    assert sum(sizes) == NBYTES
    largest = max(tensor.nbytes for _, tensor in weights())
    assert max(sizes) <= max(bucket_bytes, largest)
    if bucket_bytes >= NBYTES:
        assert len(sizes) == 1


def test_a_bucket_holds_one_dtype_so_that_each_tensor_is_aligned_to_its_elements() -> None:
    mixed = [("a", torch.ones(3, dtype=torch.bfloat16)), ("b", torch.ones(2)), ("c", torch.zeros(5))]
    stream = cut(iter(mixed), bucket_bytes=1000, take=PlainBuffer(torch.device("cpu")).take)
    assert [[piece.name for piece in bucket.pieces] for bucket in stream] == [["a"], ["b", "c"]]


def test_a_bucket_names_a_bounded_number_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets_module, "MOST_PIECES", 3)
    stream = cut(weights(), bucket_bytes=10**6, take=PlainBuffer(torch.device("cpu")).take)
    assert [len(bucket.pieces) for bucket in stream] == [3, 3, 3, 2]


def test_a_weight_that_comes_twice_is_refused() -> None:
    twice = [*weights(), ("model.norm.weight", torch.zeros(8))]
    with pytest.raises(Duplicated, match=r"'model\.norm\.weight' came twice"):
        list(cut(iter(twice), bucket_bytes=64, take=PlainBuffer(torch.device("cpu")).take))


def test_slices_and_transposes_are_copied_as_what_they_show() -> None:
    base = torch.arange(24.0).view(4, 6)
    views = [("columns", base[:, 1:3]), ("transposed", base.T)]
    found, _ = collected(cut(iter(views), bucket_bytes=10**6, take=PlainBuffer(torch.device("cpu")).take))
    assert torch.equal(found["columns"], base[:, 1:3])
    assert torch.equal(found["transposed"], base.T)


def test_one_buffer_is_used_for_all_buckets() -> None:
    buffer = PlainBuffer(torch.device("cpu"))
    places = {bucket.data_U.data_ptr() for bucket in cut(weights(), bucket_bytes=1280, take=buffer.take)}
    assert len(places) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("room", [None, 4096])
def test_header_and_bucket_are_a_safetensors_file(dtype: torch.dtype, room: int | None) -> None:
    [bucket] = cut(weights(dtype=dtype), bucket_bytes=10**6, take=PlainBuffer(torch.device("cpu")).take)
    text = header(bucket.pieces, room=room)
    assert len(text) % ALIGNMENT == 0
    assert room is None or len(text) == room
    read = load(text + bucket.data_U.numpy().tobytes())
    assert read.keys() == SHAPES.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in weights(dtype=dtype))


def test_memory_grows_by_one_bucket_and_one_tensor(tmp_path: object) -> None:
    """A model of 256 MB in buckets of 32 MB; the stream makes each tensor (4 MB) when it is asked for."""

    def large() -> Iterator[tuple[str, Tensor]]:
        for i in range(64):
            yield f"w{i}", torch.full((1 << 20,), float(i))

    for _ in range(2):  # allocator and interpreter have what they need
        before, peak = resident(), 0
        for bucket in cut(large(), bucket_bytes=32 << 20, take=PlainBuffer(torch.device("cpu")).take):
            peak = max(peak, resident())
            del bucket
    assert peak - before <= (32 + 4 + 4) << 20


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
