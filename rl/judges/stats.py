"""Small statistics of scores and labels. Pure; each is checked against its naive definition in the tests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import NormalDist, fmean

CHANCE = 0.99  # that a margin holds, one-sided


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    out, before = [0.0] * len(values), 0
    for _, run in groupby(order, key=lambda i: values[i]):
        tied = list(run)
        for i in tied:
            out[i] = before + (len(tied) + 1) / 2
        before += len(tied)
    return out


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson correlation of the ranks; None where either has no spread."""
    dx, dy = ([r - (len(v) + 1) / 2 for r in ranks(v)] for v in (x, y))
    norm = math.sqrt(sum(a * a for a in dx) * sum(b * b for b in dy))
    return sum(a * b for a, b in zip(dx, dy, strict=True)) / norm if norm else None


def auc(scores: Sequence[float], right: Sequence[bool]) -> float | None:
    """P(score of a right answer > score of a wrong one) + ½ P(equal); None unless there are both.

    From the rank sum of the right ones (Mann and Whitney, 1947).
    """
    n, p = len(scores), sum(right)
    if p in (0, n):
        return None
    rank_sum = sum(rank for rank, yes in zip(ranks(scores), right, strict=True) if yes)
    return (rank_sum - p * (p + 1) / 2) / (p * (n - p))


def auc_error(area: float, n_right: int, n_wrong: int) -> float:
    """Standard error of an AUC under the exponential model of Hanley and McNeil (Radiology, 1982)."""
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (n_right - 1) * (q1 - area**2) + (n_wrong - 1) * (q2 - area**2)
    return math.sqrt(max(0.0, spread) / (n_right * n_wrong))


def auc_interval(area: float, n_right: int, n_wrong: int, level: float = 0.95) -> tuple[float, float]:
    """All true AUCs from which `area` is at most z standard errors away, each with its own error.

    So a perfect AUC of few answers still has a lower bound (Newcombe, Statistics in Medicine, 2006); taken at
    `area` itself, the error of 1 would be 0.
    """
    z = NormalDist().inv_cdf(0.5 + level / 2)

    def outermost(end: float) -> float:
        out, within = end, area
        for _ in range(50):
            middle = (out + within) / 2
            if abs(area - middle) > z * auc_error(middle, n_right, n_wrong):
                out = middle
            else:
                within = middle
        return within

    return outermost(0.0), outermost(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Answers whose scores lie in [lo, hi), the last bin in [lo, hi]."""

    lo: float
    hi: float
    n: int
    score: float  # mean
    label: float  # mean: the share of right ones


def reliability(scores: Sequence[float], labels: Sequence[float], bins: int = 10) -> list[Bin]:
    """Bins of equal width over [0, 1], those without an answer left out."""
    inside: list[list[tuple[float, float]]] = [[] for _ in range(bins)]
    for score, label in zip(scores, labels, strict=True):
        inside[bin_of(score, bins)].append((score, label))
    return [
        Bin(
            lo=i / bins,
            hi=(i + 1) / bins,
            n=len(b),
            score=fmean(s for s, _ in b),
            label=fmean(x for _, x in b),
        )
        for i, b in enumerate(inside)
        if b
    ]


def bin_of(score: float, bins: int) -> int:
    """Of a score in [0, 1]; 0.3 belongs to the bin that begins there, though 0.3 · 10 may fall below 3."""
    i = min(bins - 1, int(score * bins))
    return i + 1 if i + 1 < bins and score >= (i + 1) / bins else i


def calibration_error(table: Sequence[Bin]) -> float:
    """ECE = Σ n_b / n · |mean score − mean label| over the bins (Naeini et al., AAAI 2015)."""
    return sum(b.n * abs(b.score - b.label) for b in table) / sum(b.n for b in table)


def accuracy(scores: Sequence[float], right: Sequence[bool], threshold: float) -> float:
    """Share of answers for which `score >= threshold` says what the label says."""
    return fmean((score >= threshold) == yes for score, yes in zip(scores, right, strict=True))


def best_threshold(scores: Sequence[float], right: Sequence[bool]) -> tuple[float, float]:
    """(threshold, accuracy) of the best cut: between two neighbouring scores, or outside all of them.

    Of equally good cuts the one nearest to ½. Chosen on the same answers, so its accuracy is optimistic.
    """
    levels = sorted(set(scores))
    cuts = [(a + b) / 2 if a < (a + b) / 2 else b for a, b in zip(levels, levels[1:], strict=False)]
    at = dict.fromkeys(levels, 0)  # score → right minus wrong answers that have it
    for score, yes in zip(scores, right, strict=True):
        at[score] += 1 if yes else -1
    hits, best = sum(right), []  # a cut below all scores says right to each
    for level, cut in zip(levels, [levels[0], *cuts], strict=True):
        best.append((hits, -abs(cut - 0.5), cut))
        hits -= at[level]
    above = math.nextafter(levels[-1], math.inf)
    hits, _, cut = max([*best, (hits, -abs(above - 0.5), above)])
    return cut, hits / len(scores)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True, slots=True)
class Estimate:
    """`margin`: how far the mean may be off by chance; None where there is too little to say."""

    mean: float
    margin: float | None


def estimate(
    clusters: Iterable[Sequence[float]], *, values: int, least: int, share: bool = False
) -> Estimate | None:
    """Mean over all values, and what chance may do to it; None without a value.

    Values of one cluster are not independent, so the error comes from the spread between clusters,
    e² = k/(k−1) · Σ_c (sum_c − mean · n_c)² / n², and margin = t · e with Student's one-sided 99 % quantile t
    for k−1 (rather 97 % where clusters differ in a skewed way). For a share e is at least √(p(1−p)/n) with
    p = (hits + 2)/(n + 4): 64 of 64 do not prove 100 %. No margin below `values` values or `least` clusters.
    """
    kept = [c for c in clusters if c]
    n, k = sum(map(len, kept)), len(kept)
    if not n:
        return None
    mean = math.fsum(math.fsum(c) for c in kept) / n
    if n < values or k < max(2, least):
        return Estimate(mean, None)
    error = math.sqrt(k / (k - 1) * sum((math.fsum(c) - mean * len(c)) ** 2 for c in kept)) / n
    if share:
        p = (mean * n + 2) / (n + 4)
        error = max(error, math.sqrt(p * (1 - p) / n))
    return Estimate(mean, error * t_quantile(k - 1))


def t_quantile(freedom: int) -> float:
    """Student's t at CHANCE by its expansion around the normal quantile; from 5 degrees on within 2 %."""
    z = NormalDist().inv_cdf(CHANCE)
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + terms[0] / freedom + terms[1] / freedom**2
