"""Supervised fine-tuning of a whole model on one device: cross-entropy of what should be written.

The batch is packed, so no token is padding; products are in bfloat16, weights and optimiser in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention import make_layout, packed_attention
from models.transformer import Transformer

Example = tuple[Sequence[int], Sequence[int]]  # ids that are read, ids that should be written


def fine_tune(
    model: Transformer,
    draw: Callable[[int], Sequence[Example]],
    *,
    steps: int,
    batch: int,
    lr: float,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """AdamW on the mean cross-entropy [nats] over the written tokens of each batch, in place.

    lr rises over the first tenth of the steps and falls linearly to 0. `draw(n)` gives n examples;
    `progress` gets each step and its loss.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    warm = max(1, steps // 10)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / warm, (steps - step) / max(1, steps - warm))
        with _half(model):
            logits, target, _ = _written(model, draw(batch))
        loss = F.cross_entropy(logits.float(), target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(step + 1, loss.item())


@torch.no_grad()
def reproduced(model: Transformer, examples: Sequence[Example], batch: int = 64) -> list[bool]:
    """Of each example: does the model, always taking the likeliest token, write exactly what it should?"""
    found: list[bool] = []
    for start in range(0, len(examples), batch):
        part = examples[start : start + batch]
        with _half(model):
            logits, target, row = _written(model, part)
        wrong = torch.zeros(len(part), device=target.device).index_add(
            0, row, (logits.argmax(-1) != target).float()
        )
        found += (wrong == 0).tolist()
    return found


def _written(model: Transformer, examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [n, V], target ids [n], index of the example [n]) of the tokens that should be written."""
    device = model.head.device
    layout = make_layout([len(read) + len(written) for read, written in examples], device)
    ids = torch.tensor([id for read, written in examples for id in (*read, *written)], device=device)
    ends = layout.cu_seqlens[1:].tolist()
    spans = [range(end - len(written), end) for end, (_, written) in zip(ends, examples, strict=True)]
    target = torch.tensor([place for span in spans for place in span], device=device)
    row = torch.tensor([i for i, span in enumerate(spans) for _ in span], device=device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_attention(q, k, v, layout)

    hidden = model(ids, layout.positions, attend)
    return model.logits(hidden[target - 1]), ids[target], row


@contextmanager
def _half(model: Transformer) -> Iterator[None]:
    with torch.autocast(model.head.device.type, torch.bfloat16):
        yield
