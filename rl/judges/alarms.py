"""When a judge cannot be trusted any more: measures (rl/judges/health.py) against limits, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rl.config import Health


@dataclass(frozen=True, slots=True)
class Alarm:
    name: str  # drift, saturation, position, length, gap, failures
    message: str


def alarms(
    now: Mapping[str, float], first: Mapping[str, float], cfg: Health, *, name: str = "judge"
) -> list[Alarm]:
    """What is beyond its limit by more than chance explains: by its margin, about 99 % one-sided.

    now, first: measures of this look, and of the one that the gap is compared with.
    """
    n = {key.removeprefix(f"{name}/"): value for key, value in now.items() if key.startswith(f"{name}/")}
    was = {key.removeprefix(f"{name}/"): value for key, value in first.items()}
    found = [_failing(n, cfg), _drift(n, cfg), _saturated(n, cfg), _position(n, cfg), _long(n, cfg)]
    said = [*found, _hacked(n, was, cfg)]
    return [Alarm(alarm.name, f"{name}: {alarm.message}") for alarm in said if alarm is not None]


def _beyond(n: Mapping[str, float], key: str, size: float, limit: float) -> bool:
    margin = n.get(f"{key}_margin")
    return margin is not None and size - margin > limit


def _failing(n: Mapping[str, float], cfg: Health) -> Alarm | None:
    if not _beyond(n, "failures", n.get("failures", 0.0), cfg.failures):
        return None
    kinds = {k.removeprefix("parse_fail/"): v for k, v in n.items() if k.startswith("parse_fail/")}
    kinds["no answer"] = n["infra_fail"]
    listed = ", ".join(f"{word} {v:.0%}" for word, v in sorted(kinds.items(), key=lambda kv: -kv[1]) if v)
    return Alarm("failures", f"{n['failures']:.0%} of {n['judgements']:.0f} judgements gave no score "
                 f"({listed}). Read its texts: does it keep the declared format and bounds, are its tokens "
                 "enough, does it answer in time?")  # fmt: skip


def _drift(n: Mapping[str, float], cfg: Health) -> Alarm | None:
    if not _beyond(n, "canary_excess", n.get("canary_excess", 0.0), cfg.drift):
        return None
    return Alarm("drift", f"the same fixed answers are scored {n['canary_drift']:.2f} away from their first "
                 f"scores, of which {n['canary_noise']:.2f} is its noise. Has the judge's model, server, "
                 "template or sampling changed?")  # fmt: skip


def _saturated(n: Mapping[str, float], cfg: Health) -> Alarm | None:
    if not _beyond(n, "saturation", n.get("saturation", 0.0), cfg.saturation):
        return None
    if "truth_mean" in n:
        if not _beyond(n, "saturation_unexplained", n["saturation_unexplained"], 1 - cfg.saturation):
            return None
        beside = f"while {n['truth_mean']:.0%} of the answers are right"
    else:
        beside = "and there is no ground truth to explain it"
    end = "highest" if n["saturation_end"] else "lowest"
    return Alarm("saturation", f"{n['saturation']:.0%} of its scores are exactly the {end} of its scale, "
                 f"{beside}. Such scores rank nothing: read what it says of wrong answers, or use a finer "
                 "scale or harder prompts.")  # fmt: skip


def _position(n: Mapping[str, float], cfg: Health) -> Alarm | None:
    share = n.get("first_place", 0.5)
    if not _beyond(n, "first_place", abs(share - 0.5), cfg.position):
        return None
    swaps = f"; the two orders agree on {n['swap_agreement']:.0%} of pairs" if "swap_agreement" in n else ""
    place = "first" if share > 0.5 else "second"
    return Alarm("position", f"the answer shown first wins {share:.0%} of comparisons (fair: 50%){swaps}. It "
                 f"prefers the {place} place: show both orders (judge.orders both), or change the "
                 "template.")  # fmt: skip


def _long(n: Mapping[str, float], cfg: Health) -> Alarm | None:
    bias = n.get("length_bias", 0.0)
    if not _beyond(n, "length_bias", abs(bias), cfg.length):
        return None
    alike = "equally right answers" if "truth_mean" in n else "answers to one prompt"
    return Alarm("length", f"among {alike} it prefers the {'longer' if bias > 0 else 'shorter'} (rank "
                 f"correlation of score and length {bias:+.2f}). Look at length/mean: the policy will "
                 "follow. Tell the judge to ignore length.")  # fmt: skip


def _hacked(n: Mapping[str, float], was: Mapping[str, float], cfg: Health) -> Alarm | None:
    if "gap_margin" not in n or "gap_margin" not in was:
        return None
    growth = n["gap"] - was["gap"]
    if growth - math.hypot(n["gap_margin"], was["gap_margin"]) <= cfg.gap:
        return None
    moves = "; ".join(
        f"{what} {was[key]:.2f} → {n[key]:.2f}"
        for what, key in (("its score", "score_mean"), ("ground truth", "truth_mean"))
    )
    return Alarm("gap", f"score minus ground truth grew by {growth:.2f} since the first look ({moves}). The "
                 "policy may be learning to please the judge: read high-scored wrong answers.")  # fmt: skip
