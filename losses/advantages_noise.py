"""Noise-aware advantages: do not learn from differences that the judge itself cannot reproduce."""

from __future__ import annotations

import torch
from torch import Tensor


def shrunk_advantages(
    reward: Tensor, noise_var: Tensor, valid: Tensor | None = None, *, eps: float = 1e-6
) -> tuple[Tensor, dict[str, Tensor]]:
    """GRPO on rewards shrunk towards the group's mean by how reliable each is.

    A_i = lambda_i (r_i - mean_g) / (std_g + eps),   lambda_i = tau^2 / (tau^2 + v_i)
    tau^2 = max(0, std_g^2 - mean_g v): the spread that is left when the judge's noise is taken off

    noise_var [P, G]: variance v_i of the reward as a measurement, for n votes their sample variance / n; in
    reward units squared, >= 0. v = 0 is `group_advantages` exactly. A group spread no wider than its noise
    has tau = 0 and advantages exactly 0. reward, valid, adv [P, G]; aux: n_valid [P], signal [P], reliability
    [P, G] (= lambda). Raises ValueError for bad shapes and, in eager code, for entries not finite or v < 0.
    See "Stein's Estimation Rule and Its Competitors" by B. Efron and C. Morris (1973).
    """
    valid = torch.ones_like(reward, dtype=torch.bool) if valid is None else valid
    if reward.ndim != 2 or not reward.shape == noise_var.shape == valid.shape or valid.dtype != torch.bool:
        raise ValueError(
            f"shrunk_advantages: want reward, noise_var and valid (bool) [P, G], got {tuple(reward.shape)}, "
            f"{tuple(noise_var.shape)} and {valid.dtype} {tuple(valid.shape)}"
        )
    wide = torch.promote_types(reward.dtype, torch.float32)
    reward, v = (torch.where(valid, x.detach(), 0.0).to(wide) for x in (reward, noise_var))
    if not torch.compiler.is_compiling() and not bool((reward.isfinite() & v.isfinite() & (v >= 0)).all()):
        raise ValueError(
            "shrunk_advantages: a valid reward or variance is NaN or infinite, or a variance < 0"
        )

    n_valid = valid.sum(-1)
    n = n_valid.clamp(min=1).unsqueeze(-1)
    centred = torch.where(valid, reward - reward.sum(-1, keepdim=True) / n, 0.0)
    var = centred.square().sum(-1, keepdim=True) / (n - 1).clamp(min=1)
    tau2 = (var - v.sum(-1, keepdim=True) / n).clamp(min=0.0)
    high = torch.where(valid, reward, -torch.inf).amax(-1)
    low = torch.where(valid, reward, torch.inf).amin(-1)
    signal = (n_valid >= 2) & (high != low) & (tau2.squeeze(-1) > 0.0)
    reliability = torch.where(valid & signal.unsqueeze(-1), tau2 / (tau2 + v).clamp(min=1e-30), 0.0)
    adv = reliability * centred / (var.sqrt() + eps)
    return adv, {"n_valid": n_valid, "signal": signal, "reliability": reliability}
