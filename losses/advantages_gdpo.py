"""GDPO: several rewards, each normalised in its group before they are added."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gdpo_advantages(
    reward: Tensor,
    valid: Tensor | None = None,
    *,
    weights: Sequence[float] | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Decoupled normalisation: no reward drowns another by its scale, and different mixes stay different.

    a_ki = (r_ki - mean_g) / (std_g + eps)   per reward k, over the answers that have it
    s_i  = sum_k w_k a_ki;    A_i = (s_i - mean s) / (std s + eps)   over the batch's valid answers

    reward, valid: [K, P, G], K rewards. An answer that lacks reward k is out of the mean and deviation of k,
    and k adds 0 to its sum; one that lacks them all is not valid. weights: K numbers, 1 each by default.
    Returns adv [P, G], exactly 0 for answers that are not valid and for groups where no reward differs; aux:
    n_valid [P], signal [P], per_reward [K, P, G] (the a_ki). Raises ValueError for bad shapes and, in eager
    code, for a valid reward that is not finite. See "GDPO" (arXiv:2601.05242).
    """
    valid = torch.ones_like(reward, dtype=torch.bool) if valid is None else valid
    k = reward.shape[0] if reward.ndim == 3 else 0
    weights = [1.0] * k if weights is None else weights
    if not k or valid.shape != reward.shape or valid.dtype != torch.bool or len(weights) != k:
        raise ValueError(
            f"gdpo_advantages: want reward [K, P, G], valid bool [K, P, G] and K weights, got "
            f"{tuple(reward.shape)}, {valid.dtype} {tuple(valid.shape)} and {len(weights)}"
        )
    reward = torch.where(valid, reward.detach(), 0.0).to(torch.promote_types(reward.dtype, torch.float32))
    if not torch.compiler.is_compiling() and not bool(reward.isfinite().all()):
        raise ValueError("gdpo_advantages: a valid reward is NaN or infinite; a missing reward is not valid")

    per_reward = _normalised(reward, valid, ddof, eps)
    total = sum(w * a for w, a in zip(weights, per_reward.unbind(0), strict=True))
    assert isinstance(total, Tensor)
    kept = valid.any(0)
    signal = (per_reward != 0).any(0).any(-1)
    adv = _normalised(total.reshape(1, -1), kept.reshape(1, -1), ddof, eps).reshape(total.shape)
    adv = torch.where(kept & signal.unsqueeze(-1), adv, 0.0)
    return adv, {"n_valid": kept.sum(-1), "signal": signal, "per_reward": per_reward}


def _normalised(x: Tensor, valid: Tensor, ddof: int, eps: float) -> Tensor:
    """Over the valid entries of the last axis; exactly 0 for fewer than two of them, and for equal ones."""
    n = valid.sum(-1, keepdim=True)
    centred = torch.where(valid, x - torch.where(valid, x, 0.0).sum(-1, keepdim=True) / n.clamp(min=1), 0.0)
    std = (centred.square().sum(-1, keepdim=True) / (n - ddof).clamp(min=1)).sqrt()
    high = torch.where(valid, x, -torch.inf).amax(-1, keepdim=True)
    low = torch.where(valid, x, torch.inf).amin(-1, keepdim=True)
    return torch.where(valid & (n >= 2) & (high != low), centred / (std + eps), 0.0)
