"""One integer that proves the bits of a tensor, or of the rows or columns of it that one rank holds.

On CUDA one Triton kernel reads all tensors of a model, every byte once; without Triton, and on a CPU, torch
does the same sum.
"""

# pyright: reportInvalidTypeForm=false, reportIndexIssue=false
from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.shards import Piece
from models.weights import as_tensor

INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 16  # elements that a core widens at once: 0.5 MiB, which stay in its cache
tl: Any = None  # triton.language, once there is a kernel


class Span(NamedTuple):
    """Element (r, c) lies r stride + c elements after the first, and is number first + r pitch + c of the
    whole tensor."""

    rows: int
    columns: int
    stride: int
    pitch: int
    first: int


def checksum(tensor: Tensor | np.ndarray) -> int:
    """Σ_i bits_i · (2i + 1) mod 2^64, as a signed integer, over the raw bits of the elements.

    The same on every device. Odd weights are invertible mod 2^64, so any change of one element changes it.
    A swap of two different elements of up to 32 bits changes it by 2 (i - j) (bits_i - bits_j), never a
    multiple of 2^64.
    """
    return checksums({"": tensor})[""]


def checksums(state: Mapping[str, Tensor | np.ndarray]) -> dict[str, int]:
    """`checksum` of every tensor, with one wait for the device in all."""
    tensors = [as_tensor(x).contiguous() for x in state.values()]
    return dict(zip(state, _sums(tensors, [_flat(x.numel()) for x in tensors]), strict=True))


def piece_checksums(views: Mapping[str, Tensor], pieces: Mapping[str, Piece]) -> dict[str, int]:
    """Each piece's share of the `checksum` of its whole: the shares of all pieces add up to it, mod 2^64.

    The rows of a view may lie apart in memory. 0 for a piece that another rank counts.
    """
    counted = [name for name in views if pieces[name].counted]
    tensors = [_rows(views[name]) for name in counted]
    spans = [_span(x, pieces[name]) for name, x in zip(counted, tensors, strict=True)]
    return dict.fromkeys(views, 0) | dict(zip(counted, _sums(tensors, spans), strict=True))


