"""One score from several: votes of one judge, the criteria of a rubric, the two orders of a pair.

None is a missing score and stays missing: out of the mean, counted, and never made a number. Pure Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, variance
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """`score` of `n_valid` votes. `noise`: its variance as a measurement, s²/n; None below two votes."""

    score: float | None
    n_valid: int
    noise: float | None


def vote(
    scores: Sequence[float | None], *, how: str = "mean", min_valid: int = 1, tie: float | None = None
) -> Vote:
    """The mean, median or majority of the votes that could be read; missing below `min_valid` of them.

    "majority" is for yes/no: votes of 0 and 1, and as many of both give `tie`: None (missing) or 0.5.
    `noise` is what `shrunk_advantages` takes as `noise_var`; it holds for the mean.

    Raises ValueError for an unknown `how`, min_valid < 1, and a majority over other votes than 0 and 1.
    """
    valid = [s for s in scores if s is not None]
    if how not in ("mean", "median", "majority") or min_valid < 1:
        raise ValueError(
            f"vote: how must be mean, median or majority, min_valid >= 1; got {how=}, {min_valid=}"
        )
    if how == "majority" and not set(valid) <= {0.0, 1.0}:
        raise ValueError(f"vote: a majority needs votes of 0 and 1, got {sorted(set(valid))}")
    noise = variance(valid) / len(valid) if len(valid) > 1 else None
    if len(valid) < min_valid:
        return Vote(score=None, n_valid=len(valid), noise=noise)
    if how == "majority":
        share = fmean(valid)
        return Vote(score=tie if share == 0.5 else float(share > 0.5), n_valid=len(valid), noise=noise)
    return Vote(score=fmean(valid) if how == "mean" else median(valid), n_valid=len(valid), noise=noise)


def rubric(
    met: Mapping[str, float | None], points: Mapping[str, float], *, missing: str = "strict"
) -> float | None:
    """Σ points · met / Σ positive points, clipped to [0, 1]: the share of a checklist that is met.

    met     criterion → 1 (met), 0 (not met), anything between, or None: could not be read
    points  criterion → its weight; below 0 it is a fault, which takes points off
    missing "strict": one unread criterion makes the rubric missing. "skip": the rubric is over the others

    Missing too where no criterion with positive points was read. Raises ValueError for criteria that differ
    between `met` and `points`, no positive points, or a value outside [0, 1].
    See "HealthBench: Evaluating Large Language Models Towards Improved Human Health" (2505.08775).
    """
    if missing not in ("strict", "skip"):
        raise ValueError(f"rubric: missing must be strict or skip, got {missing!r}")
    if met.keys() != points.keys():
        raise ValueError(f"rubric: criteria differ: {sorted(met.keys() ^ points.keys())}")
    if not any(p > 0 for p in points.values()):
        raise ValueError("rubric: no criterion has positive points")
    if bad := {c: m for c, m in met.items() if m is not None and not 0 <= m <= 1}:
        raise ValueError(f"rubric: expected values in [0, 1], got {bad}")
    read = {c: m for c, m in met.items() if m is not None}
    positive = sum(points[c] for c in read if points[c] > 0)
    if (missing == "strict" and len(read) < len(met)) or positive == 0:
        return None
    return min(1.0, max(0.0, sum(points[c] * m for c, m in read.items()) / positive))


def both_orders(first: float | None, second: float | None, *, strict: bool = False) -> float | None:
    """How far A beats B, in [0, 1], from two games: `first` saw A in first place, `second` saw B there.

    Each is the win of the answer in FIRST place: 1, 0.5 for a tie, 0. The second game's labels are flipped:
    (first + 1 − second)/2. A judge that only likes the first place gives 1 and 1, so 0.5.
    strict: 1 or 0 only where both games have that winner, else 0.5.
    A game that could not be read makes the pair missing. Raises ValueError outside [0, 1].
    See "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena" (2306.05685).
    """
    if first is None or second is None:
        return None
    if not (0 <= first <= 1 and 0 <= second <= 1):
        raise ValueError(f"both_orders: expected scores in [0, 1], got {first=}, {second=}")
    again = 1.0 - second
    if not strict:
        return (first + again) / 2
    return 1.0 if min(first, again) > 0.5 else 0.0 if max(first, again) < 0.5 else 0.5


class _Judged(Protocol):
    @property
    def status(self) -> str: ...
    @property
    def score(self) -> float | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """`mean` over the scores that were read (None without any); how many replies; failures by status."""

    mean: float | None
    n: int
    failures: Mapping[str, int] = field(default_factory=dict)

    @property
    def failure_rate(self) -> float:
        return sum(self.failures.values()) / self.n if self.n else 0.0


def tally(judgements: Iterable[_Judged]) -> Tally:
    """The mean score of the replies that could be read, beside how many could not, and why."""
    every = list(judgements)
    scores = [j.score for j in every if j.score is not None]
    failures = Counter(j.status for j in every if j.score is None)
    return Tally(mean=fmean(scores) if scores else None, n=len(every), failures=dict(failures))
