"""The shards of all ranks, to rank 0: few messages, in the dtype in which they are needed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl.wire.flat import BUCKET

Rows = tuple[str, int, int]  # of a parameter: first row, one past the last


@torch.no_grad()
def gather(
    parameters: Mapping[str, Tensor], dtype: torch.dtype, limit: int = BUCKET
) -> Iterator[dict[Rows, Tensor]]:
    """On rank 0 every row of every parameter once, about `limit` bytes of each rank at a time, good until the
    next are asked for; on the others nothing. Rows are dealt as FSDP2 does: ceil(n / ranks) to each.

    All ranks must exhaust it. A parameter that is no DTensor is whole already, and comes in its own dtype.
    """
    shards = {name: p for name, p in parameters.items() if isinstance(p, DTensor)}
    whole = {(n, 0, len(p)): p.detach() for n, p in parameters.items() if n not in shards}
    ranks = dist.get_world_size() if shards else 1
    if ranks == 1:
        yield whole | {(name, 0, len(p)): p.to_local() for name, p in shards.items()}
        return
    if whole and dist.get_rank() == 0:
        yield whole
    for names in _parts(shards, limit // dtype.itemsize, ranks):
        yield from _gather([(name, shards[name]) for name in names], dtype, ranks)


def _parts(shards: Mapping[str, Tensor], most: int, ranks: int) -> list[list[str]]:
    """Names in their order, each part of about `most` elements of one rank."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, p in shards.items():
        if size and size + p.numel() // ranks > most:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += p.numel() // ranks
    return parts


def _gather(
    shards: Sequence[tuple[str, DTensor]], dtype: torch.dtype, ranks: int
) -> Iterator[dict[Rows, Tensor]]:
    rows = [-(-p.shape[0] // ranks) for _, p in shards]
    sizes = [n * math.prod(p.shape[1:]) for n, (_, p) in zip(rows, shards, strict=True)]
    local = [p.to_local() for _, p in shards]
    mine = torch.empty(sum(sizes), dtype=dtype, device=local[0].device)
    places = [part[: x.numel()].view(x.shape) for part, x in zip(mine.split(sizes), local, strict=True)]
    torch._foreach_copy_(places, local)
    first = dist.get_rank() == 0
    everyone = [torch.empty_like(mine) for _ in range(ranks)] if first else None
    into = None if everyone is None else [x.view(torch.uint8) for x in everyone]
    dist.gather(mine.view(torch.uint8), into, dst=0)
    for rank, theirs in enumerate(everyone or ()):
        found: dict[Rows, Tensor] = {}
        for n, (name, p), part in zip(rows, shards, theirs.split(sizes), strict=True):
            start, stop = min(n * rank, p.shape[0]), min(n * (rank + 1), p.shape[0])
            if stop > start:
                shape = (stop - start, *p.shape[1:])
                found[name, start, stop] = part[: math.prod(shape)].view(shape)
        yield found
