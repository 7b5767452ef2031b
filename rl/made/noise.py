"""Random weights in the shapes of Qwen2.5: for throughput, where no checkpoint can be had. "random-0.5B", ...

The text is bytes: a token is a byte, and what else the vocabulary has stands for nothing. Left to itself a
random model would write that; here it writes digits, so that its answers have a length in characters and a
judge has digits to score by. It never ends a text: every answer is as long as it may be.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from models.config import ModelConfig
from models.tokenizer import byte_tokenizer
from models.transformer import Transformer
from models.weights import save_folder


def _qwen(
    d_model: int, n_layers: int, n_heads: int, n_kv_heads: int, d_ff: int, *, tied: bool
) -> ModelConfig:
    return ModelConfig(
        family="qwen2", qkv_bias=True, vocab_size=151_936 if tied else 152_064, d_model=d_model,
        n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=d_model // n_heads, d_ff=d_ff,
        tie_embeddings=tied, rope_theta=1e6, max_len=32_768, dtype="bfloat16",
    )  # fmt: skip


SHAPES = {
    "0.5B": _qwen(896, 24, 14, 2, 4864, tied=True),
    "1.5B": _qwen(1536, 28, 12, 2, 8960, tied=True),
    "3B": _qwen(2048, 36, 16, 2, 11_008, tied=True),
    "7B": _qwen(3584, 28, 28, 4, 18_944, tied=False),
}
BYTE, DIGIT, NOTHING = 2.0, 5.0, -5.0  # channel 0 of the embeddings of these tokens


def save_random(cfg: ModelConfig, folder: Path, seed: int = 0) -> dict[str, float]:
    """Write a model of these sizes and a tokenizer of bytes as a Hugging Face folder; how many parameters.

    What is read has a positive number in channel 0, so the hidden states have one there too, and the rows of
    the head have the larger logits the more they have there. Which digit it is, is up to the other channels.
    """
    tokenizer = byte_tokenizer()
    if cfg.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"save_random: {tokenizer.vocab_size} bytes and signs want more than {cfg.vocab_size}"
        )
    cfg = replace(cfg, eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # which takes a minute for 3B
    model = Transformer(cfg, device=device)
    model.init_weights(torch.Generator(device).manual_seed(seed))
    digits = [tokenizer.encode(digit)[0] for digit in "0123456789"]
    with torch.no_grad():
        for rows in (model.model.embed_tokens.weight, model.head):
            rows[:, 0] = NOTHING
            rows[: tokenizer.vocab_size, 0] = BYTE
            rows[digits, 0] = DIGIT
    save_folder(folder, model, cfg, tokenizer)
    return {"parameters": float(cfg.n_params)}
