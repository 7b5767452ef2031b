"""Can the judge still be trusted? A fold over what was judged: measures, and alarms in plain words. Pure.

Measures of `measure`, each below the judge's name. "By group" means that the answers to one prompt are not
counted as independent. Those with a limit have a second number `..._margin`, what chance may do to them
(stats.estimate); it is missing, and no alarm is possible, below LEAST values from GROUPS groups.

    judgements, abstain                    answers judged; share for which the judge was not competent
    failures, parse_fail, infra_fail       shares of the judgements without a score; parse_fail/STATUS
    score_mean, score_std, score_hist_0..9 shares of the scores in tenths of the scale
    saturation                             share of scores at exactly the fuller end of the scale
    saturation_end, .._unexplained         1 the upper, 0 the lower; the share minus that of the truth there
    noise                                  test–retest: std of a score if the same answer were judged again
    first_place                            pairwise: how often the first shown wins; 1/2 is fair
    swap_agreement                         pairs whose two orders name the same winner
    length_corr                            Spearman of score and length by group, mean over those with spread
    length_bias                            likewise, among equally right answers of a group
    truth_mean, agreement, auc             against ground truth: both say right or both wrong; ranking
    gap, gap_growth                        mean score − mean truth; minus that of the first look
    canary_drift, canary_noise             mean |score − first score| of fixed answers; of their second score
    canary_excess                          mean of how much further they are now than at the second
    latency_s_p50, latency_s_p95           seconds of a call
    tokens, prompt_tokens, attempts        sampled and read per judgement; attempts per call
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rl.config import Health
from rl.judges.alarms import Alarm, alarms
from rl.judges.stats import Estimate, auc, bin_of, estimate, quantile, spearman
from rl.types import Abstain, InfraFail, ParseFail, Score, Verdict

LEAST = 64  # values that an alarm needs
GROUPS = 8  # groups that they must come from; and canaries


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One judged answer."""

    group: int  # the same for the answers that were judged together, and for no others of a look
    verdict: Verdict
    length: int  # tokens of the answer
    truth: float | None = None  # 0 wrong, 1 right; None: not known

    @property
    def score(self) -> float | None:
        return self.verdict.outcome.value if isinstance(self.verdict.outcome, Score) else None


# ── Measures ──────────────────────────────────────────────────────────────────────────────────────


def measure(seen: Sequence[Seen], *, name: str = "judge", bounded: bool = True) -> dict[str, float]:
    """Everything that can be said of these answers; what cannot be said is left out.

    bounded: scores lie in [0, 1]. Otherwise (logits of a scalar judge) there is no histogram, saturation,
    agreement or gap. Raises ValueError for a score outside.
    """
    asked = [s for s in seen if not isinstance(s.verdict.outcome, Abstain)]
    out: dict[str, float] = {"judgements": len(asked)}
    if seen:
        out["abstain"] = 1 - len(asked) / len(seen)
    if asked:
        out |= _failures(asked) | _pairwise(asked) | _cost(asked)
    scored = [(s, s.score) for s in asked if s.score is not None]
    if scored:
        out |= _scores(scored, bounded) | _length(scored)
        out |= _truth([(s, x, s.truth) for s, x in scored if s.truth is not None], bounded)
    return {f"{name}/{key}": value for key, value in out.items()}


def _failures(asked: Sequence[Seen]) -> dict[str, float]:
    status = Counter(s.verdict.outcome.status for s in asked if isinstance(s.verdict.outcome, ParseFail))
    return {
        **_named("failures", _by_group(((s, float(s.score is None)) for s in asked), share=True)),
        "parse_fail": status.total() / len(asked),
        "infra_fail": fmean(isinstance(s.verdict.outcome, InfraFail) for s in asked),
        **{f"parse_fail/{word}": n / len(asked) for word, n in status.items()},
    }


def _scores(scored: Sequence[tuple[Seen, float]], bounded: bool) -> dict[str, float]:
    values = [x for _, x in scored]
    outside = next((x for x in values if not (0 <= x <= 1 if bounded else math.isfinite(x))), None)
    if outside is not None:
        raise ValueError(f"measure: expected scores in [0, 1], got {outside}; logits need bounded=False")
    mean, noise = fmean(values), [s.verdict.noise for s, _ in scored if s.verdict.noise is not None]
    out = {"score_mean": mean, "score_std": math.sqrt(fmean((x - mean) ** 2 for x in values))}
    if noise:
        out["noise"] = math.sqrt(fmean(noise))
    if not bounded:
        return out
    hist = Counter(bin_of(x, 10) for x in values)
    end = float(sum(x == 1 for x in values) >= sum(x == 0 for x in values))
    unexplained = ((s, float(x == end) - float(s.truth == end)) for s, x in scored)
    return {
        **out,
        **{f"score_hist_{i}": hist[i] / len(values) for i in range(10)},
        **_named("saturation", _by_group(((s, float(x == end)) for s, x in scored), share=True)),
        "saturation_end": end,
        **_named("saturation_unexplained", _by_group(unexplained)),  # where the truth is not at that end
    }


def _pairwise(asked: Sequence[Seen]) -> dict[str, float]:
    wins: dict[int, list[float]] = defaultdict(list)
    ahead: dict[tuple[int, int, int], list[float]] = defaultdict(list)  # (group, first, second) → its scores
    for s in asked:
        for call in s.verdict.calls:
            if len(call.about) == 2 and call.score is not None:
                wins[s.group].append(_win(call.score))
                ahead[(s.group, *call.about)].append(call.score)
    won = {pair: _win(fmean(scores)) for pair, scores in ahead.items()}
    same = [won[g, i, j] == 1 - won[g, j, i] for g, i, j in won if i < j and (g, j, i) in won]
    out = _named("first_place", estimate(wins.values(), values=LEAST, least=GROUPS, share=True))
    return out | {"swap_agreement": fmean(same)} if same else out


