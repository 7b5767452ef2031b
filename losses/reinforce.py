"""REINFORCE: the plain policy gradient, the baseline that every other loss should equal on-policy."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RHO_MAX = 20.0  # nats


def reinforce_loss(
    logp: Tensor, logp_mu: Tensor, adv: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -A logp per token; dL/dlogp = -A. Unbiased only if the tokens were sampled from the policy itself.

    logp_mu enters aux alone, so that rho shows how far off-policy the samples are.

    Args:
      logp, logp_mu, mask: [..., T] of one shape; adv fits it, a constant; mask is bool.
    Returns: loss, 0 off-mask; aux: rho = exp(logp - logp_mu). Raises ValueError for shapes that do not fit.
    See "Simple Statistical Gradient-Following Algorithms" by R. Williams (1992).
    """
    logp, logp_mu, adv = _kept("reinforce_loss", mask, logp, logp_mu.detach(), adv.detach())
    rho = (logp.detach() - logp_mu).clamp(-LOG_RHO_MAX, LOG_RHO_MAX).exp()
    return _out(mask, -adv * logp, rho=rho)


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
