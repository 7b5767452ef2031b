"""What the weights compute, in a few numbers that trainer and engine can compare."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.attention import make_layout, packed_attention
from models.transformer import Transformer


@torch.no_grad()
def probe_logps(model: Transformer, ids: Sequence[int]) -> tuple[float, ...]:
    """Log-probs [len(ids) - 1] of each token given those before it, at temperature 1."""
    tokens = torch.tensor(ids, device=model.head.device)
    layout = make_layout([len(ids)], tokens.device)
    hidden = model(tokens, layout.positions, lambda _, q, k, v: packed_attention(q, k, v, layout))
    logp = model.logits(hidden[:-1]).float().log_softmax(-1)
    return tuple(logp.gather(-1, tokens[1:, None]).squeeze(-1).tolist())
