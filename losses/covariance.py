"""Clip-Cov and KL-Cov: hold the few tokens whose covariance of log-prob and advantage eats the entropy.

Which tokens, is a question about the whole batch. So the choice is a function of its own: ask it once, over
all tokens of the step (with logp before the first update), and hand its answer to the loss, which is then
local to the token and exact under any split. Asked per micro-batch, it is an approximation.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RHO_MAX = 20.0  # nats


def select_clip_cov(
    logp: Tensor,
    logp_mu: Tensor,
    adv: Tensor,
    mask: Tensor,
    noise: Tensor,
    *,
    ratio: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Choose max(1, floor(ratio N)) tokens at random among those with cov_low < cov < cov_high and no clip.

    cov_t = (A_t - mean A) (logp_t - mean logp),  means over the N kept tokens

    logp, logp_mu, adv, mask, noise: one shape, of any rank. noise: uniform in [0, 1), the caller's
    randomness, as in torch.rand(mask.shape, generator=generator). Returns selected (bool) and aux: cov.
    Raises ValueError for bad shapes.
    See "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv:2505.22617).
    """
    constants = logp.detach(), logp_mu.detach(), adv.detach(), noise
    logp, logp_mu, adv, noise = _kept("select_clip_cov", mask, *constants)
    cov = _covariance(logp, adv, mask)
    rho = (logp - logp_mu).clamp(-LOG_RHO_MAX, LOG_RHO_MAX).exp()
    clipped = ((adv > 0) & (rho > 1.0 + eps_high)) | ((adv < 0) & (rho < 1.0 - eps_low))
    candidates = mask & (cov > cov_low) & (cov < cov_high) & ~clipped
    return _smallest(noise, candidates, ratio, mask), {"cov": cov}


def select_kl_cov(
    logp: Tensor, adv: Tensor, mask: Tensor, *, ratio: float = 2e-4
) -> tuple[Tensor, dict[str, Tensor]]:
    """Choose the max(1, floor(ratio N)) kept tokens of largest covariance. Shapes and aux as above."""
    logp, adv = _kept("select_kl_cov", mask, logp.detach(), adv.detach())
    cov = _covariance(logp, adv, mask)
    return _smallest(-cov, mask, ratio, mask), {"cov": cov}


def clip_cov_loss(
    logp: Tensor,
    logp_mu: Tensor,
    adv: Tensor,
    mask: Tensor,
    selected: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate, without value or gradient on the selected tokens, which stay counted.

    L = -min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A),   L = 0 where selected

    logp, logp_mu, mask, selected: [..., T] of one shape, the last two bool; adv fits it. Returns loss, 0
    off-mask; aux: rho, clipped_low, clipped_high, selected. Raises ValueError for shapes that do not fit. See
    arXiv:2505.22617.
    """
    logp, logp_mu, adv = _kept("clip_cov_loss", mask, logp, logp_mu.detach(), adv.detach())
    rho = (logp - logp_mu).clamp(-LOG_RHO_MAX, LOG_RHO_MAX).exp()
    loss = -torch.minimum(rho * adv, rho.clamp(1.0 - eps_low, 1.0 + eps_high) * adv)
    loss = torch.where(selected, 0.0, loss)
    clipped_low, clipped_high = (adv < 0) & (rho < 1.0 - eps_low), (adv > 0) & (rho > 1.0 + eps_high)
    return _out(mask, loss, rho=rho, clipped_low=clipped_low, clipped_high=clipped_high, selected=selected)


def kl_cov_loss(
    logp: Tensor, logp_mu: Tensor, adv: Tensor, mask: Tensor, selected: Tensor, *, coef: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """The unclipped surrogate, with a penalty on the selected tokens for leaving the sampler.

    L = -rho A + coef |logp - logp_mu| where selected,   -rho A elsewhere

    Arguments and errors as for `clip_cov_loss`; aux: rho, selected. |log rho| is held to 20 nats. See
    arXiv:2505.22617.
    """
    logp, logp_mu, adv = _kept("kl_cov_loss", mask, logp, logp_mu.detach(), adv.detach())
    log_rho = logp - logp_mu
    rho = log_rho.clamp(-LOG_RHO_MAX, LOG_RHO_MAX).exp()
    loss = -rho * adv + torch.where(selected, coef * log_rho.abs(), 0.0)
    return _out(mask, loss, rho=rho, selected=selected)


def _covariance(logp: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    n = mask.sum().clamp(min=1)
    return torch.where(mask, (adv - adv.sum() / n) * (logp - logp.sum() / n), 0.0)


def _smallest(score: Tensor, candidates: Tensor, ratio: float, mask: Tensor) -> Tensor:
    """The max(1, floor(ratio N)) candidates of least score; by rank, as reading k would stop the device."""
    k = (ratio * mask.sum()).floor().clamp(min=1)
    rank = torch.where(candidates, score, torch.inf).flatten().argsort(stable=True).argsort().view_as(mask)
    return candidates & (rank < k)


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
