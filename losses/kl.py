"""KL divergence of the policy to a reference, per token: from the sampled token, or over the vocabulary.

d = logp - logp_ref in nats, logp_ref a constant. For tokens sampled from the policy itself:

       value                               gradient when back-propagated
  k1   d               unbiased, signed    0 in expectation, noise only: a metric or a reward penalty, no loss
  k2   d^2 / 2         biased, >= 0        exactly that of KL(policy || reference)
  k3   exp(-d) - 1 + d unbiased, >= 0      that of KL(reference || policy), the other direction

k1_st and k3_st have the value of one and the gradient of k2. Off-policy, multiply by the ratio, and only k3
is right (`k3_weighted`): E_mu[(pi / mu) k2] is not the divergence. In the reward instead of the loss, use
`kl_reward`. Every function: logp, logp_ref, mask [..., T] of one shape, mask bool; (value, aux), both 0
off-mask; ValueError for shapes that do not fit. See "Approximating KL Divergence" by J. Schulman (2020) and
"On a Few Pitfalls in KL Divergence Gradient Estimation for RL" (arXiv:2506.09477).
"""

from __future__ import annotations

import torch
from torch import Tensor

Aux = dict[str, Tensor]
LOG_RHO_MAX = 20.0  # nats


def k1(logp: Tensor, logp_ref: Tensor, mask: Tensor) -> tuple[Tensor, Aux]:
    """k1 = d, the log-ratio itself. aux: log_ratio (= d)."""
    d = _log_ratio("k1", logp, logp_ref, mask)
    return d, {"log_ratio": d.detach()}


def k2(logp: Tensor, logp_ref: Tensor, mask: Tensor) -> tuple[Tensor, Aux]:
    """k2 = d^2 / 2, gradient d: a pull that grows with the distance and has no clamp. aux: log_ratio."""
    d = _log_ratio("k2", logp, logp_ref, mask)
    return d.square() / 2.0, {"log_ratio": d.detach()}


def k3(logp: Tensor, logp_ref: Tensor, mask: Tensor, *, clamp: float = 20.0) -> tuple[Tensor, Aux]:
    """k3 = exp(-d) - 1 + d, gradient 1 - exp(-d).

    clamp: |d| in nats beyond which the value stays and the gradient is 0: such a token is not pulled back (k2
    and k3_st do). aux: log_ratio, clamped (0 or 1).
    """
    d = _log_ratio("k3", logp, logp_ref, mask)
    return _k3(d, clamp), {"log_ratio": d.detach(), "clamped": (d.detach().abs() > clamp).to(d.dtype)}


def k1_st(logp: Tensor, logp_ref: Tensor, mask: Tensor) -> tuple[Tensor, Aux]:
    """Value of k1, gradient of k2 (straight-through): unbiased in both on-policy. aux: log_ratio."""
    d = _log_ratio("k1_st", logp, logp_ref, mask)
    k2 = d.square() / 2.0
    return d.detach() + (k2 - k2.detach()), {"log_ratio": d.detach()}


def k3_st(logp: Tensor, logp_ref: Tensor, mask: Tensor, *, clamp: float = 20.0) -> tuple[Tensor, Aux]:
    """Value of k3, gradient of k2 (straight-through): unbiased in both on-policy, and the value is >= 0.

    The clamp is on the value alone. aux: log_ratio, clamped (0 or 1).
    """
    d = _log_ratio("k3_st", logp, logp_ref, mask)
    k2 = d.square() / 2.0
    value = _k3(d.detach(), clamp) + (k2 - k2.detach())
    return value, {"log_ratio": d.detach(), "clamped": (d.detach().abs() > clamp).to(d.dtype)}


