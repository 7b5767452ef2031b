"""Bytes that a training step takes at its fullest, from the sizes alone: an estimate."""

from __future__ import annotations

from models.config import ModelConfig
from models.parallelise import Recompute

LOGITS = 0.7 * 2**30  # of the some thousand tokens that the loss looks at together


def training_bytes(
    cfg: ModelConfig, tokens: int, *, recompute: Recompute = "none", full_blocks: int = 0, ranks: int = 1,
    several: bool = False,
) -> float:  # fmt: skip
    """Of a rank that has all bfloat16 weights and a share of masters and moments, at a micro-batch of so many
    tokens: P (2 + (4 + 8) / ranks); 2 P (1 - 1 / ranks) for other ranks' gradients; 4 P more, and twice as
    much for others', where the gradients of `several` micro-batches add up; and

    max(what blocks keep + the head's gradient + logits,  2 P of gradients)  + a block that is recomputed.

    As the backward goes down, gradients take the place of what blocks keep. Of a token that is, in numbers of
    2 bytes:

    none        5 D + (N + 2 K) H + 3 d_ff   input, middle, both normed, attention; q, k, v; gate, up, product
    selective   3 D + (N + 2 K) H + 2 d_ff   input, attention, its projection; q, k, v; gate, up
    full        D                            input; also of the first `full_blocks`, whatever the others do

    What the allocator holds beyond that, because sizes change from step to step, comes on top.
    """
    d, qkv = cfg.d_model, (cfg.n_heads + 2 * cfg.n_kv_heads) * cfg.head_dim
    everything = 5 * d + qkv + 3 * cfg.d_ff
    kept = {"none": everything, "selective": 3 * d + qkv + 2 * cfg.d_ff, "full": d}
    full = min(full_blocks, cfg.n_layers)
    numbers = full * kept["full"] + (cfg.n_layers - full) * kept[recompute]
    again = everything if full or recompute != "none" else 0
    held = cfg.n_params * (2 + 12 / ranks + 4 * several + (2 + 2 * several) * (1 - 1 / ranks))
    begin = 2 * (numbers * tokens + cfg.vocab_size * d) + LOGITS
    return held + max(begin, 2 * cfg.n_params) + 2 * again * tokens
