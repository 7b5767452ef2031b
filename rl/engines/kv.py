"""Keys and values of running samples, and attention over them at shapes that one row's length decides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from models.config import ModelConfig
from models.transformer import Attend, Transformer


class KVCache:
    """One slot per running sample, and one more slot for the writes of dummy rows.

    Per layer [slots + 1, length, 2 K H]: a token's keys and values lie side by side, a slot's tokens in
    order, so that one copy per row gathers the first tokens of a slot. The length grows with the longest row.
    """

    def __init__(self, cfg: ModelConfig, slots: int, device: str, dtype: torch.dtype) -> None:
        width = 2 * cfg.n_kv_heads * cfg.head_dim
        self.head_dim = cfg.head_dim
        empty = torch.zeros(slots + 1, 0, width, device=device, dtype=dtype)
        self.layers = [empty] * cfg.n_layers

    def _reserve(self, length: int) -> None:
        short = length - self.layers[0].shape[1]
        if short > 0:
            self.layers = [F.pad(cache, (0, 0, 0, short)) for cache in self.layers]

    def decode(
        self, slots: Tensor, positions: Tensor, lengths: Sequence[int], counts: Sequence[int]
    ) -> Attend:
        """Attention of one new token per row, at `positions` [R] of `slots` [R], over its slot so far.

        Rows come in groups: the first counts[0] see the first lengths[0] places of their slots, and so on.
        """
        self._reserve(max(lengths))
        device = self.layers[0].device
        room, width = self.layers[0].shape[1:]
        places = (slots * room + positions).to(device)
        slots, positions = slots.to(device), positions.to(device)
        counts = list(counts)
        parts = []
        for length, part, position in zip(lengths, slots.split(counts), positions.split(counts), strict=True):
            unseen = torch.arange(length, device=device) > position[:, None]
            bias = torch.zeros(unseen.shape, device=device, dtype=self.layers[0].dtype)
            parts.append((length, part, bias.masked_fill_(unseen, -torch.inf)[:, None, None]))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache = self.layers[layer]
            cache.view(-1, width).index_copy_(0, places, side_by_side(k, v).flatten(0, -2))
            out = []
            queries = q.flatten(0, -3)[:, :, None].split(counts)
            for (length, part, bias), rows in zip(parts, queries, strict=True):
                kv = cache.view(len(cache), -1)[:, : length * width].index_select(0, part)
                keys, values = rearrange(kv, "b (l two k h) -> two b k l h", l=length, two=2, h=self.head_dim)
                out.append(
                    F.scaled_dot_product_attention(
                        rows, keys, values, attn_mask=bias, enable_gqa=rows.shape[1] != keys.shape[1]
                    )
                )
            return torch.cat(out).view(q.shape)

        return attend

    def write(self, slots: Tensor, kv: Sequence[Tensor]) -> None:
        """Fill the first L places of `slots` [R] with keys and values [R, L, 2 K H] per layer."""
        self._reserve(kv[0].shape[1])
        for cache, new in zip(self.layers, kv, strict=True):
            cache[slots.to(cache.device), : new.shape[1]] = new


def side_by_side(k: Tensor, v: Tensor) -> Tensor:
    """[..., K, H] twice -> [..., 2 K H]"""
    return torch.cat((k.flatten(-2), v.flatten(-2)), dim=-1)


def prefill(model: Transformer, ids: Tensor, *, keep: bool) -> tuple[Tensor, list[Tensor]]:
    """Hidden states [R, L, D] of ids [R, L], causal, padded at the end; with `keep` also keys and values."""
    kv: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if keep:
            kv.append(side_by_side(k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)

    device = model.head.device
    positions = torch.arange(ids.shape[1], device=device).expand(ids.shape)
    return model(ids.to(device), positions, attend), kv