def _win(score: float) -> float:
    return 0.5 if score == 0.5 else float(score > 0.5)


def _length(scored: Sequence[tuple[Seen, float]]) -> dict[str, float]:
    out = {}
    for key, alike in (("length_corr", lambda s: s.group), ("length_bias", lambda s: (s.group, s.truth))):
        parts: dict[Any, list[tuple[int, float, int]]] = defaultdict(list)
        for s, x in scored:
            parts[alike(s)].append((s.length, x, s.group))
        groups: dict[int, list[float]] = defaultdict(list)
        for part in parts.values():
            corr = spearman([length for length, _, _ in part], [x for _, x, _ in part])
            if corr is not None:
                groups[part[0][2]] += [corr] * len(part)  # counts by its answers
        out |= _named(key, estimate(groups.values(), values=LEAST, least=GROUPS))
    return out


def _truth(known: Sequence[tuple[Seen, float, float]], bounded: bool) -> dict[str, float]:
    if not known:
        return {}
    right = [t >= 0.5 for _, _, t in known]
    area = auc([x for _, x, _ in known], right)
    out = {"truth_mean": fmean(t for _, _, t in known)} | ({} if area is None else {"auc": area})
    if bounded:
        out["agreement"] = fmean((x >= 0.5) == yes for (_, x, _), yes in zip(known, right, strict=True))
        out |= _named("gap", _by_group((s, x - t) for s, x, t in known))
    return out


def _cost(asked: Sequence[Seen]) -> dict[str, float]:
    calls = [call for s in asked for call in s.verdict.calls]
    if not calls:
        return {}
    seconds = [call.seconds for call in calls]
    return {
        "latency_s_p50": quantile(seconds, 0.5),
        "latency_s_p95": quantile(seconds, 0.95),
        "tokens": sum(call.n_tokens for call in calls) / len(asked),
        "prompt_tokens": sum(call.n_prompt for call in calls) / len(asked),
        "attempts": fmean(call.attempts for call in calls),
    }


def _by_group(values: Iterable[tuple[Seen, float]], *, share: bool = False) -> Estimate | None:
    groups: dict[int, list[float]] = defaultdict(list)
    for s, x in values:
        groups[s.group].append(x)
    return estimate(groups.values(), values=LEAST, least=GROUPS, share=share)


def _named(key: str, found: Estimate | None) -> dict[str, float]:
    if found is None:
        return {}
    return {key: found.mean} | ({} if found.margin is None else {f"{key}_margin": found.margin})


# ── Over a run ────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Watch:
    """One judge over one run: what was judged since the last look, and the baselines.

    A look with too little for an alarm (LEAST, GROUPS) leaves its answers to the next one as well. The
    baseline of the gap is the first look that has enough.
    """

    cfg: Health
    name: str = "judge"
    bounded: bool = True
    first: dict[str, float] = field(default_factory=dict)
    canary_first: dict[str, float] = field(default_factory=dict)
    canary_moves: dict[str, float] = field(default_factory=dict)  # |second score − first|: the judge's noise
    _seen: list[Seen] = field(default_factory=list)
    _canaries: dict[str, float] = field(default_factory=dict)  # measures of their last judgement

    def saw(self, seen: Iterable[Seen]) -> None:
        self._seen += seen

    def canaries(self, scores: Mapping[str, float | None]) -> None:
        """Judged again: canary → score, None where there was none. The first two times, best right at the
        start, are the baseline: scores and noise. Drift is what exceeds that noise."""
        now = {which: x for which, x in scores.items() if x is not None}
        first, noise = self.canary_first, self.canary_moves
        moves = {which: abs(x - first[which]) for which, x in now.items() if which in first}
        both = [which for which in moves if which in noise]
        found = {} if not moves else {"canary_drift": fmean(moves.values())}
        if both:
            found["canary_noise"] = fmean(noise[which] for which in both)
            excess = estimate([[moves[which] - noise[which]] for which in both], values=GROUPS, least=GROUPS)
            found |= _named("canary_excess", excess)
        self._canaries = {f"{self.name}/{key}": value for key, value in found.items()}
        self.canary_moves, self.canary_first = moves | noise, now | first

    def look(self) -> tuple[dict[str, float], list[Alarm]]:
        """Measures and alarms of what was judged since the last look, for the log."""
        now = measure(self._seen, name=self.name, bounded=self.bounded) | self._canaries
        enough = now[f"{self.name}/judgements"] >= LEAST and len({s.group for s in self._seen}) >= GROUPS
        if enough:
            self.first = self.first or dict(now)
            self._seen = []
        gap = f"{self.name}/gap"
        if gap in now and gap in self.first:
            now[f"{gap}_growth"] = now[gap] - self.first[gap]
        return now, alarms(now, self.first, self.cfg, name=self.name)

    def to_dict(self) -> dict[str, Any]:
        """The baselines, for a checkpoint; what was judged since the last look is not kept."""
        baselines = {"canary_first": dict(self.canary_first), "canary_moves": dict(self.canary_moves)}
        return {"first": dict(self.first), **baselines}

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], cfg: Health, *, name: str = "judge", bounded: bool = True
    ) -> Watch:
        return cls(
            cfg, name, bounded, dict(data["first"]), dict(data["canary_first"]), dict(data["canary_moves"])
        )
