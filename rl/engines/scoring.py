"""Log-probs of given tokens, computed in blocks of fixed shape: what a teacher answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from models.transformer import Transformer
from rl.engines.kv import prefill
from rl.engines.shapes import blocks, bucket_of, stack
from rl.types import Scores


def score(
    model: Transformer,
    sequences: Sequence[Sequence[int]],
    starts: Sequence[int],
    *,
    block: int,
    max_len: int,
    top_k: int = 0,
    full: bool = False,
    temperature: float = 1.0,
) -> list[Scores]:
    """log softmax(logits / temperature) at sequences[i][starts[i]:], each given all tokens before it, in nats.

    A sequence's scores are the same bits whichever others are scored beside it.
    """
    out: list[Scores | None] = [None] * len(sequences)
    buckets = torch.tensor([bucket_of(len(s), max_len) for s in sequences], dtype=torch.int64)
    for length, rows in blocks(buckets, block):
        part = rows.tolist()
        ids = stack([sequences[i] for i in part], block, length)
        hidden, _ = prefill(model, ids, keep=False)
        counts = [len(sequences[i]) - starts[i] for i in part]
        row = torch.repeat_interleave(torch.arange(len(part)), torch.tensor(counts))
        at = torch.cat([torch.arange(starts[i], len(sequences[i])) for i in part])
        found = _score_rows(model, hidden, row, at, ids[row, at], block, top_k, full, temperature)
        for i, *columns in zip(part, *(x.split(counts) for x in found), strict=True):
            logps, top_ids, top_logps, whole = (column.numpy().copy() for column in columns)
            out[i] = Scores(
                logps=logps,
                top_ids=top_ids if top_k else None,
                top_logps=top_logps if top_k else None,
                full=whole if full else None,
            )
    return [scores for scores in out if scores is not None]


def _score_rows(
    model: Transformer, hidden: Tensor, row: Tensor, at: Tensor, target: Tensor,
    block: int, top_k: int, full: bool, temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores of tokens `target` at positions `at` of block rows `row`, all [R], over pieces of `block` rows.

    -> logps [R], top ids [R, top_k], top logps [R, top_k], whole distribution [R, V] or [R, 0].
    """
    pieces = []
    for start in range(0, len(row), block):
        part = slice(start, start + block)
        n = len(row[part])
        pad = (0, block - n)
        x = hidden[F.pad(row[part], pad), F.pad(at[part], pad, value=1) - 1]
        logp = (model.logits(x).double() / temperature).log_softmax(-1).float()[:n].cpu()
        top = logp.topk(top_k, dim=-1)
        pieces.append((logp.gather(-1, target[part, None])[:, 0], top.indices.int(), top.values,
                       logp if full else logp[:, :0]))
    if not pieces:
        return torch.zeros(0), torch.zeros(0, top_k).int(), torch.zeros(0, top_k), torch.zeros(0, 0)
    logps, top_ids, top_logps, whole = (torch.cat(column) for column in zip(*pieces, strict=True))
    return logps, top_ids, top_logps, whole
