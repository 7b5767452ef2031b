"""The life of every prompt: a pure fold over an append-only log of events.

    issue → dispatch → generate → score, teach → ready → train, or drop at any point

Every issue of an ordinal ends in `train` or `drop`, so at all times `issued = trained + dropped + live`. A
dropped
ordinal is issued again (with the next attempt) or closed, as the drop says; a closed or trained one never
returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Reason = Literal["stale", "zero_signal", "infra", "judge", "teacher", "invalid", "length"]
Kind = Literal["issue", "dispatch", "generate", "score", "teach", "ready", "train", "drop"]
Ranges = tuple[tuple[int, int], ...]  # disjoint, ascending, half open

# From which states an event may come. A live group's state is the kind of its last event.
_BEFORE: Mapping[str, tuple[str, ...]] = {
    "dispatch": ("issue",),
    "generate": ("dispatch",),
    "score": ("generate", "teach"),
    "teach": ("generate", "score"),
    "ready": ("generate", "score", "teach"),
    "train": ("ready",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    kind: Kind
    ordinal: int
    at: float  # seconds on the run's clock
    version: int = 0  # the trainer's
    reason: Reason | None = None  # of a drop
    again: bool = False  # a drop after which the ordinal is issued once more


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    attempt: int
    state: str
    version: int  # at issue
    times: Mapping[str, float]  # kind → when


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    issued: int = 0
    trained: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason → count
    live: Mapping[int, Live] = field(default_factory=dict)  # ordinal → where it is
    again: Mapping[int, int] = field(
        default_factory=dict
    )  # ordinal waiting to be re-issued → its next attempt
    next_ordinal: int = 0
    done: Ranges = ()  # ordinals trained or closed
    seconds: Mapping[str, float] = field(default_factory=dict)  # stage → summed over trained groups

    @property
    def balanced(self) -> bool:
        return self.issued == self.trained + sum(self.dropped.values()) + len(self.live)

    def upcoming(self) -> tuple[int, int]:
        """(ordinal, attempt) of the next issue: the oldest one that came back, else a new one."""
        if self.again:
            ordinal = min(self.again)
            return ordinal, self.again[ordinal]
        return self.next_ordinal, 0


def apply(ledger: Ledger, event: Event) -> Ledger:
    """The ledger after one event. Raises ValueError for an event that cannot follow (a bug, never data)."""
    if event.kind == "issue":
        return _issue(ledger, event)
    if event.ordinal not in ledger.live:
        raise ValueError(f"ledger: {event.kind} of ordinal {event.ordinal}, which is not live")
    if event.kind == "drop":
        return _drop(ledger, event)
    live = ledger.live[event.ordinal]
    if live.state not in _BEFORE[event.kind]:
        raise ValueError(f"ledger: {event.kind} of ordinal {event.ordinal} in state {live.state}")
    if event.kind == "train":
        return _train(ledger, event)
    moved = replace(live, state=event.kind, times={**live.times, event.kind: event.at})
    return replace(ledger, live={**ledger.live, event.ordinal: moved})


def fold(events: Iterable[Event], ledger: Ledger | None = None) -> Ledger:
    ledger = ledger or Ledger()
    for event in events:
        ledger = apply(ledger, event)
    return ledger


def _issue(ledger: Ledger, event: Event) -> Ledger:
    expected, attempt = ledger.upcoming()
    if event.ordinal != expected:
        raise ValueError(f"ledger: issue of ordinal {event.ordinal}, expected {expected}")
    live = Live(attempt=attempt, state="issue", version=event.version, times={"issue": event.at})
    return replace(
        ledger,
        issued=ledger.issued + 1,
        live={**ledger.live, event.ordinal: live},
        again={o: a for o, a in ledger.again.items() if o != event.ordinal},
        next_ordinal=max(ledger.next_ordinal, event.ordinal + 1),
    )


def _without(live: Mapping[int, Live], ordinal: int) -> dict[int, Live]:
    return {o: entry for o, entry in live.items() if o != ordinal}


def _drop(ledger: Ledger, event: Event) -> Ledger:
    reason = str(event.reason)
    attempt = ledger.live[event.ordinal].attempt
    return replace(
        ledger,
        dropped={**ledger.dropped, reason: ledger.dropped.get(reason, 0) + 1},
        live=_without(ledger.live, event.ordinal),
        again={**ledger.again, event.ordinal: attempt + 1} if event.again else ledger.again,
        done=ledger.done if event.again else insert(ledger.done, event.ordinal),
    )


def _train(ledger: Ledger, event: Event) -> Ledger:
    times = {**ledger.live[event.ordinal].times, "train": event.at}
    spent = {
        "generate": times["generate"] - times["issue"],
        "judge": times["score"] - times["generate"] if "score" in times else 0.0,
        "teach": times["teach"] - times["generate"] if "teach" in times else 0.0,
        "train_queue": times["train"] - times["ready"],
    }
    return replace(
        ledger,
        trained=ledger.trained + 1,
        live=_without(ledger.live, event.ordinal),
        done=insert(ledger.done, event.ordinal),
        seconds={stage: ledger.seconds.get(stage, 0.0) + s for stage, s in spent.items()},
    )


def insert(ranges: Ranges, ordinal: int) -> Ranges:
    """The ranges with one more ordinal. Raises ValueError if it is there: it would be trained twice."""
    out: list[tuple[int, int]] = []
    new = (ordinal, ordinal + 1)
    for lo, hi in ranges:
        if lo <= ordinal < hi:
            raise ValueError(f"ledger: ordinal {ordinal} is already done")
        if hi == new[0] or lo == new[1]:
            new = (min(lo, new[0]), max(hi, new[1]))
        else:
            out.append((lo, hi))
    return tuple(sorted([*out, new]))


def to_json(ledger: Ledger) -> dict[str, Any]:
    return asdict(ledger)


def from_json(data: Mapping[str, Any]) -> Ledger:
    """The inverse of to_json, also after a trip through JSON, which turns integer keys into text."""
    return Ledger(
        **{
            **data,
            "live": {int(o): Live(**entry) for o, entry in data["live"].items()},
            "again": {int(o): int(a) for o, a in data["again"].items()},
            "done": tuple((int(lo), int(hi)) for lo, hi in data["done"]),
        }
    )
