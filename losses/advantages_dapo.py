"""DAPO's rules about rewards: which groups to keep, and a soft penalty for answers near the length limit."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_groups(metric: Tensor, valid: Tensor | None = None) -> Tensor:
    """Dynamic sampling: True for groups whose valid answers do not all have the same outcome.

    keep_g = max_g metric != min_g metric  and at least two valid answers

    metric [P, G]: the UNSHAPED outcome (accuracy, the judge's score), without length penalty or other
    shaping, under which a group that is all right would look mixed. valid [P, G] bool. Returns bool [P]. For
    metric in {0, 1} this is 0 < mean < 1. Raises ValueError for bad shapes. See "DAPO", section 3.2
    (arXiv:2503.14476).
    """
    valid = torch.ones_like(metric, dtype=torch.bool) if valid is None else valid
    if metric.ndim != 2 or valid.shape != metric.shape or valid.dtype != torch.bool:
        raise ValueError(
            f"keep_groups: want metric and valid bool [P, G], got {tuple(metric.shape)} and "
            f"{valid.dtype} {tuple(valid.shape)}"
        )
    metric = torch.where(valid, metric.detach(), 0.0)
    high = torch.where(valid, metric, -torch.inf).amax(-1)
    low = torch.where(valid, metric, torch.inf).amin(-1)
    return (valid.sum(-1) >= 2) & (high != low)


def overlong_penalty(n_tokens: Tensor, *, max_tokens: int, buffer: int) -> Tensor:
    """Soft overlong punishment, to be added to a reward on the scale of 1.

    penalty(n) = clip((max_tokens - buffer - n) / buffer, -1, 0)

    0 up to max_tokens - buffer, then linear, -1 at max_tokens and beyond. n_tokens: any shape; returns
    float32. The paper has 20480 and 4096. Raises ValueError unless 0 < buffer <= max_tokens. See "DAPO",
    section 3.4.
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"overlong_penalty: want 0 < buffer <= max_tokens, got {buffer} and {max_tokens}")
    return ((max_tokens - buffer - n_tokens).float() / buffer).clamp(-1.0, 0.0)
