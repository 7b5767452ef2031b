"""VESPO: REINFORCE with a smooth, one-humped weight of the whole sequence's ratio."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG_W_MIN, LOG_W_MAX = math.log(1e-8), 20.0  # nats


def vespo_loss(
    logp: Tensor,
    logp_mu: Tensor,
    adv: Tensor,
    mask: Tensor,
    *,
    k_pos: float = 2.0,
    lam_pos: float = 3.0,
    k_neg: float = 3.0,
    lam_neg: float = 2.0,
    row: Tensor | None = None,
    n_rows: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Gamma-shaped sequence weight.

    w_i  = prod_t exp(logp - logp_mu)  over the kept tokens, log w_i held to [log 1e-8, 20]
    phi  = w^k exp(lam (1 - w)),   (k, lam) = (k_pos, lam_pos) where A >= 0, (k_neg, lam_neg) where A < 0
    L_it = -stop(phi_i) A_it logp_it,   dL_it/dlogp_it = -phi_i A_it

    phi is 1 on-policy, peaks at w = k / lam and goes to 0 on both sides.

    Args:
      logp, logp_mu, adv, mask: [B, T] (adv may be [B, 1]), or packed [T] with `row` [T] int64 in [0, n_rows).
        Sequences must be whole. logp_mu and adv are constants; mask is bool.
    Returns: loss, 0 off-mask; aux: rho (= w), weight (= phi). Raises ValueError for shapes that do not fit.
    See "VESPO" (arXiv:2602.10693).
    """
    logp, logp_mu, adv = _kept("vespo_loss", mask, logp, logp_mu.detach(), adv.detach())
    log_w = _row_sum(logp.detach() - logp_mu, row, n_rows).clamp(LOG_W_MIN, LOG_W_MAX)
    k = torch.where(adv >= 0, torch.full_like(adv, k_pos), k_neg)
    lam = torch.where(adv >= 0, torch.full_like(adv, lam_pos), lam_neg)
    phi = (k * log_w - lam * torch.expm1(log_w)).exp()
    return _out(mask, -phi * adv * logp, rho=log_w.exp(), weight=phi)


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
