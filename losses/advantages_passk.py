"""Advantages for the best of k: reward the group for what its best k answers would score."""

from __future__ import annotations

import torch
from torch import Tensor

Aux = dict[str, Tensor]


def pkpo_rewards(reward: Tensor, valid: Tensor | None = None, *, k: int) -> tuple[Tensor, Aux]:
    """Rewards whose plain policy gradient is an unbiased estimate of the gradient of E[max of k answers].

    s_i = (k / n) mean over the k-subsets S that contain i of max_{j in S} r_j,   n valid answers in the group
    binary r: s_i = k / n if r_i = 1, else (k / n) (1 - C(n-1-c, k-1) / C(n-1, k-1)), c answers being right

    Sorted once, no subsets are listed. A baseline is another matter: feed s to an advantage function if you
    want one. reward, valid [P, G]; s [P, G], 0 where not valid and in groups with fewer than k valid answers;
    aux: n_valid [P], signal [P] (n >= k). Raises ValueError for bad shapes, k outside 1..G and, in eager
    code, a valid reward that is not finite. See "Pass@K Policy Optimization" (arXiv:2505.15201).
    """
    reward, valid = _checked("pkpo_rewards", reward, valid, k)
    n_valid = valid.sum(-1)
    n = n_valid.double().unsqueeze(-1)
    order = torch.where(valid, reward, torch.inf).argsort(-1)  # ascending, invalid last
    r = reward.double().gather(-1, order)
    rank = torch.arange(reward.shape[1], device=reward.device).double().expand_as(r)  # answers below this one
    inside = rank < n
    # j is the best of S and i is below it: the k - 2 others come from the rank_j - 1 below j that are not i
    best = r * _choose((rank - 1.0).clamp(min=0.0), k - 2) if k > 1 else torch.zeros_like(r)
    best = torch.where(inside, best, 0.0)
    above = best.flip(-1).cumsum(-1).flip(-1) - best
    s = (above + r * _choose(rank, k - 1)) / _choose(n, k).clamp(min=1.0)
    signal = n_valid >= k
    s = torch.where(inside & signal.unsqueeze(-1), s, 0.0)
    return torch.zeros_like(s).scatter(-1, order, s).to(reward.dtype), {"n_valid": n_valid, "signal": signal}


def passk_advantages(reward: Tensor, valid: Tensor | None = None, *, k: int) -> tuple[Tensor, Aux]:
    """Pass@k training in closed form: an answer's GRPO advantage, averaged over its groups of k.

    mu = 1 - C(n-, k) / C(n, k),   sigma = sqrt(mu (1 - mu)),   n- wrong answers of n
    A(right) = (1 - mu) / sigma,   A(wrong) = (1 - mu - C(n- - 1, k - 1) / C(n - 1, k - 1)) / sigma

    reward [P, G] with right meaning > 0 (binary in the paper); adv [P, G]; aux: n_valid [P], signal [P]. No
    signal, and exactly 0, where fewer than k answers are valid, where all are wrong, or where so few are
    wrong that every k-subset passes. Raises as `pkpo_rewards`. See "Pass@k Training" (arXiv:2508.10751).
    """
    reward, valid = _checked("passk_advantages", reward, valid, k)
    right = valid & (reward > 0)
    n_valid = valid.sum(-1)
    n, wrong = n_valid.double(), (valid & ~right).sum(-1).double()
    fail = _choose(wrong, k) / _choose(n, k).clamp(min=1.0)
    signal = (n_valid >= k) & (fail > 0.0) & (wrong < n)
    sigma = torch.where(signal, (fail * (1.0 - fail)).sqrt(), 1.0)
    others, other_wrong = (n - 1.0).clamp(min=0.0), (wrong - 1.0).clamp(min=0.0)
    fail_with = _choose(other_wrong, k - 1) / _choose(others, k - 1).clamp(min=1.0)
    adv = torch.where(right, (fail / sigma).unsqueeze(-1), ((fail - fail_with) / sigma).unsqueeze(-1))
    adv = torch.where(valid & signal.unsqueeze(-1), adv, 0.0)
    return adv.to(reward.dtype), {"n_valid": n_valid, "signal": signal}


def best_of_group_advantages(
    reward: Tensor, valid: Tensor | None = None, *, scale: bool = True, ddof: int = 1, eps: float = 1e-6
) -> tuple[Tensor, Aux]:
    """Only the best answer learns, by its lead over the second; a tie for the best gives 0.

    A_best = (r_best - r_second) / (std_g + eps),  undivided if not scale;  A = 0 for the others

    reward, valid, adv [P, G]; aux: n_valid, signal (a single best exists). Raises as `pkpo_rewards`.
    See "Optimizing Language Models for Inference Time Objectives" (arXiv:2503.19595).
    """
    reward, valid = _checked("best_of_group_advantages", reward, valid, 2)
    n_valid = valid.sum(-1)
    best, second = torch.where(valid, reward, -torch.inf).topk(2, dim=-1).values.unbind(-1)
    signal = (n_valid >= 2) & (best > second)
    lead = torch.where(signal, best - second, 0.0).unsqueeze(-1)
    if scale:
        n = n_valid.unsqueeze(-1)
        centred = torch.where(valid, reward - reward.sum(-1, keepdim=True) / n.clamp(min=1), 0.0)
        var = centred.square().sum(-1, keepdim=True) / (n - ddof).clamp(min=1)
        lead = lead / (var.sqrt() + eps)
    adv = torch.where(valid & (reward == best.unsqueeze(-1)), lead, 0.0)
    return adv, {"n_valid": n_valid, "signal": signal}


def _checked(name: str, reward: Tensor, valid: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    valid = torch.ones_like(reward, dtype=torch.bool) if valid is None else valid
    fits = reward.ndim == 2 and valid.shape == reward.shape and valid.dtype == torch.bool
    if not fits or not 1 <= k <= reward.shape[1]:
        raise ValueError(
            f"{name}: want reward [P, G], valid bool [P, G] and 1 <= k <= G, got {tuple(reward.shape)}, "
            f"{valid.dtype} {tuple(valid.shape)} and k={k}"
        )
    reward = torch.where(valid, reward.detach(), 0.0).to(torch.promote_types(reward.dtype, torch.float32))
    if not torch.compiler.is_compiling() and not bool(reward.isfinite().all()):
        raise ValueError(f"{name}: a valid reward is NaN or infinite; a sample without a reward is not valid")
    return reward, valid


def _choose(n: Tensor, k: int) -> Tensor:
    """Binomial coefficient of float64 whole numbers n >= 0; 0 where n < k. Exact up to 2^53."""
    c = torch.ones_like(n)
    for i in range(k):
        c = c * (n - i) / (i + 1)
    return c
