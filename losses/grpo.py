"""The clipped policy-gradient loss of PPO and GRPO, with clip-higher and dual clip."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RHO_MAX = 20.0  # nats; exp of much more overflows, and inf * 0 in the backward pass is NaN


def grpo_loss(
    logp: Tensor,
    logp_mu: Tensor,
    adv: Tensor,
    mask: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate per token, to be minimised.

    rho = exp(logp - logp_mu)
    L   = -min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A)
    L   =  min(L, -c A)   where A < 0, with dual_clip = c

    dL/dlogp = -rho A, and 0 where a clip is active:
      A > 0 and rho > 1 + eps_high;   A < 0 and rho < 1 - eps_low;   A < 0 and rho > c
    On-policy, rho = 1, the value is -A and the gradient that of REINFORCE. |log rho| is held to 20 nats;
    beyond, the gradient is 0. For decoupled PPO pass logp_prox as logp_mu and multiply by a weight of
    correction.py.

    Args:
      logp, logp_mu: [..., T] log-probs in nats of the sampled tokens; logp_mu is a constant.
      adv: constant, [..., T], or size 1 along the axes that share it. mask: bool, shape of logp.
      eps_low, eps_high: 0.2, 0.28 as in DAPO; PPO has 0.2, 0.2. dual_clip: 3.0 is usual, None is off.
    Returns: loss, 0 off-mask; aux: rho, and clipped_low, clipped_high, clipped_dual as 0 or 1.
    Raises ValueError for a mask that is not bool, for shapes that do not fit, and for dual_clip <= 1.
    See "Proximal Policy Optimization Algorithms" (arXiv:1707.06347), "DeepSeekMath" (arXiv:2402.03300),
    "DAPO" (arXiv:2503.14476); dual clip: "Mastering Complex Control in MOBA Games" (arXiv:1912.09729).
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"grpo_loss: dual_clip must be above 1 (or None), got {dual_clip}")
    logp, logp_mu, adv = _kept("grpo_loss", mask, logp, logp_mu.detach(), adv.detach())
    rho = (logp - logp_mu).clamp(-LOG_RHO_MAX, LOG_RHO_MAX).exp()
    loss = -torch.minimum(rho * adv, rho.clamp(1.0 - eps_low, 1.0 + eps_high) * adv)
    clipped_dual = torch.zeros_like(mask)
    if dual_clip is not None:
        loss = torch.where(adv < 0, torch.minimum(loss, -dual_clip * adv), loss)
        clipped_dual = (adv < 0) & (rho > dual_clip)
    clipped_low = (adv < 0) & (rho < 1.0 - eps_low)
    clipped_high = (adv > 0) & (rho > 1.0 + eps_high)
    return _out(
        mask, loss, rho=rho, clipped_low=clipped_low, clipped_high=clipped_high, clipped_dual=clipped_dual
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
