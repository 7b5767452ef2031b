"""Several teachers, on axis 0: routed, mixed into one distribution, or each with its own divergence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor


def mix_teachers(
    teacher_logp: Tensor, weight: Sequence[float] | Tensor, *, kind: Literal["arithmetic", "geometric"]
) -> Tensor:
    """One teacher out of K, over the whole vocabulary.

    arithmetic  T = sum_k w_k T_k
    geometric   T = prod_k T_k^w_k / Z, the softmax of averaged logits

    With the arithmetic one KL(T || S) is sum_k w_k KL(T_k || S) up to a constant; with the geometric one
    KL(S || T) is sum_k w_k KL(S || T_k) + log Z. The mean of log-probs without Z is no distribution.

    teacher_logp: [K, ..., V] log-probs. weight: K numbers, or a tensor [K] or [K, ...] with one per token,
    brought to sum 1 over K. Returns log-probs [..., V], float32; NaN where a token's weights add up to 0.
    Raises ValueError for weights that are negative or all 0 (numbers only: a tensor is not looked into).
    """
    weight = _weights(weight, teacher_logp)
    if kind == "arithmetic":
        return _log_mean(teacher_logp, weight.unsqueeze(-1))
    return _mean(teacher_logp, weight.unsqueeze(-1)).log_softmax(-1)


def mix_sampled(
    teacher_logp: Tensor, weight: Sequence[float] | Tensor, *, kind: Literal["arithmetic", "geometric"]
) -> Tensor:
    """Log-probs of sampled tokens under a mixture, from each teacher's log-prob of them.

    arithmetic  log sum_k w_k T_k(a)
    geometric   sum_k w_k log T_k(a), which lacks the -log Z of its prefix: right in an advantage, where what
                all tokens of a prefix share is a baseline; not a log-prob to be reported

    teacher_logp: [K, ...]. weight, errors: see `mix_teachers`. Returns [...], float32.
    """
    weight = _weights(weight, teacher_logp, vocab=False)
    return (_log_mean if kind == "arithmetic" else _mean)(teacher_logp, weight)


def average_teachers(loss: Tensor, weight: Sequence[float] | Tensor) -> Tensor:
    """sum_k w_k L_k of the divergences from each teacher, as `full_divergence` gives them for [K, ..., V].

    loss: [K, ...]. weight, errors: see `mix_teachers`; brought to sum 1, so that more teachers, or larger
    weights, make no larger loss. A teacher with weight 0 may have an infinite loss. Returns [...].
    """
    return _mean(loss, _weights(weight, loss, vocab=False))


def route_teachers(teacher_logp: Tensor, route: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token the log-probs of its own teacher.

    teacher_logp: [K, ...] of sampled tokens, or [K, ..., V]. route: [...] int64, the teacher, -1 is none.
    Returns (logp [...] or [..., V], mask [...], False where there is no teacher; logp is 0 there).
    Raises ValueError for shapes that do not fit. An index >= K is torch's index error, on CUDA its assertion.
    """
    extra = teacher_logp.dim() - 1 - route.dim()
    if extra not in (0, 1) or teacher_logp.shape[1 : 1 + route.dim()] != route.shape:
        raise ValueError(
            "route_teachers: want teacher_logp [K, ...] or [K, ..., V] and route [...], "
            f"got {tuple(teacher_logp.shape)} and {tuple(route.shape)}"
        )
    taught = route >= 0
    index = torch.where(taught, route, 0)[None]
    if extra:
        taught_v, index = taught.unsqueeze(-1), index.unsqueeze(-1).expand(1, *teacher_logp.shape[1:])
        return torch.where(taught_v, teacher_logp.gather(0, index)[0], 0.0), taught
    return torch.where(taught, teacher_logp.gather(0, index)[0], 0.0), taught


def _weights(weight: Sequence[float] | Tensor, x: Tensor, *, vocab: bool = True) -> Tensor:
    """[K, ...] that broadcasts against x without V, with sum 1 over K."""
    if not isinstance(weight, Tensor):
        if min(weight, default=-1.0) < 0 or not 0 < math.fsum(weight) < math.inf:
            raise ValueError(f"teachers: want weights >= 0 that are not all 0, got {list(weight)}")
        weight = torch.tensor(weight, dtype=torch.float32, device=x.device)
    rank = x.dim() - vocab
    if weight.shape[0] != x.shape[0] or (weight.dim() != 1 and weight.shape != x.shape[:rank]):
        raise ValueError(
            f"teachers: want weight [K] or [K, ...] for {tuple(x.shape)}, got {tuple(weight.shape)}"
        )
    weight = weight / weight.sum(0)
    return weight.reshape(*weight.shape, *(1,) * (rank - weight.dim()))


def _mean(x: Tensor, weight: Tensor) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.where(weight == 0, 0.0, weight * x).sum(0)  # 0 · inf is 0 here


def _log_mean(x: Tensor, weight: Tensor) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.logsumexp(x + weight.log(), dim=0)
