"""The sum is the one that its docstring says; the Triton kernel's is that of torch: on CUDA, or with
TRITON_INTERPRET=1 on a CPU."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models import checksum as module
from models.checksum import (
    Span,
    add_checksums,
    checksum,
    checksums,
    has_triton,
    piece_checksums,
    sums_torch,
    sums_triton,
)
from models.shards import Piece

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.int64]
interpreted = importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1"
kernel = pytest.mark.skipif(
    not (has_triton(DEVICE) or interpreted), reason="needs triton, and CUDA or TRITON_INTERPRET=1"
)
cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs CUDA")


def noise(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Any bits."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator)
    return bits.to(torch.uint8).view(dtype)


def reference(x: Tensor, span: Span) -> int:
    """Python's integers, which do not wrap, element by element."""
    size = x.element_size()
    rows = x.cpu().reshape(span.rows, span.columns).contiguous().view(torch.uint8).tolist()
    total = 0
    for r, row in enumerate(rows):
        for c in range(span.columns):
            raw = bytes(row[c * size : (c + 1) * size])
            bits = int.from_bytes(raw, "little", signed=size > 1)
            total += bits * (2 * (span.first + r * span.pitch + c) + 1)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 7, 100])
def test_it_is_the_weighted_sum_of_the_bits_modulo_2_to_the_64(dtype: torch.dtype, n: int) -> None:
    x = noise(dtype, n)
    assert checksum(x) == reference(x, Span(1, n, n, n, 0))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 50), data=st.data())
def test_it_sees_one_flipped_bit_and_one_swap(seed: int, n: int, data: st.DataObject) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    i, j = data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=2, unique=True))
    bit = data.draw(st.integers(0, 31))
    flipped, swapped = x.clone(), x.clone()
    flipped.view(torch.int32)[i] ^= (1 << bit) if bit < 31 else -(1 << 31)
    swapped[[i, j]] = x[[j, i]]
    assert checksum(flipped) != checksum(x)
    assert (checksum(swapped) != checksum(x)) == (x[i] != x[j]).item()


def test_it_depends_on_neither_strides_nor_chunks_nor_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 50, requires_grad=True)
    whole = checksum(x)
    assert checksum(x.T.contiguous().T) == whole
    array = x.detach().numpy().copy()
    array.flags.writeable = False
    assert checksum(array) == whole
    assert checksum(noise(torch.bfloat16, 9).view(torch.uint16).numpy()) == checksum(noise(torch.bfloat16, 9))
    monkeypatch.setattr(module, "CHUNK", 7)
    assert checksums({"x": x, "y": np.zeros(3, np.float32)}) == {"x": whole, "y": 0}


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    axis=st.integers(0, 1),
    cuts=st.lists(st.integers(0, 12), max_size=3),
    dtype=st.sampled_from(DTYPES),
    chunk=st.sampled_from([5, 1 << 16]),
)
def test_pieces_cut_anywhere_add_up_to_the_whole(
    shape: list[int], axis: int, cuts: list[int], dtype: torch.dtype, chunk: int
) -> None:
    x = noise(dtype, *shape).to(DEVICE)
    axis = min(axis, len(shape) - 1)
    edges = sorted({0, shape[axis], *(min(cut, shape[axis]) for cut in cuts)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        shares = []
        for start, stop in zip(edges, edges[1:], strict=False):
            piece = Piece(whole=tuple(shape), axis=axis, start=start, stop=stop)
            view = piece.of(x)  # rows lie apart where columns are cut
            share = piece_checksums({"x": view}, {"x": piece})
            assert share == piece_checksums({"x": view.clone().contiguous()}, {"x": piece})
            shares.append(share)
        assert add_checksums(shares) == checksums({"x": x})


def test_a_piece_that_another_rank_counts_is_0_and_names_keep_their_order() -> None:
    mine, its = (Piece(whole=(4, 3), start=0, stop=4, counted=counted) for counted in (True, False))
    views = {"b": torch.ones(4, 3), "a": torch.ones(4, 3), "empty": torch.ones(0, 3)}
    sums = piece_checksums(views, {"a": mine, "b": its, "empty": Piece(whole=(4, 3), start=4, stop=4)})
    assert list(sums) == ["b", "a", "empty"]
    assert sums == {"b": 0, "a": checksum(torch.ones(4, 3)), "empty": 0}


def spans_of(dtype: torch.dtype) -> tuple[list[Tensor], list[Span]]:
    """Lengths around a tile's, every alignment that the element size has, and rows that lie apart."""
    flat = [noise(dtype, n, seed=n).to(DEVICE) for n in (1, 7, 255, 256, 257, 1000)]
    ragged = noise(dtype, 2000).to(DEVICE)
    flat += [ragged[lead : lead + 500 + lead] for lead in range(16)]
    spans = [Span(1, n, n, n, 10**6 * i) for i, n in enumerate(map(len, flat))]
    table = noise(dtype, 9, 421).to(DEVICE)
    for columns in (0, 5, 16, 33, 300):
        flat.append(table[:, 3 : 3 + columns])
        spans.append(Span(9, columns, 421, 999, 17))
    return flat, spans


@kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("programs", "lanes"), [(1, 32), (3, 16)])
def test_the_kernel_s_sums_are_those_of_torch(dtype: torch.dtype, programs: int, lanes: int) -> None:
    tensors, spans = spans_of(dtype)
    got = sums_triton(tensors, spans, programs=programs, lanes=lanes, warps=1)
    assert torch.equal(got, sums_torch(tensors, spans))
    assert got.tolist() == [reference(x, span) for x, span in zip(tensors, spans, strict=True)]


@kernel
def test_the_kernel_s_sum_wraps_where_it_overflows() -> None:
    for lowest, dtype in ((-(2**15), torch.int16), (-(2**31), torch.int32), (-(2**63), torch.int64)):
        x = torch.full((300,), lowest, dtype=dtype, device=DEVICE)
        span = Span(1, 300, 300, 300, 2**60 + 1)
        assert sums_triton([x], [span], programs=2, lanes=16, warps=1).item() == reference(x, span)


@cuda
def test_a_model_s_sums_on_cuda_are_those_on_the_cpu() -> None:
    kinds = [torch.bfloat16, torch.float32, torch.uint8]
    state = {str(i): noise(kinds[i % 3], 1 + 7919 * i, seed=i) for i in range(60)}
    state |= {"wide": noise(torch.bfloat16, 3000, 4100), "none": torch.empty(0)}
    there = {name: x.to(DEVICE) for name, x in state.items()}
    assert checksums(there) == checksums(state)
    half = Piece(whole=(3000, 4100), axis=1, start=2049, stop=4100)
    mine = piece_checksums({"wide": half.of(there["wide"])}, {"wide": half})
    assert mine == piece_checksums({"wide": half.of(state["wide"])}, {"wide": half})
