"""CISPO: REINFORCE with a capped, constant importance weight; no token loses its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RHO_MAX = 20.0  # nats


def cispo_loss(
    logp: Tensor, logp_mu: Tensor, adv: Tensor, mask: Tensor, *, cap: float = 5.0, floor: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped-weight policy gradient per token.

    w = clip(exp(logp - logp_mu), floor, cap),   L = -stop(w) A logp,   dL/dlogp = -w A

    cap and floor bound the ratio itself. Public code has one knob "epsilon_high" with two meanings: the cap
    (TRL, Liger: 5.0) or cap - 1 (verl, slime, NeMo-RL, with floor = 1 - epsilon_low). The paper has no floor.

    Args:
      logp, logp_mu, mask: [..., T] of one shape; adv fits it. logp_mu and adv are constants; mask is bool.
    Returns: loss, 0 off-mask; aux: rho (unclipped), clipped_low, clipped_high.
    Raises ValueError for shapes that do not fit, or bounds that are no interval.
    See "MiniMax-M1" (arXiv:2506.13585); cap 5.0: "The Art of Scaling RL Compute for LLMs" (arXiv:2510.13786).
    """
    if not 0.0 <= floor < cap:
        raise ValueError(
            f"cispo_loss: want 0 <= floor < cap, bounds of the ratio, got floor={floor}, cap={cap}"
        )
    logp, logp_mu, adv = _kept("cispo_loss", mask, logp, logp_mu.detach(), adv.detach())
    rho = (logp.detach() - logp_mu).clamp(-LOG_RHO_MAX, LOG_RHO_MAX).exp()
    loss = -rho.clamp(floor, cap) * adv * logp
    return _out(mask, loss, rho=rho, clipped_low=rho < floor, clipped_high=rho > cap)


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
