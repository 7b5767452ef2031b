"""DPPO: the trust region is a bound on the divergence of probabilities, not on their ratio."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

LOG_RHO_MAX = 20.0  # nats
SMALL = 1e-12  # of 1 - p, where p rounds to 1


def dppo_loss(
    logp: Tensor,
    logp_mu: Tensor,
    adv: Tensor,
    mask: Tensor,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    limit_low: float = 0.2,
    limit_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Importance-weighted policy gradient on the tokens inside the trust region.

    L = -keep rho A,   rho = exp(logp - logp_mu),   p = exp(logp),   q = exp(logp_mu)
    drop where A > 0, p > q and D > limit_high;  where A < 0, p < q and D > limit_low
    D = |p - q|                                        (tv)
    D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))  (kl)

    Both are divergences of the two-way event "this token or another". A token that moves back is always kept,
    and so are large ratios of rare tokens, which a ratio clip cuts. keep is a constant, so
    dL/dlogp = -keep rho A. |log rho| is held to 20 nats; beyond, the gradient is 0.

    Args:
      logp, logp_mu, mask: [..., T] of one shape, log-probs <= 0; adv fits it. logp_mu and adv are constants.
    Returns: loss, 0 off-mask; aux: rho, divergence (D), clipped_low, clipped_high.
    Raises ValueError for shapes that do not fit, or another divergence.
    See "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv:2602.04879).
    """
    if divergence not in ("tv", "kl"):
        raise ValueError(f'dppo_loss: divergence must be "tv" or "kl", got {divergence!r}')
    logp, logp_mu, adv = _kept("dppo_loss", mask, logp, logp_mu.detach(), adv.detach())
    rho = (logp - logp_mu).clamp(-LOG_RHO_MAX, LOG_RHO_MAX).exp()
    p, q = logp.detach().exp(), logp_mu.exp()
    if divergence == "tv":
        d = (p - q).abs()
    else:
        not_p, not_q = (-torch.expm1(x).clamp(max=-SMALL) for x in (logp.detach(), logp_mu))
        d = q * (logp_mu - logp.detach()) + not_q * (not_q / not_p).log()
    low = (adv < 0) & (p < q) & (d > limit_low)
    high = (adv > 0) & (p > q) & (d > limit_high)
    loss = torch.where(low | high, 0.0, -rho * adv)
    return _out(mask, loss, rho=rho, divergence=d, clipped_low=low, clipped_high=high)


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
