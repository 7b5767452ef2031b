"""GSPO: the clipped surrogate with one importance ratio per sequence."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RHO_MAX = 20.0  # nats; one sequence far off must not turn the whole batch into NaN


def gspo_loss(
    logp: Tensor,
    logp_mu: Tensor,
    adv: Tensor,
    mask: Tensor,
    *,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
    row: Tensor | None = None,
    n_rows: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sequence-ratio surrogate, its value repeated on each token of the sequence.

    s_i  = exp(mean_t (logp - logp_mu)),  the mean over the kept tokens of sequence i
    L_it = -min(s_i A_it, clip(s_i, 1 - eps_low, 1 + eps_high) A_it)

    With the aggregation "seq_mean_token_mean" this is the paper's objective, its gradient -s_i A_i / (B n_i)
    per token inside the clip; "seq_mean_token_sum" weighs sequences by length (LUSPO). The mean log ratio is
    held to +-20 nats; beyond, the gradient is 0.

    Args:
      logp, logp_mu, adv, mask: [B, T] (adv may be [B, 1]), or packed [T] with `row` [T] int64 in [0, n_rows).
        Sequences must be whole. logp_mu and adv are constants; mask is bool.
    Returns: loss, 0 off-mask; aux: rho (= s_i), clipped_low, clipped_high.
    Raises ValueError for shapes that do not fit.
    See "Group Sequence Policy Optimization" (arXiv:2507.18071) and, for LUSPO, arXiv:2602.05261.
    """
    logp, logp_mu, adv = _kept("gspo_loss", mask, logp, logp_mu.detach(), adv.detach())
    n = _row_sum(mask.to(logp.dtype), row, n_rows).clamp(min=1.0)
    s = (_row_sum(logp - logp_mu, row, n_rows) / n).clamp(-LOG_RHO_MAX, LOG_RHO_MAX).exp()
    loss = -torch.minimum(s * adv, s.clamp(1.0 - eps_low, 1.0 + eps_high) * adv)
    clipped_low, clipped_high = (adv < 0) & (s < 1.0 - eps_low), (adv > 0) & (s > 1.0 + eps_high)
    return _out(mask, loss, rho=s, clipped_low=clipped_low, clipped_high=clipped_high)


def gspo_token_loss(
    logp: Tensor,
    logp_mu: Tensor,
    adv: Tensor,
    mask: Tensor,
    *,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
    row: Tensor | None = None,
    n_rows: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO whose gradient stays on its own token, for advantages that differ within a sequence.

    s_it = stop(s_i) exp(logp_it - stop(logp_it)),   L_it = -min(s_it A_it, clip(s_it, ...) A_it)

    The value is that of `gspo_loss`; dL_it/dlogp_it = -s_i A_it. For one advantage per sequence and
    "seq_mean_token_mean" the gradient is that of `gspo_loss` too. Arguments, aux and errors as there.
    See "Group Sequence Policy Optimization", section 4.3 (arXiv:2507.18071).
    """
    logp, logp_mu, adv = _kept("gspo_token_loss", mask, logp, logp_mu.detach(), adv.detach())
    n = _row_sum(mask.to(logp.dtype), row, n_rows).clamp(min=1.0)
    log_s = (_row_sum(logp.detach() - logp_mu, row, n_rows) / n).clamp(-LOG_RHO_MAX, LOG_RHO_MAX)
    s = log_s.exp() * (logp - logp.detach()).exp()
    loss = -torch.minimum(s * adv, s.clamp(1.0 - eps_low, 1.0 + eps_high) * adv)
    clipped_low, clipped_high = (adv < 0) & (s < 1.0 - eps_low), (adv > 0) & (s > 1.0 + eps_high)
    return _out(mask, loss, rho=s, clipped_low=clipped_low, clipped_high=clipped_high)


def _kept(name: str, mask: Tensor, *xs: Tensor) -> list[Tensor]:
    """In float32 or better, and 0 off-mask before any arithmetic: NaN there reaches no value or gradient."""
    for x in xs:
        fits = x.ndim == mask.ndim and all(n in (1, m) for n, m in zip(x.shape, mask.shape, strict=True))
        if mask.dtype != torch.bool or not fits:
            raise ValueError(
                f"{name}: want a bool mask and tensors of its shape (a shared advantage as adv[:, None]), "
                f"got {mask.dtype} {tuple(mask.shape)} and {tuple(x.shape)}"
            )
    return [torch.where(mask, x, 0.0).to(torch.promote_types(x.dtype, torch.float32)) for x in xs]


def _out(mask: Tensor, loss: Tensor, **aux: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Everything 0 off-mask and of the mask's shape; aux without gradient, flags as 0 and 1."""
    wide = {name: torch.where(mask, x.detach().to(loss.dtype), 0.0) for name, x in aux.items()}
    return torch.where(mask, loss, 0.0), wide


def _row_sum(x: Tensor, row: Tensor | None, n_rows: int | None) -> Tensor:
    """Sum over each token's own sequence, handed back to it: [..., T] -> [..., 1], packed [T] -> [T]."""
    if (row is None) != (n_rows is None):
        raise ValueError("packed tokens need both row [T] and n_rows; padded tokens [B, T] need neither")
    if row is None or n_rows is None:
        return x.sum(-1, keepdim=True)
    return x.new_zeros(n_rows).index_add(0, row, x)[row]
