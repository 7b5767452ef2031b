"""Off-policy correction by weights: for samples drawn by mu, not by the policy that trains on them.

log_rho = log pi - log mu per token, constant; in decoupled PPO log_rho = logp_prox - logp_mu, and the
corrected loss is weight * grpo_loss(logp, logp_prox, adv, mask). Weights multiply the policy term (and a
distillation term on the same samples), not the KL or the entropy. The denominator stays the original token
count: a weight of 0 is a zero, it does not re-weight the other tokens.

level says whose ratio is meant, here and in every function:
  token      rho_t = exp(log_rho_t)
  sequence   exp(sum_t log_rho_t), the product: unbiased, exponential in length (1.01 a token is 2.7 at 100)
  geometric  exp(mean_t log_rho_t), length-normalised (1.01 at any length)
A sequence is a row of [B, T]; packed tokens [T] come with `row` [T] int64 in [0, n_rows), and must be whole
sequences.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

LOG_RHO_MAX = 20.0  # nats; every ratio is held to exp(+-20)

Level = Literal["token", "sequence", "geometric"]
Aux = dict[str, Tensor]


def importance_weight(
    log_rho: Tensor,
    mask: Tensor,
    *,
    level: Level = "token",
    row: Tensor | None = None,
    n_rows: int | None = None,
) -> tuple[Tensor, Aux]:
    """w = rho at the level, untruncated: the weight of decoupled PPO.

    log_rho, mask: [B, T] or packed [T]. Returns w, constant, shape of mask, 0 off-mask; aux: rho, the same.
    Raises ValueError for shapes that do not fit, or another level. See "Batch size-invariance for policy
    optimization" (arXiv:2110.00641) and "AReaL" (arXiv:2505.24298).
    """
    rho = _ratio("importance_weight", log_rho, mask, level, row, n_rows)
    return rho, {"rho": rho}


def tis_weight(
    log_rho: Tensor,
    mask: Tensor,
    *,
    cap: float = 2.0,
    floor: float = 0.0,
    level: Level = "token",
    row: Tensor | None = None,
    n_rows: int | None = None,
) -> tuple[Tensor, Aux]:
    """Truncated importance sampling: w = clip(rho, floor, cap). Every token stays.

    Arguments, shapes and errors as for `importance_weight`; aux: rho (before), truncated (0 or 1).
    See "Truncated Importance Sampling" by E. Ionides (2008).
    """
    rho = _ratio("tis_weight", log_rho, mask, level, row, n_rows)
    truncated = mask & ((rho > cap) | (rho < floor))
    return torch.where(mask, rho.clamp(floor, cap), 0.0), {"rho": rho, "truncated": truncated.to(rho.dtype)}


def mis_weight(
    log_rho: Tensor,
    mask: Tensor,
    *,
    low: float = 0.0,
    high: float = 2.0,
    level: Level = "token",
    row: Tensor | None = None,
    n_rows: int | None = None,
) -> tuple[Tensor, Aux]:
    """Masked importance sampling: w = rho where low <= rho <= high, 0 elsewhere.

    With level "token", low=0.5 and high=5 this is IcePop (`icepop_weight`); with level "sequence" the whole
    sequence goes. Arguments, shapes and errors as for `importance_weight`;
    aux: rho (before), rejected (0 or 1).
    """
    rho = _ratio("mis_weight", log_rho, mask, level, row, n_rows)
    inside = mask & (rho >= low) & (rho <= high)
    return torch.where(inside, rho, 0.0), {"rho": rho, "rejected": (mask & ~inside).to(rho.dtype)}


def icepop_weight(
    log_rho: Tensor, mask: Tensor, *, low: float = 0.5, high: float = 5.0
) -> tuple[Tensor, Aux]:
    """IcePop: `mis_weight` per token, bounded on both sides, for a sampler and a trainer that disagree.

    Here log_rho = trainer's minus sampler's log-prob under the same weights. See "Every Step Evolves"
    (arXiv:2510.18855).
    """
    return mis_weight(log_rho, mask, low=low, high=high, level="token")


def normalise_weight(
    weight: Tensor,
    mask: Tensor,
    *,
    level: Literal["token", "sequence"] = "token",
    mean: Tensor | float | None = None,
    row: Tensor | None = None,
    n_rows: int | None = None,
) -> tuple[Tensor, Aux]:
    """w / mean(w): self-normalised weights, whose average over the step is 1.

    mean over all kept tokens (level="token"), or over sequences of their token mean (level="sequence")

    weight: after truncation or masking. mask: the ORIGINAL one; rejected tokens count in the mean, as 0.
    mean: of the whole step, from the aux of every micro-batch and rank: sum(total) / sum(count). None takes
    it from the tokens given. A mean below 1e-8 leaves the weights as they are. aux: total and count, scalars.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f'normalise_weight: level must be "token" or "sequence", got {level!r}')
    w = _kept("normalise_weight", mask, weight.detach())[0]
    if level == "sequence":
        n = _row_sum(mask.to(w.dtype), row, n_rows).clamp(min=1.0)
        count = torch.where(mask, 1.0 / n, 0.0).sum()  # sequences with a kept token
        total = torch.where(mask, w / n, 0.0).sum()
    else:
        count, total = mask.sum().to(w.dtype), w.sum()
    mean = total / count.clamp(min=1.0) if mean is None else w.new_ones(()) * mean
    return torch.where(mean > 1e-8, w / mean.clamp(min=1e-8), w), {"total": total, "count": count}


