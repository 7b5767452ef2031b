"""Every policy loss as a naive float64 loop over a row's kept tokens: values and gradients in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import losses

Row = list[float]
# (logp, logp_mu, adv) of a row's kept tokens -> (L_t, n * d mean(L) / d logp_t)
Naive = Callable[[Row, Row, Row], tuple[Row, Row]]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ratios(lp: Row, mu: Row) -> Row:
    return [math.exp(a - b) for a, b in zip(lp, mu, strict=True)]


def surrogate(r: float, a: float, low: float, high: float) -> tuple[float, float]:
    """-min(r a, clip(r) a) and its derivative with respect to r."""
    if r * a <= clip(r, low, high) * a:
        return -r * a, -a
    return -clip(r, low, high) * a, 0.0


def grpo(low: float, high: float, dual: float = math.inf) -> Naive:
    def naive(lp: Row, mu: Row, adv: Row) -> tuple[Row, Row]:
        value, grad = [], []
        for r, a in zip(ratios(lp, mu), adv, strict=True):
            v, dr = surrogate(r, a, 1 - low, 1 + high)
            if a < 0 and v > -dual * a:
                v, dr = -dual * a, 0.0
            value.append(v)
            grad.append(dr * r)
        return value, grad

    return naive


def gspo(low: float, high: float) -> Naive:
    def naive(lp: Row, mu: Row, adv: Row) -> tuple[Row, Row]:
        s = math.exp(sum(a - b for a, b in zip(lp, mu, strict=True)) / len(lp))
        both = [surrogate(s, a, 1 - low, 1 + high) for a in adv]
        return [v for v, _ in both], [ds * s for _, ds in both]

    return naive


def gmpo(low: float, high: float) -> Naive:
    def naive(lp: Row, mu: Row, adv: Row) -> tuple[Row, Row]:
        d = [a - b for a, b in zip(lp, mu, strict=True)]
        held = [min(x, high) if a > 0 else max(x, -low) for x, a in zip(d, adv, strict=True)]
        s = math.exp(sum(held) / len(d))
        return [-a * s for a in adv], [-a * s * (h == x) for a, h, x in zip(adv, held, d, strict=True)]

    return naive


def weighted(weight: Callable[[Row, Row], Row]) -> Naive:
    """L = -w A logp with a constant w."""

    def naive(lp: Row, mu: Row, adv: Row) -> tuple[Row, Row]:
        w = weight(ratios(lp, mu), adv)
        return [-x * a * p for x, a, p in zip(w, adv, lp, strict=True)], [
            -x * a for x, a in zip(w, adv, strict=True)
        ]

    return naive


def sapo(lp: Row, mu: Row, adv: Row) -> tuple[Row, Row]:
    value, grad = [], []
    for r, a in zip(ratios(lp, mu), adv, strict=True):
        tau = 1.0 if a > 0 else 1.05
        p = 1 / (1 + math.exp(-tau * (r - 1)))
        value.append(-4 / tau * p * a)
        grad.append(-4 * p * (1 - p) * r * a)
    return value, grad


def dppo(kind: str, limit: float) -> Naive:
    def naive(lp: Row, mu: Row, adv: Row) -> tuple[Row, Row]:
        value = []
        for x, y, a in zip(lp, mu, adv, strict=True):
            p, q = math.exp(x), math.exp(y)
            d = abs(p - q) if kind == "tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            away = (a > 0 and p > q) or (a < 0 and p < q)
            value.append(0.0 if away and d > limit else -p / q * a)
        return value, value  # d rho / d logp = rho

    return naive


def dro(lp: Row, mu: Row, adv: Row) -> tuple[Row, Row]:
    both = list(zip(lp, mu, adv, strict=True))
    return [-(a * x - 0.25 * (x - y) ** 2) for x, y, a in both], [-(a - 0.5 * (x - y)) for x, y, a in both]


def vespo(r: Row, adv: Row) -> Row:
    w = math.prod(r)
    return [w**k * math.exp(lam * (1 - w)) for k, lam in ((2, 3) if a >= 0 else (3, 2) for a in adv)]


CASES: list[tuple[Callable[..., Any], dict[str, Any], Naive]] = [
    (losses.reinforce_loss, {}, weighted(lambda r, adv: [1.0] * len(r))),
    (losses.grpo_loss, {}, grpo(0.2, 0.28)),
    (losses.grpo_loss, {"eps_low": 0.1, "eps_high": 0.1, "dual_clip": 1.3}, grpo(0.1, 0.1, 1.3)),
    (losses.gspo_loss, {"eps_low": 0.02, "eps_high": 0.03}, gspo(0.02, 0.03)),
    (losses.gspo_token_loss, {"eps_low": 0.02, "eps_high": 0.03}, gspo(0.02, 0.03)),
    (losses.gmpo_loss, {"eps_low": 0.2, "eps_high": 0.3}, gmpo(0.2, 0.3)),
    (losses.cispo_loss, {"cap": 1.3, "floor": 0.7}, weighted(lambda r, adv: [clip(x, 0.7, 1.3) for x in r])),
    (losses.aipo_loss, {"cap": 1.3}, weighted(lambda r, adv: [min(x, 1.3) for x in r])),
    (losses.sapo_loss, {}, sapo),
    (losses.dppo_loss, {"limit_low": 0.05, "limit_high": 0.05}, dppo("tv", 0.05)),
    (losses.dppo_loss, {"divergence": "kl", "limit_low": 0.01, "limit_high": 0.01}, dppo("kl", 0.01)),
    (losses.topr_loss, {}, weighted(lambda r, adv: [1.0 if a > 0 else min(math.prod(r), 1.0) for a in adv])),
    (losses.dro_loss, {"beta": 0.5}, dro),
    (losses.vespo_loss, {}, weighted(vespo)),
]
