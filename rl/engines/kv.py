"""Keys and values of running samples, and attention over them at shapes that one row's length decides."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from models.config import ModelConfig
from models.transformer import Attend, Transformer


class KVCache:
    """One slot of `max_len` tokens per running sample, and one more slot for the writes of dummy rows.

    Per layer [slots + 1, max_len, 2 K H]: a token's keys and values lie side by side, a slot's tokens in
    order, so
    that one copy per row gathers the first tokens of a slot.
    """

    def __init__(self, cfg: ModelConfig, slots: int, max_len: int, device: str, dtype: torch.dtype) -> None:
        width = 2 * cfg.n_kv_heads * cfg.head_dim
        self.head_dim = cfg.head_dim
        self.layers = [
            torch.zeros(slots + 1, max_len, width, device=device, dtype=dtype) for _ in range(cfg.n_layers)
        ]

    def decode(self, slots: Tensor, positions: Tensor, length: int) -> Attend:
        """Attention of one new token per slot at `positions` over its first `length` places, itself
        included."""
        device = self.layers[0].device
        max_len, width = self.layers[0].shape[1:]
        places = (slots * max_len + positions).to(device)
        slots, positions = slots.to(device), positions.to(device)
        unseen = torch.arange(length, device=device) > positions[:, None]
        bias = torch.zeros(unseen.shape, device=device, dtype=self.layers[0].dtype).masked_fill_(
            unseen, -torch.inf
        )

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache = self.layers[layer]
            cache.view(-1, width).index_copy_(0, places, _side_by_side(k, v))
            rows = cache.view(len(cache), -1)[:, : length * width].index_select(0, slots)
            keys, values = rearrange(rows, "b (l two k h) -> two b k l h", l=length, two=2, h=self.head_dim)
            grouped = q.shape[1] != k.shape[1]
            o = F.scaled_dot_product_attention(
                q[:, :, None], keys, values, attn_mask=bias[:, None, None], enable_gqa=grouped
            )
            return o[:, :, 0]

        return attend

    def write(self, slots: Tensor, kv: list[Tensor], rows: Tensor) -> None:
        """Fill the first places of `slots` [R] with `rows` [R] of what `prefill` kept, [B, L, 2 K H] per
        layer."""
        for cache, block in zip(self.layers, kv, strict=True):
            cache[slots.to(cache.device), : block.shape[1]] = block[rows.to(cache.device)]


def _side_by_side(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat((k.flatten(-2), v.flatten(-2)), dim=-1)


def prefill(model: Transformer, ids: Tensor, *, keep: bool) -> tuple[Tensor, list[Tensor]]:
    """Hidden states [B, L, D] of ids [B, L], causal, padded at the end; with `keep` the keys and values
    per layer."""
    kv: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if keep:
            kv.append(_side_by_side(k, v))
        grouped = q.shape[2] != k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)

    device = model.head.device
    positions = torch.arange(ids.shape[1], device=device).expand(ids.shape)
    return model(ids.to(device), positions, attend), kv
