"""Divergences by their definition in float64, and small distributions to take them of."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from losses.distill import KINDS

ON = torch.tensor([True])
every_kind = pytest.mark.parametrize("kind", KINDS)


def logs(*p: float) -> Tensor:
    return torch.tensor([p], dtype=torch.float64).log()


def rows(n: int, v: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    z, t = 1.5 * torch.randn(2, n, v, generator=g, dtype=torch.float64)
    return z, t.log_softmax(-1)


def naive(s: list[float], t: list[float], kind: str, beta: float = 0.5, alpha: float = 0.1) -> float:
    """By the definition, over plain probabilities."""

    def kl(p: list[float], q: list[float]) -> float:
        return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)

    def mix(w: float, p: list[float], q: list[float]) -> list[float]:
        return [w * a + (1 - w) * b for a, b in zip(p, q, strict=True)]

    m = mix(beta, t, s)
    return {
        "forward": lambda: kl(t, s),
        "reverse": lambda: kl(s, t),
        "skew_forward": lambda: kl(t, mix(alpha, t, s)),
        "skew_reverse": lambda: kl(s, mix(alpha, s, t)),
        "jsd": lambda: (1 - beta) * kl(t, m) + beta * kl(s, m),
        "jsd_gkd": lambda: beta * kl(t, m) + (1 - beta) * kl(s, m),
    }[kind]()


def gradient(loss: Tensor, z: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), z)[0]


def expected_gradient(z: Tensor, per_token: Tensor) -> Tensor:
    """E over a from S of the gradient of per_token[a], sampling not differentiated."""
    p = z.softmax(-1).detach()
    return torch.autograd.grad((p * per_token).sum(), z)[0]
