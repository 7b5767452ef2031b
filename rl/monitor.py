"""What is going on, in numbers: everything between the loop and the log. It observes and decides nothing."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rl.engines.base import EngineStats
from rl.follow import Group
from rl.functions import union
from rl.ledger import Ledger
from rl.lessons import advantages
from rl.rewards import Rule, kinds
from rl.roles import Pool
from rl.types import InfraFail, ParseFail, Score, Verdict

POLL_S = 1.0  # seconds between looks at the engines
RATE_S = 5.0  # seconds over which the throughput is averaged


@dataclass(slots=True)
class Monitor:
    """Counters of one run. Times are seconds; shares lie in [0, 1]."""

    engines: Mapping[str, Pool]
    rule: Rule  # the ground truth, which no judge sees
    began: float = field(default_factory=time.monotonic)
    last_step: float = field(default_factory=time.monotonic)
    trainer_busy: float = 0.0
    starved: float = 0.0  # the trainer had no batch
    tokens: deque[tuple[float, int]] = field(
        default_factory=deque
    )  # (when, sampled by policy and judge), recent
    outcomes: Counter[str] = field(default_factory=Counter)  # of the judge, since the last step
    all_outcomes: Counter[str] = field(default_factory=Counter)
    last_failure: str = ""  # of a judge or rule, in its own words
    dropped_lengths: list[int] = field(default_factory=list)
    trained_lengths: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=dict)  # engine → share of the last interval
    busy_total: dict[str, float] = field(default_factory=dict)  # engine → seconds since `poll` began
    polled_s: float = 0.0
    total_tokens: int = 0

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
        before: dict[str, list[EngineStats]] = {}
        while True:
            asked = (pool.all("stats", deadline=deadline) for pool in self.engines.values())
            now = dict(zip(self.engines, await asyncio.gather(*asked), strict=True))
            for name, stats in now.items() if before else ():
                pairs = list(zip(before[name], stats, strict=True))
                busy, wall = (
                    fmean(b.busy_s - a.busy_s for a, b in pairs),
                    fmean(b.wall_s - a.wall_s for a, b in pairs),
                )
                self.busy[name] = min(1.0, busy / wall) if wall else 0.0
                self.busy_total[name] = self.busy_total.get(name, 0.0) + busy
            self.polled_s += POLL_S if before else 0.0
            before = now
            await asyncio.sleep(POLL_S)

    def saw(self, group: Group) -> None:
        """A group with all its outcomes, trained later or not."""
        n = sum(m.n_tokens for m in group.metas) + sum(v.n_tokens for v in group.verdicts)
        self.tokens.append((time.monotonic(), n))
        self.total_tokens += n
        for outcome in (o for by_producer in group.outcomes for o in by_producer.values()):
            if isinstance(outcome, InfraFail | ParseFail):
                self.last_failure = outcome.why if isinstance(outcome, InfraFail) else repr(outcome.text)
        counted = kinds(v.outcome for v in group.verdicts)
        self.outcomes += counted
        self.all_outcomes += counted

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
        truth = [
            o.value for g in groups for m in g.metas if isinstance(o := self.rule(g.prompt, m.text), Score)
        ]
        ages = [version - m.version_min for m in metas]
        self.ages += ages
        self.trained_lengths += [sum(m.n_tokens for m in g.metas) for g in groups]
        values = dict(trained)
        if scored:
            values |= {"reward/mean": fmean(scored), "reward/missing": 1 - len(scored) / len(rewards)}
            _, signal = advantages([g.rated for g in groups], loss)
            values["groups/signal"] = fmean(signal)
        if truth:
            values["truth/accuracy"] = fmean(truth)
        values |= {
            "age/mean": fmean(ages),
            "age/max": max(ages),
            "length/mean": fmean(m.n_tokens for m in metas),
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
            **self._judge(),
            **_told([told for g in groups for told in g.told]),
        }
        self.outcomes = Counter()
        return values

    def _rate(self, now: float) -> float:
        while self.tokens and self.tokens[0][0] < now - RATE_S:
            self.tokens.popleft()
        return sum(n for _, n in self.tokens) / min(RATE_S, max(1e-9, now - self.began))

    def _judge(self) -> dict[str, float]:
        total = self.outcomes.total()
        if not total:
            return {}
        failed = sum(n for kind, n in self.outcomes.items() if kind.startswith("parse_fail"))
        return {
            "judge/parse_fail": failed / total,
            "judge/infra_fail": self.outcomes["infra_fail"] / total,
            **{f"judge/{kind}_count": n for kind, n in self.outcomes.items()},
        }

    def examples(self, groups: Sequence[Group], version: int) -> list[dict[str, Any]]:
        """The first answer of the step's first group, with what was said of it, for a person to read."""
        group = groups[0]
        verdict: Verdict | None = group.verdicts[0] if group.verdicts else None
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
                "judge": verdict.text if verdict else None,
                "judge_failure": verdict.outcome.why
                if verdict and isinstance(verdict.outcome, InfraFail)
                else None,
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
            "stage_s": {stage: s / max(1, ledger.trained) for stage, s in ledger.seconds.items()},
            "age_mean": fmean(self.ages) if self.ages else 0.0,
            "age_max": max(self.ages, default=0),
            "issued": ledger.issued,
            "trained": ledger.trained,
            "dropped": dict(ledger.dropped),
            "judge_outcomes": dict(self.all_outcomes),
            "stale_length_ratio": fmean(self.dropped_lengths) / fmean(self.trained_lengths)
            if self.dropped_lengths and self.trained_lengths
            else None,
        }


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
