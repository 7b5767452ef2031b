"""Draw one token per row from logits: seeded by a counter, so that a draw depends on its own row alone."""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN, MIX_1, MIX_2 = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64, where products wrap. "Fast Splittable PRNGs", Steele et al.
    2014."""
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # int64 >> repeats the sign bit


def uniform(seed: Tensor, count: Tensor) -> Tensor:
    """A number in [0, 1) of 53 random bits, a pure function of (seed, count); int64 [R] both -> float64
    [R]."""
    return _shift(_mix(_mix(seed) + count * GOLDEN), 11).double() * 2.0**-53


def kept(probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Which tokens [R, V] may be drawn: the k most likely, of these the fewest that hold mass top_p."""
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    keep = (torch.arange(probs.shape[-1], device=probs.device) < top_k[:, None]) | (top_k == 0)[:, None]
    mass = torch.where(keep, ranked, 0.0)
    mass = mass / mass.sum(-1, keepdim=True)
    keep &= (mass.cumsum(-1) - mass < top_p[:, None]) | (top_p >= 1)[:, None]
    return torch.zeros_like(keep).scatter(-1, order, keep)


def sample(
    logits: Tensor, u: Tensor, *, temperature: Tensor, top_p: Tensor, top_k: Tensor, filtered: bool
) -> tuple[Tensor, Tensor]:
    """Invert the cumulative distribution at u; logits [R, V], the rest [R] -> token [R] int64, logp [R]
    float32.

    p ∝ softmax(logits / temperature) over the tokens that top_p and top_k keep; logp = log p(token), in nats.
    temperature 0 takes the most likely token, logp 0. `filtered=False` promises that no row restricts
    top_p or
    top_k and saves a sort; it changes no bit. Raises FloatingPointError where logits are not finite.
    """
    greedy = temperature == 0
    probs = (logits.double() / torch.where(greedy, 1.0, temperature)[:, None]).softmax(-1)
    if filtered:
        probs = torch.where(kept(probs, top_p, top_k), probs, 0.0)
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1]
    if not torch.isfinite(total).all():
        raise FloatingPointError("sample: logits are not finite")
    token = torch.searchsorted(cumulative, (u * total)[:, None], right=True)
    logp = (probs.gather(-1, token)[:, 0] / total).log()
    token = torch.where(greedy, logits.argmax(-1), token[:, 0])
    return token, torch.where(greedy, 0.0, logp).float()
