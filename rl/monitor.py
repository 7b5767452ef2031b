"""What is going on, in numbers: everything between the loop and the log. It observes and decides nothing."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean
from typing import Any

from rl import teaching
from rl.engines.base import EngineStats
from rl.follow import Broken, Group
from rl.judges.health import Seen, Watch
from rl.ledger import Ledger
from rl.lessons import advantages
from rl.pool import SIMPLE, Pool
from rl.replica import RoleError
from rl.rewards.combine import kinds
from rl.rewards.functions import union
from rl.roles import Roles
from rl.types import InfraFail, ParseFail, Verdict

POLL_S = 1.0  # seconds between looks at the engines
RATE_S = 5.0  # seconds over which the throughput is averaged


@dataclass(slots=True)
class Monitor:
    """Counters of one run. Times are seconds; shares lie in [0, 1]."""

    roles: Roles
    watches: Mapping[str, Watch] = field(default_factory=dict)  # judge → its health
    began: float = field(default_factory=time.monotonic)
    last_step: float = field(default_factory=time.monotonic)
    trainer_busy: float = 0.0
    starved: float = 0.0  # the trainer had no batch
    tokens: deque[tuple[float, int]] = field(
        default_factory=deque
    )  # (when, sampled by policy and judge), recent
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)  # of each judge, since the last step
    all_outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    groups: int = 0  # seen so far
    aside: dict[str, float] = field(default_factory=dict)  # metrics that go with the next step's
    alarms: dict[str, str] = field(default_factory=dict)  # that stand: name → message
    raised: dict[str, int] = field(default_factory=dict)  # alarm → how often it was found
    last_failure: str = ""  # of a judge or rule, in its own words
    dropped_lengths: list[int] = field(default_factory=list)
    trained_lengths: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=dict)  # engine → share of the last interval
    busy_total: dict[str, float] = field(default_factory=dict)  # engine → seconds since `poll` began
    polled_s: float = 0.0
    total_tokens: int = 0
    publish_ms: list[float] = field(default_factory=list)
    deliver_ms: list[float] = field(default_factory=list)

    @contextmanager
    def training(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.trainer_busy += time.monotonic() - began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.starved += time.monotonic() - began

    def begin(self) -> None:
        """The clock of the loop proper, after the actors are up."""
        self.began = self.last_step = time.monotonic()
        self.trainer_busy = self.starved = 0.0

    async def poll(self, deadline: float) -> None:
        """Ask every engine once a second how busy it was; runs until it is cancelled."""
        engines = self.roles.engines()
        before: dict[str, list[EngineStats | None]] = {}
        while True:
            now = dict(
                zip(
                    engines,
                    await asyncio.gather(*(_stats(pool, deadline) for pool in engines.values())),
                    strict=True,
                )
            )
            for name, stats in now.items() if before else ():
                pairs = [(a, b) for a, b in zip(before[name], stats, strict=True) if a and b]
                wall = sum(b.wall_s - a.wall_s for a, b in pairs)
                share = sum(b.busy_s - a.busy_s for a, b in pairs) / wall if wall > 0 else 0.0
                self.busy[name] = min(1.0, max(0.0, share))
                self.busy_total[name] = self.busy_total.get(name, 0.0) + self.busy[name] * POLL_S
            self.polled_s += POLL_S if before else 0.0
            before = now
            await asyncio.sleep(POLL_S)

    def saw(self, group: Group) -> None:
        """A group with all its outcomes, trained later or not."""
        said = [v for of in group.verdicts for v in of.values()]
        n = sum(m.n_tokens for m in group.metas) + sum(call.n_tokens for v in said for call in v.calls)
        self.tokens.append((time.monotonic(), n))
        self.total_tokens += n
        for outcome in (v.outcome for v in said):
            if isinstance(outcome, InfraFail | ParseFail):
                self.last_failure = outcome.why if isinstance(outcome, InfraFail) else repr(outcome.text)
        for name, watch in self.watches.items():
            verdicts = [of[name] for of in group.verdicts]
            watch.saw(
                Seen(group=self.groups, verdict=v, length=m.n_tokens, truth=t)
                for v, m, t in zip(verdicts, group.metas, group.truth, strict=True)
            )
            counted = kinds(v.outcome for v in verdicts)
            self.outcomes[name] = self.outcomes.get(name, Counter()) + counted
            self.all_outcomes[name] = self.all_outcomes.get(name, Counter()) + counted
        self.groups += 1

    def look(self, canaries: Mapping[str, Mapping[str, float | None]]) -> list[str]:
        """Look at every judge's health; canaries: judge → canary → score. Returns alarms that are new."""
        standing = {}
        for name, watch in self.watches.items():
            watch.canaries(canaries.get(name, {}))
            values, alarms = watch.look()
            self.aside |= values
            standing |= {f"{name}/{alarm.name}": alarm.message for alarm in alarms}
        self.aside |= {f"alarm/{which}": 1.0 for which in standing}
        for which in standing:
            self.raised[which] = self.raised.get(which, 0) + 1
        new = [message for which, message in standing.items() if which not in self.alarms]
        self.alarms = standing
        return new

    def dropped(self, group: Group | None) -> None:
        """A ready group that became too old."""
        if group is not None:
            self.dropped_lengths.append(sum(m.n_tokens for m in group.metas))

    def step(
        self,
        groups: Sequence[Group],
        trained: Mapping[str, float],
        version: int,
        ledger: Ledger,
        n_ready: int,
        loss: Any,
    ) -> dict[str, float]:
        """The metrics of one optimiser step on these groups; `version` is the one that it started from."""
        now = time.monotonic()
        wall, self.last_step = now - self.last_step, now
        metas = [m for g in groups for m in g.metas]
        rewards = [r for g in groups for r in g.rewards]
        scored = [r for r in rewards if r is not None]
        truth = [t for g in groups for t in g.truth if t is not None]
        ages = [version - m.version_min for m in metas]
        self.ages += ages
        self.trained_lengths += [sum(m.n_tokens for m in g.metas) for g in groups]
        if "sync/total_ms" in self.aside:
            self.publish_ms.append(self.aside["sync/publish_ms"])
            self.deliver_ms.append(self.aside["sync/total_ms"])
        values = {**self.aside, **trained}
        self.aside = {}
        if scored:
            values |= {"reward/mean": fmean(scored), "reward/missing": 1 - len(scored) / len(rewards)}
            _, signal = advantages([g.rated for g in groups], loss)
            values["groups/signal"] = fmean(signal)
        if truth:
            values["truth/accuracy"] = fmean(truth)
        values |= {
            "age/mean": fmean(ages),
            "age/max": max(ages),
            **_lengths([m.n_tokens for m in metas]),
            "samples/broken": sum(isinstance(m, Broken) for m in metas),
            "length/truncated": fmean(m.finish == "length" for m in metas),
            "groups/ready": n_ready,
            "groups/live": len(ledger.live),
            "groups/issued": ledger.issued,
            "groups/trained": ledger.trained,
            **{f"dropped/{reason}": n for reason, n in ledger.dropped.items()},
            "throughput/tokens_per_s": self._rate(now),
            "throughput/step_s": wall,
            **{f"idle/{name}": 1 - share for name, share in self.busy.items()},
            "idle/trainer": max(0.0, 1 - self.trainer_busy / (now - self.began)),
            **self._judges(),
            **self._desks(),
            **teaching.metrics([g.teachers for g in groups]),
            **_told([_beside(of) for g in groups for of in g.verdicts]),
        }
        self.outcomes = {}
        return values

    def _rate(self, now: float) -> float:
        while self.tokens and self.tokens[0][0] < now - RATE_S:
            self.tokens.popleft()
        return sum(n for _, n in self.tokens) / min(RATE_S, max(1e-9, now - self.began))

    def _desks(self) -> dict[str, float]:
        """Of each judge: queue, questions under way and per second, replicas that are up, lost answers."""
        desks = {name: getattr(p, "desk", None) for name, p in self.roles.producers.items()}
        told = {name: desk.metrics() for name, desk in desks.items() if desk is not None}
        return {f"{name}/{key}": value for name, values in told.items() for key, value in values.items()}

    def _judges(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, counted in self.outcomes.items():
            total = counted.total()
            failed = sum(n for kind, n in counted.items() if kind.startswith("parse_fail"))
            values |= {
                f"{name}/parse_fail": failed / total,
                f"{name}/infra_fail": counted["infra_fail"] / total,
            }
            values |= {f"{name}/{kind}_count": n for kind, n in counted.items()}
        return values

    def examples(self, groups: Sequence[Group], version: int) -> list[dict[str, Any]]:
        """The first answer of the step's first group, with what was said of it, for a person to read."""
        group = groups[0]
        verdicts = group.verdicts[0]
        return [
            {
                "step": version,
                "ordinal": group.ordinal,
                "key": group.prompt.key,
                "prompt": group.prompt.text,
                "answer": group.metas[0].text,
                "reference": group.prompt.answer,
                "finish": group.metas[0].finish,
                "reward": group.rewards[0],
                **{name: _shown(verdict) for name, verdict in verdicts.items()},
            }
        ]

    def totals(self, ledger: Ledger) -> dict[str, Any]:
        """For the summary: shares of time, staleness, what was dropped."""
        wall = max(1e-9, self.last_step - self.began)
        idle = {n: max(0.0, 1 - s / max(self.polled_s, 1e-9)) for n, s in self.busy_total.items()}
        return {
            "wall_s": wall,
            "tokens_per_s": self.total_tokens / wall,
            "idle": {**idle, "trainer": max(0.0, 1 - self.trainer_busy / wall)},
            "trainer_waited_s": self.starved,
            "replicas": {name: len(pool.handles) for name, pool in self.roles.engines().items()},
            "sync_s": {
                "publish": sum(self.publish_ms) / 1e3 / max(1, len(self.publish_ms)),
                "deliver": sum(self.deliver_ms) / 1e3 / max(1, len(self.deliver_ms)),
            },
            "stage_s": {stage: s / max(1, ledger.trained) for stage, s in ledger.seconds.items()},
            "age_mean": fmean(self.ages) if self.ages else 0.0,
            "age_max": max(self.ages, default=0),
            "issued": ledger.issued,
            "trained": ledger.trained,
            "dropped": dict(ledger.dropped),
            "judge_outcomes": {name: dict(counted) for name, counted in self.all_outcomes.items()},
            "alarms": dict(self.raised),
            "stale_length_ratio": fmean(self.dropped_lengths) / fmean(self.trained_lengths)
            if self.dropped_lengths and self.trained_lengths
            else None,
        }


def _lengths(lengths: Sequence[int]) -> dict[str, float]:
    """Tokens of a step's answers: their mean and quantiles, as the longest are what others wait for."""
    ordered, shares = sorted(lengths), {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    at = {name: ordered[ceil(share * len(ordered)) - 1] for name, share in shares.items()}
    return {"length/mean": fmean(lengths), **{f"length/{name}": n for name, n in at.items()}}


async def _stats(pool: Pool, deadline: float) -> list[EngineStats | None]:
    """None for a replica that does not answer, where the pool can do without it."""
    if pool.cfg is SIMPLE:
        return await pool.all("stats", deadline=deadline)
    return [None if isinstance(s, RoleError) else s for s in await pool.each("stats", deadline=deadline)]


def _told(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means of the numbers that users' functions told beside their scores, and how many samples lack one."""
    values: dict[str, float] = {}
    for name, column in union(rows).items():
        numbers = [float(x) for x in column if isinstance(x, int | float)]
        if numbers:
            values[f"reward/{name}"] = fmean(numbers)
            if len(numbers) < len(column):
                values[f"reward/{name}_missing"] = 1 - len(numbers) / len(column)
    return values


def _beside(verdicts: Mapping[str, Verdict]) -> dict[str, Any]:
    return {f"{name}/{key}": value for name, v in verdicts.items() for key, value in v.told.items()}


def _shown(verdict: Verdict) -> dict[str, Any]:
    """For a person: the outcome, and what the judge wrote."""
    texts = [call.text for call in verdict.calls]
    return {"outcome": repr(verdict.outcome), **({"texts": texts} if texts else {})}
