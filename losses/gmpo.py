"""GMPO: a clipped ratio per token, their geometric mean per sequence."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RHO_MAX = 20.0  # nats


def gmpo_loss(
    logp: Tensor,
    logp_mu: Tensor,
    adv: Tensor,
    mask: Tensor,
    *,
    eps_low: float = 0.4,
    eps_high: float = 0.4,
    row: Tensor | None = None,
    n_rows: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Geometric-mean surrogate, its value repeated on each token of the sequence.

    d_it = logp - logp_mu;   d~_it = min(d_it, eps_high) where A > 0,  max(d_it, -eps_low) where A <= 0
    L_it = -A_it exp(mean_t d~_it),  the mean over the kept tokens of sequence i

    The clip is on log-ratios (0.4 is a ratio of 1.49 or 0.67), and only on the side that the advantage pushes
    to. With "seq_mean_token_mean" the gradient is -A s_i / n_i per unclipped token, 0 per clipped one. |d| is
    held to 20 nats.

    Args:
      logp, logp_mu, adv, mask: [B, T] (adv may be [B, 1]), or packed [T] with `row` [T] int64 in [0, n_rows).
        Sequences must be whole. logp_mu and adv are constants; mask is bool.
    Returns: loss, 0 off-mask; aux: rho (the sequence's mean), clipped_low, clipped_high (of the token).
    Raises ValueError for shapes that do not fit. See "Geometric-Mean Policy Optimization" (arXiv:2507.20673).
    """
    logp, logp_mu, adv = _kept("gmpo_loss", mask, logp, logp_mu.detach(), adv.detach())
    d = (logp - logp_mu).clamp(-LOG_RHO_MAX, LOG_RHO_MAX)
    clipped = torch.where(mask, torch.where(adv > 0, d.clamp(max=eps_high), d.clamp(min=-eps_low)), 0.0)
    n = _row_sum(mask.to(d.dtype), row, n_rows).clamp(min=1.0)
    s = (_row_sum(clipped, row, n_rows) / n).exp()
    return _out(
        mask, -adv * s, rho=s, clipped_low=(adv < 0) & (d < -eps_low), clipped_high=(adv > 0) & (d > eps_high)
    )


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
