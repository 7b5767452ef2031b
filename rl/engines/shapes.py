"""The few shapes at which rows are computed: a row's shape follows from its own length alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

SMALLEST_BUCKET = 8


def bucket_of(length: int, max_len: int) -> int:
    """The padded length at which a row of `length` tokens is computed: a power of two, at most max_len."""
    return min(max_len, max(SMALLEST_BUCKET, 1 << (length - 1).bit_length()))


def blocks(buckets: Tensor, block: int) -> Iterator[tuple[int, Tensor]]:
    """Indices of the rows [R] of equal bucket, in pieces of at most `block`: (bucket, indices)."""
    for bucket in buckets.unique().tolist():
        for rows in (buckets == bucket).nonzero()[:, 0].split(block):
            yield bucket, rows


def stack(rows: Sequence[Sequence[int]], block: int, length: int) -> Tensor:
    """Token ids [block, length] of at most `block` rows of at most `length` tokens, filled up with 0."""
    ids = [[*row, *[0] * (length - len(row))] for row in rows] + [[0] * length] * (block - len(rows))
    return torch.tensor(ids, dtype=torch.int64)