def add_checksums(shares: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Name -> the checksum of the whole, from every rank's shares."""
    return {name: (sum(share[name] for share in shares) + 2**63) % 2**64 - 2**63 for name in shares[0]}


def _rows(x: Tensor) -> Tensor:
    """x, or a copy whose rows are contiguous."""
    return x if x.is_contiguous() or (x.ndim == 2 and x.stride(1) == 1) else x.contiguous()


def _flat(n: int, first: int = 0) -> Span:
    return Span(1, n, n, n, first)


def _span(x: Tensor, piece: Piece) -> Span:
    assert piece.axis < 2, piece
    first = piece.start * math.prod(piece.whole[piece.axis + 1 :])
    columns, pitch = math.prod(x.shape[1:]), math.prod(piece.whole[1:])
    if x.is_contiguous() and columns == pitch:
        return _flat(x.numel(), first)
    return Span(len(x), columns, columns if x.is_contiguous() else x.stride(0), pitch, first)


def _sums(tensors: Sequence[Tensor], spans: Sequence[Span]) -> list[int]:
    """Each tensor's sum; what has one device and one element size goes together."""
    groups: dict[tuple[torch.device, int], list[int]] = {}
    for i, x in enumerate(tensors):
        groups.setdefault((x.device, x.element_size()), []).append(i)
    out = [0] * len(tensors)
    for (device, _), places in groups.items():
        sums = sums_triton if has_triton(device) else sums_torch
        totals = sums([tensors[i] for i in places], [spans[i] for i in places])
        for i, total in zip(places, totals.tolist(), strict=True):
            out[i] = total
    return out


def sums_torch(tensors: Sequence[Tensor], spans: Sequence[Span]) -> Tensor:
    """[tensors] int64: Σ bits (2 (first + r pitch + c) + 1) of each; int64 wraps as mod 2^64 does."""
    return torch.stack([_sum(x, span) for x, span in zip(tensors, spans, strict=True)])


def _sum(x: Tensor, span: Span) -> Tensor:
    rows, columns, stride, pitch, first = span
    if rows == 1:  # the same as a column
        rows, columns, stride, pitch = columns, 1, 1, 1
    bits = x.detach().view(INT_OF_SIZE[x.element_size()]).as_strided((rows, columns), (stride, 1))
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    limit = CHUNK * (torch.get_num_threads() if x.device.type == "cpu" else 64)  # a device: few launches
    step = min(rows, max(1, limit // max(1, columns)))
    row, column = (torch.arange(n, device=x.device) for n in (step, columns))
    weight = 2 * (row[:, None] * pitch + column) + 1
    for start in range(0, rows, max(1, step)):
        chunk = bits[start : start + step].long()
        total += (chunk * weight[: len(chunk)]).sum() + chunk.sum() * (2 * (first + start * pitch))
    return total


def has_triton(device: torch.device) -> bool:
    """Whether `sums_triton` can run on tensors of this device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def sums_triton(
    tensors: Sequence[Tensor],
    spans: Sequence[Span],
    *,
    programs: int = 1024,
    lanes: int = 512,
    warps: int = 4,
) -> Tensor:
    """`sums_torch` of tensors of one device and one element size, in one launch.

    programs: for each tensor, at most. lanes: 16-byte reads of a program's step. warps: of 32 threads each.
    """
    size, device = tensors[0].element_size(), tensors[0].device
    # `tensors` keep alive what the addresses are of, until the launch is queued
    table = np.array([(x.data_ptr(), *span) for x, span in zip(tensors, spans, strict=True)], np.int64)
    totals = torch.zeros(len(table), dtype=torch.int64, device=device)
    with torch.cuda.device(device if device.type == "cuda" else -1):
        _jitted()[(programs, len(table))](
            torch.from_numpy(table).to(device), totals, SIZE=size, LANES=lanes, num_warps=warps
        )
    return totals


def _kernel(table_ptr, totals_ptr, SIZE: tl.constexpr, LANES: tl.constexpr):
    """One tensor is y of the grid; its rows are cut into tiles, dealt out to the programs along x.

    Reads begin at multiples of 16 bytes, the widest there are, so those of a row may begin before it and end
    after it, inside of the same 16 bytes: what is no element of it counts as 0.
    """
    WIDTH: tl.constexpr = 16 // SIZE
    TILE: tl.constexpr = LANES * WIDTH
    KIND: tl.constexpr = (
        tl.uint8 if SIZE == 1 else tl.int16 if SIZE == 2 else tl.int32 if SIZE == 4 else tl.int64
    )
    # a lane's sum of 8 and 16 bits times numbers below 16 fits 32 bits, in which a GPU adds twice as fast
    WIDE: tl.constexpr = tl.int32 if SIZE <= 2 else tl.int64
    entry = table_ptr + 6 * tl.program_id(1)
    address, rows, columns = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    stride, pitch, first = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    aligned = ((address | (stride * SIZE)) & 15) == 0
    before = tl.where(aligned | (columns == 0), 0, WIDTH - 1)  # at most, in any row
    per_row = tl.cdiv(columns + before, TILE).to(tl.int32)
    tiles = per_row * rows.to(tl.int32)
    lane, item = tl.arange(0, LANES) * WIDTH, tl.arange(0, WIDTH)
    place = lane[:, None] + item[None, :]
    total = tl.zeros([LANES], tl.int64)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile // per_row
        start = address + row * stride * SIZE
        lead = (start & 15) // SIZE
        column = (tile - row * per_row).to(tl.int64) * TILE - lead  # of the tile's first place
        low = tl.maximum(-column, 0).to(tl.int32)
        high = tl.minimum(columns - column, TILE).to(tl.int32)
        at = tl.multiple_of((start + column * SIZE).to(tl.pointer_type(KIND)), 16)
        bits = tl.load(at + place, (lane < high)[:, None], 0)
        if (low > 0) | (high < TILE):
            bits = tl.where((place >= low) & (place < high), bits, 0)
        bits = bits.to(WIDE)
        plain, tilted = tl.sum(bits, 1).to(tl.int64), tl.sum(bits * item[None, :], 1).to(tl.int64)
        total += plain * (2 * (first + row * pitch + column + lane) + 1) + 2 * tilted
    if tl.program_id(0) < tiles:
        tl.atomic_add(totals_ptr + tl.program_id(1), tl.sum(total, 0), sem="relaxed")


@functools.cache
def _jitted() -> Any:
    global tl
    tl = importlib.import_module("triton.language")
    return importlib.import_module("triton").jit(_kernel)
