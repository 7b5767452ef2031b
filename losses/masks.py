"""From sampled tokens to masks: which tokens the policy chose, and whether the answer was finished."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor


def completion_mask(
    tokens: Tensor, length: Tensor, eos_ids: Collection[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    """True on the tokens up to the first end-of-sequence token, which is included, and within length.

    mask_t = t < min(length, 1 + index of the first token in eos_ids)

    Padding is known by length, never by its id: it may equal an eos id, and an answer cut by the limit has no
    eos at all. No token is replaced: a cut answer keeps its last token and gets no eos to learn.

    tokens: [B, T] int, padded on the right; length: [B] tokens sampled. Returns mask [B, T] bool; aux:
    n_tokens [B] and truncated [B] bool (no eos within length). Take lengths to be logged from n_tokens,
    before any filter.
    """
    if tokens.ndim != 2 or length.shape != tokens.shape[:1]:
        raise ValueError(
            "completion_mask: want tokens [B, T] and length [B], "
            f"got {tuple(tokens.shape)} and {tuple(length.shape)}"
        )
    inside = torch.arange(tokens.shape[1], device=tokens.device) < length.unsqueeze(-1)
    is_eos = torch.zeros_like(inside)
    for eos in eos_ids:
        is_eos = is_eos | (tokens == eos)
    ends = (is_eos & inside).to(torch.int64)
    mask = inside & (ends.cumsum(-1) - ends == 0)  # no eos before this token
    return mask, {"n_tokens": mask.sum(-1), "truncated": ends.sum(-1) == 0}


def drop_truncated(mask: Tensor, truncated: Tensor) -> Tensor:
    """Overlong filtering: mask without the rows that were cut by the length limit.

    mask [B, T], truncated [B], both bool. Whether the dropped tokens still count is decided by the totals
    handed to `token_weight`: the old totals keep their zeros in the mean, those of the new mask do not. See
    "DAPO", section 3.4 (arXiv:2503.14476).
    """
    if mask.dtype != torch.bool or truncated.dtype != torch.bool or truncated.shape != mask.shape[:1]:
        raise ValueError(
            "drop_truncated: want mask bool [B, T] and truncated bool [B], "
            f"got {mask.dtype} {tuple(mask.shape)} and {truncated.dtype} {tuple(truncated.shape)}"
        )
    return mask & ~truncated.unsqueeze(-1)