def effective_sample_size(
    log_rho: Tensor,
    mask: Tensor,
    *,
    level: Level = "token",
    row: Tensor | None = None,
    n_rows: int | None = None,
) -> tuple[Tensor, Aux]:
    """Share of the samples that the importance weights leave in effect, in (0, 1]; 1 for equal weights.

    ess = (sum rho)^2 / (n sum rho^2),  over the n kept tokens, or the n sequences that keep any

    log_rho, mask: [B, T] or packed [T]. Returns a scalar (0 if nothing is kept) and aux, scalars too: sum_w,
    sum_w2, n. Over ranks add those three and take the ratio: an average of ratios is not the ratio.
    See "Monte Carlo theory, methods and examples" by A. Owen (2013), chapter 9.
    """
    w = _ratio("effective_sample_size", log_rho, mask, level, row, n_rows)
    share = mask.to(w.dtype)  # of a sample in each token
    if level != "token":
        share = torch.where(mask, 1.0 / _row_sum(share, row, n_rows).clamp(min=1.0), 0.0)
    sum_w, sum_w2, n = (share * w).sum(), (share * w.square()).sum(), share.sum()
    return sum_w.square() / (n * sum_w2).clamp(min=1e-30), {"sum_w": sum_w, "sum_w2": sum_w2, "n": n}


def _ratio(
    name: str, log_rho: Tensor, mask: Tensor, level: str, row: Tensor | None, n_rows: int | None
) -> Tensor:
    """rho of the level on each kept token, 0 elsewhere."""
    log_rho = _kept(name, mask, log_rho.detach())[0]
    if level == "sequence":
        log_rho = _row_sum(log_rho, row, n_rows)
    elif level == "geometric":
        n = _row_sum(mask.to(log_rho.dtype), row, n_rows).clamp(min=1.0)
        log_rho = _row_sum(log_rho, row, n_rows) / n
    elif level != "token":
        raise ValueError(f'{name}: level must be "token", "sequence" or "geometric", got {level!r}')
    return torch.where(mask, log_rho.clamp(-LOG_RHO_MAX, LOG_RHO_MAX).exp(), 0.0)


def _row_sum(x: Tensor, row: Tensor | None, n_rows: int | None) -> Tensor:
    """Sum over each token's own sequence, handed back to it: [..., T] -> [..., 1], packed [T] -> [T]."""
    if (row is None) != (n_rows is None):
        raise ValueError("packed tokens need both row [T] and n_rows; padded tokens [B, T] need neither")
    if row is None or n_rows is None:
        return x.sum(-1, keepdim=True)
    return x.new_zeros(n_rows).index_add(0, row, x)[row]


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
