"""Group advantages: G answers to each of P prompts, one number per answer, from rewards [P, G] alone.

Every function takes `valid` [P, G] (None: all valid) and returns `(adv, aux)`. A sample that is not valid
(the judge failed, the answer was dropped) is out of every mean and deviation and has advantage exactly 0,
whatever its reward holds. A group with fewer than two valid samples, or with equal valid rewards, carries no
signal: exactly 0, by comparing max and min, because the rounding residue of a mean can be divided up to
  anything.

A valid reward that is not finite raises ValueError in eager code. Under torch.compile, where looking would
stop the device, a NaN makes its whole group NaN. Rewards belong to whole groups: compute advantages before
any split.

aux: `n_valid` [P] int64; `signal` [P] bool, True where a group has two or more valid, unequal rewards.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor

Aux = dict[str, Tensor]


def group_advantages(
    reward: Tensor,
    valid: Tensor | None = None,
    *,
    scale: Literal["std", "none"] = "std",
    ddof: int = 1,
    eps: float = 1e-6,
) -> tuple[Tensor, Aux]:
    """GRPO and Dr.GRPO: the reward against its group.

    A_i = (r_i - mean_g) / (std_g + eps)    scale="std" (GRPO); std divides by n - ddof
    A_i = r_i - mean_g                      scale="none" (Dr.GRPO; goes with the aggregation "constant")

    reward [P, G] float, valid [P, G] bool; adv [P, G]. Going from ddof 1 to 0 rescales by sqrt(n / (n - 1)).
    See "DeepSeekMath" (arXiv:2402.03300), "Understanding R1-Zero-Like Training" (arXiv:2503.20783).
    """
    if scale not in ("std", "none"):
        raise ValueError(f'group_advantages: scale must be "std" or "none", got {scale!r}')
    reward, valid, aux = _checked("group_advantages", reward, valid)
    adv = reward - _mean(reward, valid)
    if scale == "std":
        adv = adv / (_std(adv, valid, ddof) + eps)
    return _where_signal(adv, valid, aux), aux


def batch_std_advantages(
    reward: Tensor, valid: Tensor | None = None, *, ddof: int = 1, eps: float = 1e-6
) -> tuple[Tensor, Aux]:
    """The group's mean, the whole batch's deviation: easy and hard groups keep their relative size.

    A_i = (r_i - mean_g) / (std_batch + eps),  std over all valid rewards of the batch

    Shapes and aux as for `group_advantages`. `signal` still is a question about the group.
    See "Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning" (arXiv:2508.08221).
    """
    reward, valid, aux = _checked("batch_std_advantages", reward, valid)
    flat, kept = reward.reshape(1, -1), valid.reshape(1, -1)
    std = _std(flat - _mean(flat, kept), kept, ddof)
    return _where_signal((reward - _mean(reward, valid)) / (std + eps), valid, aux), aux


def rloo_advantages(
    reward: Tensor, valid: Tensor | None = None, *, scale: Literal["none", "std"] = "none", eps: float = 1e-6
) -> tuple[Tensor, Aux]:
    """Leave-one-out baseline: the reward against the mean of the others.

    A_i = r_i - mean_{j != i} r_j = n / (n - 1) (r_i - mean_g)              scale="none" (RLOO)
    A_i = (r_i - mean_{j != i} r_j) / (std_{j != i} r_j + eps)              scale="std"

    Where the others are all equal, or only one, there is no deviation to divide by and A_i stays plain.
    Shapes and aux as for `group_advantages`.
    See "Back to Basics: Revisiting REINFORCE Style Optimization for RLHF" (arXiv:2402.14740).
    """
    if scale not in ("std", "none"):
        raise ValueError(f'rloo_advantages: scale must be "std" or "none", got {scale!r}')
    reward, valid, aux = _checked("rloo_advantages", reward, valid)
    size = reward.shape[1]
    other = valid.unsqueeze(1) & ~torch.eye(size, dtype=torch.bool, device=valid.device)  # [P, G, G]
    r_other = reward.unsqueeze(1).expand(-1, size, -1)
    baseline = _mean(r_other, other)
    adv = reward - baseline.squeeze(-1)
    if scale == "std":
        std = _std(r_other - baseline, other, 1).squeeze(-1)
        adv = torch.where(_differ(r_other, other), adv / (std + eps), adv)
    return _where_signal(adv, valid, aux), aux


def opo_advantages(reward: Tensor, n_tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Aux]:
    """The baseline of least variance, if a gradient's square grows with length: weighted by tokens.

    A_i = r_i - sum_j n_j r_j / sum_j n_j

    n_tokens [P, G]: length of each answer. The advantages of a group do not add up to 0. Otherwise as
    `group_advantages`. See "On-Policy RL with Optimal Reward Baseline" (arXiv:2505.23585).
    """
    reward, valid, aux = _checked("opo_advantages", reward, valid)
    n = torch.where(valid, n_tokens, 0).to(reward.dtype)
    baseline = (n * reward).sum(-1, keepdim=True) / n.sum(-1, keepdim=True).clamp(min=1.0)
    return _where_signal(reward - baseline, valid, aux), aux


def gpg_advantages(
    reward: Tensor, valid: Tensor | None = None, *, count: Literal["signal", "nonzero"] = "signal"
) -> tuple[Tensor, Aux]:
    """Centred rewards, scaled up for the samples that carry no gradient.

    A_i = alpha (r_i - mean_g),  alpha = N / N_active over the batch's N valid samples

    count="signal": N_active counts samples in groups with signal, as in the paper; "nonzero": samples with a
    reward other than 0, as in verl. Shapes and aux as for `group_advantages`.
    See "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning" (arXiv:2504.02546).
    """
    if count not in ("signal", "nonzero"):
        raise ValueError(f'gpg_advantages: count must be "signal" or "nonzero", got {count!r}')
    reward, valid, aux = _checked("gpg_advantages", reward, valid)
    active = aux["signal"].unsqueeze(-1) if count == "signal" else reward != 0
    alpha = valid.sum() / (valid & active).sum().clamp(min=1)
    return _where_signal(alpha * (reward - _mean(reward, valid)), valid, aux), aux


def maxrl_advantages(reward: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Aux]:
    """The gradient of log mean reward: rare successes weigh more.

    A_i = (r_i - mean_g) / mean_g,  0 where mean_g <= 0

    For rewards >= 0, binary in the paper; a negative mean would turn the signs round, so such a group has no
    signal. Shapes and aux as for `group_advantages`. See "MaxRL" (arXiv:2602.02710).
    """
    reward, valid, aux = _checked("maxrl_advantages", reward, valid)
    mean = _mean(reward, valid)
    aux["signal"] = aux["signal"] & (mean.squeeze(-1) > 0)
    return _where_signal((reward - mean) / torch.where(mean > 0, mean, 1.0), valid, aux), aux


def remax_advantages(reward: Tensor, greedy: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Aux]:
    """The reward against that of the greedy answer to the same prompt.

    A_i = r_i - r(greedy_g)

    greedy [P]; G may be 1. The baseline is not the group's, so one valid sample is enough and `signal` says
    that some valid sample differs from it. See "ReMax" (arXiv:2310.10505).
    """
    reward, valid, aux = _checked("remax_advantages", reward, valid)
    adv = torch.where(valid, reward - greedy.unsqueeze(-1), 0.0)
    return adv, {"n_valid": aux["n_valid"], "signal": (adv != 0).any(-1)}


def group_index(ids: Sequence[Hashable]) -> tuple[Tensor, Tensor]:
    """Rows in any order -> groups: index [P, G] int64 and valid [P, G] bool, so that reward[index] is [P, G].

    Groups appear in the order of their first row; short ones are filled with index 0, valid False. Rows
    belong together if and only if their ids are equal. On the way back, `out[index[valid]] = adv[valid]`.
    """
    members: dict[Hashable, list[int]] = {}
    for i, key in enumerate(ids):
        members.setdefault(key, []).append(i)
    size = max(map(len, members.values()), default=0)
    index = torch.tensor([m + [-1] * (size - len(m)) for m in members.values()], dtype=torch.int64)
    index = index.reshape(len(members), size)
    return index.clamp(min=0), index >= 0


def _checked(name: str, reward: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Aux]:
    """Rewards in float32 or better with 0 in the invalid places, the mask, and aux."""
    valid = torch.ones_like(reward, dtype=torch.bool) if valid is None else valid
    if reward.ndim != 2 or valid.shape != reward.shape or valid.dtype != torch.bool:
        raise ValueError(
            f"{name}: want reward [P, G] and valid bool [P, G], got {tuple(reward.shape)} and "
            f"{valid.dtype} {tuple(valid.shape)}"
        )
    reward = torch.where(valid, reward.detach(), 0.0).to(torch.promote_types(reward.dtype, torch.float32))
    if not torch.compiler.is_compiling() and not bool(reward.isfinite().all()):
        raise ValueError(f"{name}: a valid reward is NaN or infinite; a sample without a reward is not valid")
    n_valid = valid.sum(-1)
    return reward, valid, {"n_valid": n_valid, "signal": (n_valid >= 2) & _differ(reward, valid)}


def _differ(x: Tensor, valid: Tensor) -> Tensor:
    """Whether the valid entries of the last axis are not all equal; NaN differs from everything."""
    high, low = torch.where(valid, x, -torch.inf).amax(-1), torch.where(valid, x, torch.inf).amin(-1)
    return valid.any(-1) & (high != low)


def _mean(x: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, x, 0.0).sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)


def _std(centred: Tensor, valid: Tensor, ddof: int) -> Tensor:
    """Of values already centred: E[x^2] - E[x]^2 would cancel."""
    square = torch.where(valid, centred.square(), 0.0).sum(-1, keepdim=True)
    return (square / (valid.sum(-1, keepdim=True) - ddof).clamp(min=1)).sqrt()


def _where_signal(adv: Tensor, valid: Tensor, aux: Aux) -> Tensor:
    return torch.where(valid & aux["signal"].unsqueeze(-1), adv, 0.0)
