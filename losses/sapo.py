"""SAPO: a soft gate in place of the hard clip."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RHO_MAX = 20.0  # nats


def sapo_loss(
    logp: Tensor, logp_mu: Tensor, adv: Tensor, mask: Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sigmoid-gated surrogate per token.

    rho = exp(logp - logp_mu),   p = sigmoid(tau (rho - 1)),   tau = tau_pos where A > 0, tau_neg elsewhere
    L   = -(4 / tau) p A,        dL/dlogp = -4 p (1 - p) rho A,  which is -A at rho = 1

    The value at rho = 1 is -2 A / tau, not -A: loss curves do not compare with those of GRPO. The paper
    averages by "seq_mean_token_mean". |log rho| is held to 20 nats.

    Args:
      logp, logp_mu, mask: [..., T] of one shape; adv fits it. logp_mu and adv are constants; mask is bool.
    Returns: loss, 0 off-mask; aux: rho, gate = 4 p (1 - p) in (0, 1].
    Raises ValueError for shapes that do not fit, or tau <= 0. See "Soft Adaptive Policy Optimization"
    (arXiv:2511.20347).
    """
    if min(tau_pos, tau_neg) <= 0.0:
        raise ValueError(f"sapo_loss: tau_pos and tau_neg must be positive, got {tau_pos} and {tau_neg}")
    logp, logp_mu, adv = _kept("sapo_loss", mask, logp, logp_mu.detach(), adv.detach())
    rho = (logp - logp_mu).clamp(-LOG_RHO_MAX, LOG_RHO_MAX).exp()
    tau = torch.where(adv > 0, torch.full_like(adv, tau_pos), tau_neg)
    p = torch.sigmoid(tau * (rho - 1.0))
    return _out(mask, -4.0 / tau * p * adv, rho=rho, gate=4.0 * p * (1.0 - p))


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
