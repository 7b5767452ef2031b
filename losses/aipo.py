"""AIPO: asynchronous REINFORCE, its importance weight cut at one side."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RHO_MAX = 20.0  # nats


def aipo_loss(
    logp: Tensor, logp_mu: Tensor, adv: Tensor, mask: Tensor, *, cap: float = 2.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Truncated importance sampling per token.

    w = min(exp(logp - logp_mu), cap),   L = -stop(w) A logp,   dL/dlogp = -w A

    mu is the sampler, however old; there is no proximal policy. cap: 2 to 10 in the paper; 1 never amplifies.

    Args:
      logp, logp_mu, mask: [..., T] of one shape; adv fits it. logp_mu and adv are constants; mask is bool.
    Returns: loss, 0 off-mask; aux: rho (untruncated), clipped_high. Raises ValueError for bad shapes, or cap
    <= 0.
    See "LlamaRL: A Distributed Asynchronous RL Framework" (arXiv:2505.24034).
    """
    if cap <= 0.0:
        raise ValueError(f"aipo_loss: cap bounds the ratio and must be positive, got {cap}")
    logp, logp_mu, adv = _kept("aipo_loss", mask, logp, logp_mu.detach(), adv.detach())
    rho = (logp.detach() - logp_mu).clamp(-LOG_RHO_MAX, LOG_RHO_MAX).exp()
    return _out(mask, -rho.clamp(max=cap) * adv * logp, rho=rho, clipped_high=rho > cap)


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
