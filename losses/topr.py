"""TOPR: good answers are imitated as they are, bad ones only as far as the policy still gives them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG_W_MAX = 20.0  # nats


def topr_loss(
    logp: Tensor,
    logp_mu: Tensor,
    adv: Tensor,
    mask: Tensor,
    *,
    cap: float = 1.0,
    row: Tensor | None = None,
    n_rows: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Tapered off-policy REINFORCE.

    w_i  = 1 where A > 0,   min(prod_t exp(logp - logp_mu), cap) elsewhere: one weight per sequence
    L_it = -stop(w_i) A_it logp_it,   dL_it/dlogp_it = -w_i A_it

    The product runs over the kept tokens of the sequence. The paper splits by the sign of the reward: pass
    rewards as adv for that.

    Args:
      logp, logp_mu, adv, mask: [B, T] (adv may be [B, 1]), or packed [T] with `row` [T] int64 in [0, n_rows).
        Sequences must be whole. logp_mu and adv are constants; mask is bool.
    Returns: loss, 0 off-mask; aux: weight, clipped_high (at the cap, A <= 0).
    Raises ValueError for shapes that do not fit, or cap <= 0. See "Tapered Off-Policy REINFORCE"
    (arXiv:2503.14286).
    """
    if cap <= 0.0:
        raise ValueError(f"topr_loss: cap must be positive, got {cap}")
    logp, logp_mu, adv = _kept("topr_loss", mask, logp, logp_mu.detach(), adv.detach())
    log_product = _row_sum(logp.detach() - logp_mu, row, n_rows)
    product = log_product.clamp(max=LOG_W_MAX).exp().clamp(max=cap)
    weight = torch.where(adv > 0, 1.0, product)
    clipped_high = (adv <= 0) & (log_product > math.log(cap))
    return _out(mask, -weight * adv * logp, weight=weight, clipped_high=clipped_high)


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
