"""Compute every row at a shape that its own length decides, so that its bits do not depend on its neighbours.

One matmul over all rows may sum in another order when their number changes. A batch of equal matmuls, one per
block of rows, does not; and what is not a matmul is computed row by row anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.transformer import Transformer

SMALLEST_BUCKET = 8


def bucket_of(length: int, max_len: int) -> int:
    """The padded length at which a row of `length` tokens is computed: a power of two, at most max_len."""
    return min(max_len, max(SMALLEST_BUCKET, 1 << (length - 1).bit_length()))


def by_bucket(buckets: Tensor) -> list[tuple[int, Tensor]]:
    """(bucket, indices of its rows) of buckets [R], in rising order."""
    return [(bucket, (buckets == bucket).nonzero()[:, 0]) for bucket in buckets.unique().tolist()]


def stack(rows: Sequence[Sequence[int]], length: int) -> Tensor:
    """Token ids [R, length], each row filled up with 0."""
    return torch.tensor([[*row, *[0] * (length - len(row))] for row in rows], dtype=torch.int64)


def blocked(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ, one matmul per block: x [blocks, rows, D], weight [F, D] -> [blocks, rows, F]."""
    return torch.bmm(x, weight.T.expand(len(x), -1, -1))


class BlockLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        y = blocked(input, self.weight)
        return y if self.bias is None else y + self.bias


def fix_shapes(model: Transformer) -> Transformer:
    """Make the model compute its matmuls per block, in place; from then on it reads ids [blocks, rows]."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = BlockLinear
    return model


def head_logits(model: Transformer, hidden: Tensor, block: int) -> Tensor:
    """Logits [R, V] of hidden states [R, D], in blocks of `block` rows."""
    n, d = hidden.shape
    x = F.pad(hidden, (0, 0, 0, -n % block)).view(-1, block, d)
    return blocked(x, model.head).flatten(0, 1)[:n]