def k3_weighted(
    logp: Tensor, logp_ref: Tensor, logp_mu: Tensor, mask: Tensor, *, clamp: float = 20.0
) -> tuple[Tensor, Aux]:
    """Importance-weighted k3: unbiased KL(policy || reference) and its unbiased gradient, on mu's samples.

    value = rho k3,   rho = exp(logp - logp_mu) with its gradient: E_mu[rho k3] = KL(policy || reference)

    On-policy pass logp.detach() as logp_mu: the value is k3's and the gradient the reverse KL's. With a rho
    that is cut from the graph the gradient would be the forward KL's. |log rho| is held to 20 nats, |d| to
    clamp; where one is, its part of the gradient is 0. aux: log_ratio, rho, clamped (d's).
    """
    d = _log_ratio("k3_weighted", logp, logp_ref, mask)
    log_rho = _log_ratio("k3_weighted", logp, logp_mu, mask)
    rho = torch.where(mask, log_rho.clamp(-LOG_RHO_MAX, LOG_RHO_MAX).exp(), 0.0)
    clamped = (d.detach().abs() > clamp).to(d.dtype)
    return rho * _k3(d, clamp), {"log_ratio": d.detach(), "rho": rho.detach(), "clamped": clamped}


def kl_reward(logp: Tensor, logp_ref: Tensor, mask: Tensor, *, beta: float) -> tuple[Tensor, Aux]:
    """The penalty to add to a token's reward: -beta k1, a constant.

    Only k1 gives the unbiased policy gradient of -beta KL(policy || reference) there; k3 in a reward is
    biased. beta in reward per nat. aux: log_ratio. See "Comedy of Estimators" (arXiv:2512.21852).
    """
    d = _log_ratio("kl_reward", logp.detach(), logp_ref, mask)
    return torch.where(mask, -beta * d, 0.0), {"log_ratio": d}


def full_kl(logits: Tensor, logits_ref: Tensor, mask: Tensor) -> tuple[Tensor, Aux]:
    """KL(policy || reference) over the vocabulary: the expectation that k1 and k3 estimate.

    KL = sum_v p_v (log p_v - log q_v),   d/dlogits = p (log p - log q - KL)

    logits, logits_ref: [..., T, V], already divided by the temperature (log-probs will do); mask [..., T].
    Entries with p = 0 (logit -inf) add 0; q = 0 < p gives +inf. Both sides must allow the same tokens: a
    policy cut to its top-p against a full reference is no divergence of anything. aux: entropy of the policy,
    nats.
    """
    if mask.dtype != torch.bool or logits.shape != logits_ref.shape or logits.shape[:-1] != mask.shape:
        raise ValueError(
            "full_kl: want logits and logits_ref [..., T, V] and mask bool [..., T], got "
            f"{tuple(logits.shape)}, {tuple(logits_ref.shape)} and {mask.dtype} {tuple(mask.shape)}"
        )
    wide = torch.promote_types(logits.dtype, torch.float32)
    kept = mask.unsqueeze(-1)
    logp, logq = (torch.where(kept, x, 0.0).to(wide).log_softmax(-1) for x in (logits, logits_ref.detach()))
    possible = logp > -torch.inf
    logp = torch.where(possible, logp, 0.0)  # before the product: 0 * -inf is NaN, also backwards
    p = torch.where(possible, logp.exp(), 0.0)
    value = torch.where(possible, p * (logp - logq), 0.0).sum(-1)
    return torch.where(mask, value, 0.0), {"entropy": torch.where(mask, -(p * logp).detach().sum(-1), 0.0)}


def adaptive_beta(beta: float, kl: float, *, target: float, n: int, horizon: int) -> float:
    """The next coefficient of a KL term that is to stay near target.

    beta' = beta (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon)

    kl, target in nats, as measured over the n samples since the last call; horizon in samples. Raises
    ValueError unless target and horizon are positive. See "Fine-Tuning Language Models from Human
    Preferences" (arXiv:1909.08593).
    """
    if target <= 0.0 or horizon <= 0:
        raise ValueError(f"adaptive_beta: target and horizon must be positive, got {target} and {horizon}")
    return beta * (1.0 + min(max(kl / target - 1.0, -0.2), 0.2) * n / horizon)


def _k3(d: Tensor, clamp: float) -> Tensor:
    x = -d.clamp(-clamp, clamp)
    return torch.expm1(x) - x  # exp(x) - 1 - x would round to 0 or below for small x


def _log_ratio(name: str, logp: Tensor, logp_ref: Tensor, mask: Tensor) -> Tensor:
    """d in float32 or better (bf16 log-probs are 2^-8 apart near -1), 0 off-mask."""
    logp, logp_ref = _kept(name, mask, logp, logp_ref.detach())
    return logp - logp_ref


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
