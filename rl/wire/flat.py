"""All weights of a model in one piece of memory, in the order that both ends know from its config."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.config import ModelConfig
from models.weights import expected_shapes

ALIGN = 16  # elements: every tensor begins where kernels can read whole vectors
BUCKET = 512 << 20  # bytes of one broadcast; NCCL is at its full rate from 64 MiB on


def offsets(cfg: ModelConfig) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
    """Name -> (first element, shape), and the number of elements in all."""
    at, out = 0, {}
    for name, shape in expected_shapes(cfg).items():
        out[name] = at, shape
        at += -(-math.prod(shape) // ALIGN) * ALIGN
    return out, at


def views(buffer: Tensor, cfg: ModelConfig, start: int = 0) -> dict[str, Tensor]:
    """Tensors over a buffer that holds the elements from `start` on: those that lie in it whole."""
    out = {}
    for name, (at, shape) in offsets(cfg)[0].items():
        n = math.prod(shape)
        if start <= at and at + n <= start + buffer.numel():
            out[name] = buffer[at - start : at - start + n].view(shape)
    return out


def buckets(cfg: ModelConfig, limit: int = BUCKET) -> list[tuple[int, int]]:
    """(first, one past the last element) of pieces of whole tensors, about `limit` bytes each."""
    places, total = offsets(cfg)
    most = max(1, limit // dtype_of(cfg).itemsize)
    cuts = [0]
    for at, _ in places.values():
        if at - cuts[-1] >= most:
            cuts.append(at)
    return list(zip(cuts, [*cuts[1:], total], strict=True))


def dtype_of(cfg: ModelConfig) -> torch.dtype:
    return getattr(torch, cfg.dtype)
