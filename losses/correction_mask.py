"""Off-policy correction by rejection: which tokens or sequences are too far off to learn from.

Every function returns `(keep, aux)`: keep bool, a part of mask; aux has `rejected` (0 or 1). Use it as
torch.where(keep, loss, 0.0) with the weight of the ORIGINAL mask, so that a rejected token is a zero and not
a re-weighting of the others, and metrics can still count it. log_rho = log pi - log mu per token, constant.
Sequences are rows of [B, T]; packed tokens [T] come with `row` [T] int64 in [0, n_rows), in whole sequences.
ValueError for shapes that do not fit and for unknown names.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Aux = dict[str, Tensor]


def ratio_mask(
    log_rho: Tensor,
    mask: Tensor,
    *,
    level: Literal["token", "sequence", "geometric"],
    low: float,
    high: float,
    row: Tensor | None = None,
    n_rows: int | None = None,
) -> tuple[Tensor, Aux]:
    """Keep low <= ratio <= high: the token's ratio, the sequence's product, or its geometric mean.

    ratio = exp(log_rho_t),  exp(sum_t log_rho_t),  exp(mean_t log_rho_t)

    Usual bounds: geometric 0.999 to 1.001; sequence 0 to 3. A product punishes length: 1.1 a token is 2.6 at
    ten tokens and 14,000 at a hundred. aux: rejected, log_ratio.
    """
    x = _kept("ratio_mask", mask, log_rho.detach())[0]
    if level != "token":
        x = _row_sum(x, row, n_rows)
    if level == "geometric":
        x = x / _row_sum(mask.to(x.dtype), row, n_rows).clamp(min=1.0)
    elif level not in ("token", "sequence"):
        raise ValueError(f'ratio_mask: level must be "token", "sequence" or "geometric", got {level!r}')
    return _keep(mask, (x >= _log(low)) & (x <= _log(high)), log_ratio=x)


def divergence_mask(
    log_rho: Tensor,
    mask: Tensor,
    *,
    limit: float,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "sequence_mean",
    row: Tensor | None = None,
    n_rows: int | None = None,
) -> tuple[Tensor, Aux]:
    """Keep what an estimate of KL(mu || pi), on mu's own samples, puts at most at limit.

    k1 = -log_rho,   k2 = log_rho^2 / 2,   k3 = rho - 1 - log_rho

    level: the token's own value, or its sequence's sum, mean or maximum.

    Usual: k3, sequence_mean, limit 1e-3 to 1e-2. k1 is signed: a sequence that pi likes better passes.
    |log_rho| is held to 20 nats. aux: rejected, divergence.
    """
    x = _kept("divergence_mask", mask, log_rho.detach())[0].clamp(-20.0, 20.0)
    if estimator not in ("k1", "k2", "k3"):
        raise ValueError(f'divergence_mask: estimator must be "k1", "k2" or "k3", got {estimator!r}')
    k = {"k1": -x, "k2": x.square() / 2.0, "k3": torch.expm1(x) - x}[estimator]
    if level == "sequence_max":
        k = _row_max(k, mask, row, n_rows)
    elif level in ("sequence_sum", "sequence_mean"):
        k = _row_sum(k, row, n_rows)
        if level == "sequence_mean":
            k = k / _row_sum(mask.to(x.dtype), row, n_rows).clamp(min=1.0)
    elif level != "token":
        raise ValueError(f"divergence_mask: unknown level {level!r}")
    return _keep(mask, k <= limit, divergence=k)


def veto_mask(
    log_rho: Tensor,
    mask: Tensor,
    *,
    floor: float = 1e-4,
    row: Tensor | None = None,
    n_rows: int | None = None,
) -> tuple[Tensor, Aux]:
    """Drop the whole sequence if any kept token has rho < floor: the policy would hardly ever have said that.

    keep_i = min_t rho_it >= floor.   aux: rejected, worst (the smallest log_rho of the sequence, in nats)
    """
    worst = -_row_max(-_kept("veto_mask", mask, log_rho.detach())[0], mask, row, n_rows)
    return _keep(mask, worst >= math.log(floor), worst=worst)


def off_policy_sequence_mask(
    logp: Tensor,
    logp_mu: Tensor,
    adv: Tensor,
    mask: Tensor,
    *,
    limit: float = 0.5,
    row: Tensor | None = None,
    n_rows: int | None = None,
) -> tuple[Tensor, Aux]:
    """Drop bad answers that the policy has already left behind.

    drop_i where mean_t A_it < 0 and mean_t (logp_mu - logp) > limit

    logp is taken as a constant here. adv: [B, T], [B, 1] or packed [T]; the sign asked is that of its mean
    over the sequence, so that a sequence goes or stays as a whole. limit in nats per token.
    aux: rejected, divergence (that mean). See "DeepSeek-V3.2" (arXiv:2512.02556).
    """
    constants = logp.detach(), logp_mu.detach(), adv.detach()
    logp, logp_mu, adv = _kept("off_policy_sequence_mask", mask, *constants)
    n = _row_sum(mask.to(logp.dtype), row, n_rows).clamp(min=1.0)
    gap = _row_sum(logp_mu - logp, row, n_rows) / n
    bad = _row_sum(adv, row, n_rows) < 0
    return _keep(mask, ~(bad & (gap > limit)), divergence=gap)


def m2po_mask(log_rho: Tensor, mask: Tensor, *, limit: float = 0.04) -> tuple[Tensor, Aux]:
    """Drop the tokens of largest log_rho^2 until the mean over the rest is below limit; one always stays.

    Asks about all tokens given: give those of the whole step for an answer that no split changes. log_rho,
    mask: any shape. aux: rejected. See "Prosperity before Collapse" (arXiv:2510.01161).
    """
    log_rho = _kept("m2po_mask", mask, log_rho.detach())[0]
    square = torch.where(mask, log_rho.square(), torch.inf).flatten()
    ascending, order = square.sort(stable=True)
    count = torch.arange(1, square.numel() + 1, device=square.device)
    # running means of an ascending list ascend, so what passes is a prefix; off-mask is inf, and last
    passes = (ascending.cumsum(0) / count < limit) | (count == 1)
    keep = torch.zeros_like(passes).scatter(0, order, passes).view_as(mask)
    return _keep(mask, keep)


def _keep(mask: Tensor, inside: Tensor, **aux: Tensor) -> tuple[Tensor, Aux]:
    keep = mask & inside
    rejected = (mask & ~inside).to(torch.float32)
    return keep, {"rejected": rejected, **{name: torch.where(mask, x, 0.0) for name, x in aux.items()}}


def _log(x: float) -> float:
    return math.log(x) if x > 0.0 else -math.inf


def _row_max(x: Tensor, mask: Tensor, row: Tensor | None, n_rows: int | None) -> Tensor:
    """Maximum over each token's own sequence, handed back to it; -inf where nothing is kept."""
    if (row is None) != (n_rows is None):
        raise ValueError("packed tokens need both row [T] and n_rows; padded tokens [B, T] need neither")
    x = torch.where(mask, x, -torch.inf)
    if row is None or n_rows is None:
        return x.amax(-1, keepdim=True)
    return x.new_full((n_rows,), -torch.inf).scatter_reduce(0, row, x, "amax")[row]


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
