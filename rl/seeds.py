"""Randomness without state: a seed is a function of what it is for, so nothing about it needs saving."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def fold_in(seed: int, *parts: int | str) -> int:
    """A 63-bit seed from a seed and what it is for, e.g. `fold_in(cfg.seed, "sample", ordinal, attempt,
    index)`.

    SplitMix64 (Steele et al., 2014) over the parts; the same on every machine and Python version.
    """
    state = _mix(seed & _MASK)  # mixed first: else seed and first part could change places
    for part in parts:
        words = [part] if isinstance(part, int) else list(part.encode())
        for word in [*words, len(words)]:
            state = _mix((state + 0x9E3779B97F4A7C15 + (word & _MASK)) & _MASK)
    return state >> 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
