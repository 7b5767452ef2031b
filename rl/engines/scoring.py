"""Log-probs of given tokens, and scores of sequences, each at a shape of its own: what teachers and scalar
judges answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from models.transformer import Transformer
from rl.engines.kv import prefill
from rl.engines.shapes import bucket_of, by_bucket, head_logits, stack
from rl.types import Scores

TOKENS_AT_ONCE = 16_384  # of a forward pass
LOGITS_AT_ONCE = 1 << 23  # in float64: 64 MiB


def hidden_states(
    model: Transformer, sequences: Sequence[Sequence[int]], max_len: int
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """(places of R sequences, their ids [R, L], hidden states [R, L, D]), until all have been read."""
    for length, rows in by_bucket(torch.tensor([bucket_of(len(s), max_len) for s in sequences])):
        for chunk in rows.split(max(1, TOKENS_AT_ONCE // length)):
            part = chunk.tolist()
            ids = stack([sequences[i] for i in part], length)
            hidden, _ = prefill(model, ids, keep=False)
            yield part, ids, hidden


def classify(model: Transformer, sequences: Sequence[Sequence[int]], *, max_len: int) -> list[float]:
    """The score head on the hidden state of each sequence's last token.

    The model has fixed shapes: a sequence's score is the same bits whichever others are read beside it.
    """
    scores = torch.empty(len(sequences))
    for part, _, hidden in hidden_states(model, sequences, max_len):
        last = torch.tensor([len(sequences[i]) - 1 for i in part])
        scores[part] = model.score(hidden[torch.arange(len(part)), last]).cpu()
    return scores.tolist()


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
    """log softmax(logits / temperature) at sequences[i][starts[i]:], given all tokens before each, in nats.

    The model has fixed shapes: a sequence's scores are the same bits whichever others are scored beside it.
    """
    out: dict[int, Scores] = {}
    for part, ids, hidden in hidden_states(model, sequences, max_len):
        counts = [len(sequences[i]) - starts[i] for i in part]
        row = torch.repeat_interleave(torch.arange(len(part)), torch.tensor(counts))
        at = torch.cat([torch.arange(starts[i], len(sequences[i])) for i in part])
        columns = _score_tokens(model, hidden[row, at - 1], ids[row, at], block, top_k, full, temperature)
        for i, *found in zip(part, *(column.split(counts) for column in columns), strict=True):
            logps, top_ids, top_logps, whole = (x.numpy().copy() for x in found)
            out[i] = Scores(
                logps=logps,
                top_ids=top_ids if top_k else None,
                top_logps=top_logps if top_k else None,
                full=whole if full else None,
            )
    return [out[i] for i in range(len(sequences))]


def _score_tokens(
    model: Transformer, hidden: Tensor, target: Tensor, block: int, top_k: int, full: bool, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [R, D], target [R] -> logps [R], top ids and top logps [R, top_k], whole [R, V] or [R, 0]."""
    vocab_size = len(model.head)
    rows = max(1, LOGITS_AT_ONCE // (vocab_size * block)) * block
    pieces = []
    for x, y in zip(hidden.split(rows), target.split(rows), strict=True):
        logp = (head_logits(model, x, block).double() / temperature).log_softmax(-1).float().cpu()
        top = logp.topk(top_k, dim=-1)
        whole = logp if full else logp[:, :0]
        pieces.append((logp.gather(-1, y[:, None])[:, 0], top.indices.int(), top.values, whole))
    logps, top_ids, top_logps, whole = (torch.cat(column) for column in zip(*pieces, strict=True))
    return logps, top_ids, top_logps, whole
