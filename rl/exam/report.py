"""What a judge's scores of labelled answers say of the judge. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from rl.config import Health
from rl.exam.labelled import Labelled
from rl.judges import stats
from rl.judges.alarms import alarms
from rl.judges.health import Seen, measure
from rl.rewards.combine import kinds
from rl.types import Call, Score, Verdict

OWN = (
    "first_place",
    "swap_agreement",
    "noise",
    "length_corr",
    "length_bias",
    "saturation",
)  # of rl/judges/health.py


def report(
    verdicts: Sequence[Verdict], rows: Sequence[Labelled], seconds: float, health: Health
) -> dict[str, Any]:
    """All that can be said of one producer, ready for JSON; what cannot be said is None.

    An answer is right if its label is at least ½. Accuracies, AUC and calibration are over the answers with a
    score; `scored` says what share of all that is. `best_accuracy` is at the threshold that is best for these
    answers, so optimistic. Calibration (ECE, 10 bins) only where all scores lie in [0, 1].

    Args:
      verdicts, rows: one verdict per row.
      seconds: wall time of all, for the speed.
      health: limits of the warnings.
    """
    if not rows or len(verdicts) != len(rows):
        raise ValueError(f"report: expected a verdict for each row, got {len(verdicts)} and {len(rows)} rows")
    counted = kinds(v.outcome for v in verdicts)
    known = [
        (v.outcome.value, row) for v, row in zip(verdicts, rows, strict=True) if isinstance(v.outcome, Score)
    ]
    bounded = all(0 <= score <= 1 for score, _ in known)
    seen = _seen(verdicts, rows)
    told = measure(seen, bounded=bounded)
    return {
        "answers": len(rows),
        "right": fmean(row.label >= 0.5 for row in rows),
        "scored": len(known) / len(rows),
        "outcomes": dict(counted),
        **_agreement([score for score, _ in known], [row.label for _, row in known], bounded),
        "keys": _by_key(known) if len({row.key for row in rows}) > 1 else {},
        **{name: told.get(f"judge/{name}") for name in OWN},
        **_cost([call for v in verdicts for call in v.calls], len(rows), seconds),
        "warnings": [alarm.message.removeprefix("judge: ") for alarm in alarms(told, {}, health)],
    }


def _agreement(scores: Sequence[float], labels: Sequence[float], bounded: bool) -> dict[str, Any]:
    names = (
        "score_mean", "accuracy", "best_accuracy", "best_threshold", "auc", "auc_low", "auc_high", "ece",
        "false_right", "false_wrong",
    )  # fmt: skip
    if not scores:
        return {**dict.fromkeys(names), "reliability": []}
    right = [label >= 0.5 for label in labels]
    threshold, best = stats.best_threshold(scores, right)
    area, n_right = stats.auc(scores, right), sum(right)
    low, high = (None, None) if area is None else stats.auc_interval(area, n_right, len(right) - n_right)
    table = stats.reliability(scores, labels) if bounded else []
    passed = [score >= 0.5 for score in scores]
    values = (
        fmean(scores), stats.accuracy(scores, right, 0.5), best, threshold, area, low, high,
        stats.calibration_error(table) if table else None,
        fmean(p and not r for p, r in zip(passed, right, strict=True)),
        fmean(r and not p for p, r in zip(passed, right, strict=True)),
    )  # fmt: skip
    return {**dict(zip(names, values, strict=True)), "reliability": [asdict(b) for b in table]}


def _by_key(known: Sequence[tuple[float, Labelled]]) -> dict[str, dict[str, Any]]:
    parts: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for score, row in known:
        parts[row.key].append((score, row.label >= 0.5))
    found = {}
    for key, part in sorted(parts.items()):
        scores, right = [score for score, _ in part], [yes for _, yes in part]
        accuracy, area = stats.accuracy(scores, right, 0.5), stats.auc(scores, right)
        found[key] = {"scored": len(part), "right": fmean(right), "accuracy": accuracy, "auc": area}
    return found


def _cost(calls: Sequence[Call], n: int, seconds: float) -> dict[str, Any]:
    taken = [call.seconds for call in calls]
    return {
        "calls": len(calls),
        "attempts": sum(call.attempts for call in calls),
        "latency_s_p50": stats.quantile(taken, 0.5) if taken else None,
        "latency_s_p95": stats.quantile(taken, 0.95) if taken else None,
        "prompt_tokens": sum(call.n_prompt for call in calls),
        "tokens": sum(call.n_tokens for call in calls),
        "judge_seconds": sum(taken),
        "seconds": seconds,
        "answers_per_s": n / seconds if seconds else None,
    }


def groups(rows: Sequence[Labelled]) -> list[list[int]]:
    """Places of the rows that answer the same prompt, extra fields included; in the order of the first."""
    found: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        found[repr(row.prompt)].append(i)
    return list(found.values())


def _seen(verdicts: Sequence[Verdict], rows: Sequence[Labelled]) -> list[Seen]:
    """Lengths in characters: no policy's tokenizer is at hand, and only their order counts."""
    return [
        Seen(group=g, verdict=verdicts[i], length=len(rows[i].text), truth=rows[i].label)
        for g, members in enumerate(groups(rows))
        for i in members
    ]
