"""Causal attention over packed sequences: many of different length in one row, none sees another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

Backend = Literal["varlen", "padded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where S sequences lie in a packed row of T tokens; L is the longest.

    `padded` [S, L] is the row's token for each place of a padded batch (places past a sequence's end hold its
    last token); `packed` [T] is each token's place in the flattened padded batch.
    """

    cu_seqlens: Tensor  # [S + 1] int32
    max_len: int
    positions: Tensor  # [T] int64, from 0 in each sequence
    padded: Tensor
    packed: Tensor


def make_layout(
    lengths: Sequence[int], device: torch.device | str = "cpu", *, total: int | None = None
) -> Layout:
    """Layout of sequences that lie one after another, filled up with padding to `total` tokens.

    The padding becomes sequences no longer than the longest real one, so that it costs no more than they do.
    """
    lengths = list(lengths)
    used = sum(lengths)
    if not lengths or min(lengths) < 1:
        raise ValueError(f"make_layout: every sequence needs at least one token, got lengths {lengths}")
    if total is not None and total < used:
        raise ValueError(f"make_layout: {used} tokens do not fit into total={total}")
    longest = max(lengths)
    full, rest = divmod((total or used) - used, longest)
    lengths = lengths + [longest] * full + [rest] * bool(rest)
    length = torch.tensor(lengths)
    end = length.cumsum(0)
    start = end - length
    place = torch.arange(longest)
    positions = torch.arange(int(end[-1])) - torch.repeat_interleave(start, length)
    row = torch.repeat_interleave(torch.arange(len(lengths)), length)
    return Layout(
        cu_seqlens=F.pad(end, (1, 0)).to(torch.int32).to(device),
        max_len=longest,
        positions=positions.to(device),
        padded=(start[:, None] + torch.minimum(place, length[:, None] - 1)).to(device),
        packed=(row * longest + positions).to(device),
    )


def attention_backend(device: torch.device | str, dtype: torch.dtype = torch.float32) -> Backend:
    """Which way `packed_attention` goes: torch's varlen attention on CUDA in half precision, or padding."""
    half = dtype in (torch.bfloat16, torch.float16)
    return "varlen" if torch.device(device).type == "cuda" and half else "padded"


def packed_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """softmax(q kᵀ / sqrt(H)) v, causal within each sequence of the row.

    q [T, N, H], k and v [T, K, H] -> [T, N, H]. K divides N: query head n reads key head n // (N / K).
    "GQA", Ainslie et al. 2023.
    """
    if attention_backend(q.device, q.dtype) == "varlen":
        return _varlen(q, k, v, layout)
    return _padded(q, k, v, layout)


def _padded(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    # A [T, T] mask would cost sum(length)² where this costs S · L².
    q, k, v = (rearrange(x[layout.padded], "s l n h -> s n l h") for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return rearrange(o, "s n l h -> (s l) n h")[layout.packed]


def _varlen(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if groups > 1:  # torch 2.11's varlen_attn has no enable_gqa
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    cu, longest = layout.cu_seqlens, layout.max_len
    o = varlen_attn(q, k, v, cu, cu, longest, longest, window_size=(-1, 0))
    assert isinstance(o, Tensor)
    return o
