"""DRO: REINFORCE with a quadratic pull towards the sampler; off-policy data without importance weights."""

from __future__ import annotations

import torch
from torch import Tensor


def dro_loss(
    logp: Tensor, logp_mu: Tensor, adv: Tensor, mask: Tensor, *, beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct reward optimisation per token, up to a constant half of the squared residual, divided by beta.

    L = -(A logp - beta/2 (logp - logp_mu)^2),   dL/dlogp = -(A - beta (logp - logp_mu))

    The optimum is logp = logp_mu + A / beta, whatever policy sampled the token. The paper has sequences and a
    learned value where this has tokens and a group baseline.

    Args:
      logp, logp_mu, mask: [..., T] of one shape; adv fits it. logp_mu and adv are constants; mask is bool.
      beta: strength of the pull, in units of advantage per nat; no default.
    Returns: loss, 0 off-mask; aux: log_rho. Raises ValueError for bad shapes, or beta <= 0.
    See "Offline Regularised Reinforcement Learning for LLM Alignment" (arXiv:2405.19107).
    """
    if beta <= 0.0:
        raise ValueError(f"dro_loss: beta must be positive, got {beta}")
    logp, logp_mu, adv = _kept("dro_loss", mask, logp, logp_mu.detach(), adv.detach())
    log_rho = logp - logp_mu
    return _out(mask, -(adv * logp - beta / 2.0 * log_rho.square()), log_rho=log_rho)


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
