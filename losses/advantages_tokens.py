"""Token-level returns and whitening: REINFORCE++ and its baseline form."""

from __future__ import annotations

import torch
from torch import Tensor


def returns_to_go(reward: Tensor, mask: Tensor, *, gamma: float = 1.0, row: Tensor | None = None) -> Tensor:
    """Discounted sum of the rewards from each token to the end of its sequence.

    R_t = r_t + gamma R_{t+1},  over the kept tokens; off-mask ones (a tool's answer) neither pay nor discount

    reward float, mask bool: [B, T], or packed [T] with `row` [T] and each sequence in one piece, in order.
    Returns float32 or better, 0 off-mask. Takes log2(T) passes and no powers of 1 / gamma, so it is exact
    for long answers.
    """
    _check("returns_to_go", reward, mask)
    x = torch.where(mask, reward.detach(), 0.0).to(torch.promote_types(reward.dtype, torch.float32))
    decay = torch.where(mask, torch.full_like(x, gamma), 1.0)  # what R_{t+1} is multiplied by
    if row is not None:
        decay = torch.where(_ahead(row, 1) == row, decay, 0.0)
    shift = 1
    while shift < x.shape[-1]:  # x holds the sum of the next `shift` tokens, decay the factor across them
        x = x + decay * _ahead(x, shift)
        decay = decay * _ahead(decay, shift)
        shift *= 2
    return torch.where(mask, x, 0.0)


def whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + eps) over all kept tokens, var unbiased; exactly 0 for equal values.

    x, mask: one shape, all tokens of the step at once: statistics of a micro-batch make another objective.
    Returns float32 or better, 0 off-mask, and 0 for fewer than two tokens.
    """
    _check("whiten", x, mask)
    x = torch.where(mask, x.detach(), 0.0).to(torch.promote_types(x.dtype, torch.float32))
    if not x.numel():
        return x
    n = mask.sum()
    centred = torch.where(mask, x - x.sum() / n.clamp(min=1), 0.0)
    differ = (mask & (x != torch.where(mask, x, -torch.inf).max())).any()
    white = centred * torch.rsqrt(centred.square().sum() / (n - 1).clamp(min=1) + eps)
    return torch.where(differ, white, 0.0)


def reinforce_pp_advantages(
    reward: Tensor, mask: Tensor, *, gamma: float = 1.0, row: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE++: whitened returns, no baseline but the batch's mean.

    A_t = whiten(R_t),  R_t = r_t + gamma R_{t+1}

    r_t is -beta k1_t, and at the last token the answer's reward with it. Arguments as for `returns_to_go`,
    all tokens of the step at once. Returns adv, 0 off-mask, and aux: returns. See "REINFORCE++"
    (arXiv:2501.03262).
    """
    returns = returns_to_go(reward, mask, gamma=gamma, row=row)
    return whiten(returns, mask), {"returns": returns}


def reinforce_pp_baseline_advantages(
    reward: Tensor, n_tokens: Tensor, valid: Tensor | None = None, *, eps: float = 1e-8
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE++-baseline: the group's mean off, then whitened over the batch's tokens.

    c_i = r_i - mean_g;   A_i = (c_i - m) / sqrt(v + eps);   m, v: mean and unbiased variance of c over tokens

    reward, n_tokens, valid: [P, G]. A group with fewer than two valid samples, or equal ones, has advantage
    exactly 0, not -m / sqrt(v); its tokens stay in m and v. Returns adv [P, G]; aux: n_valid [P], signal [P].
    Raises ValueError for bad shapes and, in eager code, for a valid reward that is not finite.
    See "REINFORCE++" (arXiv:2501.03262).
    """
    valid = torch.ones_like(reward, dtype=torch.bool) if valid is None else valid
    _check("reinforce_pp_baseline_advantages", reward, valid)
    reward = torch.where(valid, reward.detach(), 0.0).to(torch.promote_types(reward.dtype, torch.float32))
    if not torch.compiler.is_compiling() and not bool(reward.isfinite().all()):
        raise ValueError("reinforce_pp_baseline_advantages: a valid reward is NaN or infinite")
    n_valid = valid.sum(-1)
    high = torch.where(valid, reward, -torch.inf).amax(-1)
    low = torch.where(valid, reward, torch.inf).amin(-1)
    signal = (n_valid >= 2) & (high != low)
    kept = valid & signal.unsqueeze(-1)
    baseline = reward.sum(-1, keepdim=True) / n_valid.clamp(min=1).unsqueeze(-1)
    centred = torch.where(kept, reward - baseline, 0.0)
    n = torch.where(valid, n_tokens, 0).to(reward.dtype)
    mean = (n * centred).sum() / n.sum().clamp(min=1.0)
    var = (n * (centred - mean).square()).sum() / (n.sum() - 1.0).clamp(min=1.0)
    adv = torch.where(kept, (centred - mean) * torch.rsqrt(var + eps), 0.0)
    return adv, {"n_valid": n_valid, "signal": signal}


def _check(name: str, x: Tensor, mask: Tensor) -> None:
    if mask.dtype != torch.bool or x.shape != mask.shape:
        raise ValueError(
            f"{name}: want a bool mask of one shape with the values, "
            f"got {mask.dtype} {tuple(mask.shape)} and {tuple(x.shape)}"
        )


def _ahead(x: Tensor, shift: int) -> Tensor:
    """x[..., t + shift], 0 past the end."""
    return torch.nn.functional.pad(x[..., shift:], (0, shift))
