"""Floating-point operations of a forward pass, from the sizes alone. A backward pass takes twice as many."""

from __future__ import annotations

from collections.abc import Sequence

from models.config import ModelConfig


def forward_flops(cfg: ModelConfig, prompt: int, answers: Sequence[int]) -> float:
    """Operations for one prompt of P tokens with answers of n_1 … n_S, the prompt computed once:

    c_layer · (P + Σ n_i) + c_head · Σ n_i + c_pair · (P² / 2 + Σ (P · n_i + n_i² / 2))

    c_layer = 2 · layers · (2 · D · N · H + 2 · D · K · H + 3 · D · d_ff), the matmuls of a token;
    c_head = 2 · D · V, of a trained token;
    c_pair = 4 · layers · N · H, of a query and a key that it sees.

    With N query heads and K key heads of size H. One sample with a prompt of its own has one answer: its
    tokens are then L = P + n, and its pairs L² / 2.
    """
    n, tokens = sum(answers), prompt + sum(answers)
    heads = 2 * cfg.n_heads + 2 * cfg.n_kv_heads
    layer = 2 * cfg.n_layers * cfg.d_model * (heads * cfg.head_dim + 3 * cfg.d_ff)
    pairs = prompt**2 / 2 + sum(prompt * a + a**2 / 2 for a in answers)
    return (
        layer * tokens
        + 2 * cfg.d_model * cfg.vocab_size * n
        + 4 * cfg.n_layers * cfg.n_heads * cfg.head_dim * pairs
    )
