"""All averaging, in one place: the weight of each token in `loss = sum(weight * token_loss)`.

The weights are built from GLOBAL counts: of the whole optimiser step, over all micro-batches and ranks, taken
once, before the split, from the mask that the loss will use. Micro-batches and ranks then only add, and any
split gives the same gradient. Where a framework averages gradients over R ranks (DDP, FSDP), multiply the
loss by R.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Agg = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant", "prompt_mean"]
Count = int | float | Tensor


def row_weight(
    n_tokens: Tensor,
    *,
    agg: Agg,
    total_tokens: Count,
    total_rows: Count,
    group_tokens: Tensor | None = None,
    total_groups: Count | None = None,
    norm_length: Count | None = None,
) -> Tensor:
    """The weight that each kept token of row b gets.

    token_mean            1 / total_tokens                      every token alike (DAPO)
    seq_mean_token_sum    1 / total_rows                        sum in an answer, mean over answers
    seq_mean_token_mean   1 / (total_rows n_tokens[b])          every answer alike (GRPO, GSPO)
    constant              1 / (total_rows norm_length)          no bias by length (Dr.GRPO)
    prompt_mean           1 / (total_groups group_tokens[b])    every prompt alike, its tokens alike

    n_tokens [B]: kept tokens of the row. group_tokens [B]: kept tokens of the row's whole group. norm_length:
    a constant, such as the length limit, never the width of a batch. Totals are of the step. Whether they
    count rows or groups without signal is the caller's choice: counted, they dilute; not counted, the others
    weigh more. What a correction rejects should count (a rejected token is a zero). Use the same totals for
    every term of an objective.
    Returns [B] float32, 0 for a row without kept tokens. Raises ValueError for an agg that is unknown or
    lacks its arguments. See "DAPO" (arXiv:2503.14476), "DeepSeekMath" (arXiv:2402.03300), "Understanding
    R1-Zero-Like Training" (arXiv:2503.20783).
    """
    n = n_tokens.double()
    if agg == "token_mean":
        denominator = n.new_ones(()) * total_tokens
    elif agg == "seq_mean_token_sum":
        denominator = n.new_ones(()) * total_rows
    elif agg == "seq_mean_token_mean":
        denominator = n * total_rows
    elif agg == "constant" and norm_length is not None:
        denominator = n.new_ones(()) * total_rows * norm_length
    elif agg == "prompt_mean" and group_tokens is not None and total_groups is not None:
        denominator = group_tokens.double() * total_groups
    else:
        raise ValueError(
            f'row_weight: unknown agg {agg!r}, or "constant" without norm_length, or "prompt_mean" without '
            "group_tokens and total_groups"
        )
    return torch.where(n > 0, 1.0 / denominator, 0.0).float()


def token_weight(
    mask: Tensor,
    *,
    agg: Agg,
    total_tokens: Count,
    total_rows: Count,
    group_tokens: Tensor | None = None,
    total_groups: Count | None = None,
    norm_length: Count | None = None,
    row: Tensor | None = None,
    n_rows: int | None = None,
) -> Tensor:
    """`row_weight` on every kept token, 0 elsewhere; for rows that are whole in this mask.

    weight[b, t] = row_weight(sum_t mask[b, t])[b] where mask[b, t]

    mask bool [B, T], or packed [T] with `row` [T] int64 in [0, n_rows). group_tokens: [B], packed [n_rows].
    The other arguments as for `row_weight`. Returns float32, shape of mask. For rows cut over ranks (context
    parallelism) count their tokens over the ranks and take `row_weight`. Raises ValueError for shapes that do
    not fit.
    """
    packed = row is not None and n_rows is not None
    if mask.dtype != torch.bool or mask.ndim != (1 if packed else 2) or (row is None) != (n_rows is None):
        raise ValueError(
            "token_weight: want mask bool [B, T], or [T] with row and n_rows, "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    if row is None or n_rows is None:
        n_tokens = mask.sum(-1)
    else:
        n_tokens = row.new_zeros(n_rows).index_add(0, row, mask.to(row.dtype))
    weight = row_weight(
        n_tokens,
        agg=agg,
        total_tokens=total_tokens,
        total_rows=total_rows,
        group_tokens=group_tokens,
        total_groups=total_groups,
        norm_length=norm_length,
    )
    return torch.where(mask, weight.unsqueeze(-1) if row is None else weight[row], 0.0)
