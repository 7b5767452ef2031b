"""Who gives rewards: judge, scalar judge, rule and users' functions behind one call, with one result."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rl.config import Config
from rl.judges.desk import Judging
from rl.roles import Pool
from rl.types import Prompt, Verdict


class Producer(Protocol):
    async def rate(self, prompt: Prompt, texts: Sequence[str], seeds: Sequence[int]) -> list[Verdict]:
        """One verdict per answer of a group. What fails is an outcome of its own answer, never an exception
        and never a number; raises RoleError only where nobody is left who could answer."""
        ...


@dataclass(slots=True)
class Limiter:
    """At most `rate` calls a minute, evenly spaced; 0: no limit."""

    rate: float
    _next: float = 0.0

    async def wait(self, calls: int) -> None:
        if self.rate:
            now = asyncio.get_running_loop().time()
            begin = max(now, self._next)
            self._next = begin + calls * 60.0 / self.rate
            await asyncio.sleep(begin - now)


@dataclass(slots=True)
class Pooled:
    """A rule or a function: actors that rate texts without a model."""

    pool: Pool
    deadline: float  # seconds for a group, its place in the queue included
    limiter: Limiter = field(default_factory=lambda: Limiter(0.0))

    async def rate(self, prompt: Prompt, texts: Sequence[str], seeds: Sequence[int]) -> list[Verdict]:
        await self.limiter.wait(len(texts))
        return await self.pool.call("rate", prompt, texts, deadline=self.deadline)


def make_producers(
    cfg: Config, judges: Mapping[str, Pool], raters: Mapping[str, Pool]
) -> dict[str, Producer]:  # fmt: skip
    """Everyone who gives rewards, by name."""
    limiter, wait = Limiter(cfg.reward.rate), cfg.deadlines.judge
    made: dict[str, Producer] = {}
    for name, pool in judges.items():
        made[name] = Judging(pool, cfg.scalar if name == "scalar" else cfg.judge, cfg.dispatch, deadline=wait)
    for name, pool in raters.items():
        is_rule = name == "rule"
        made[name] = Pooled(pool, wait) if is_rule else Pooled(pool, _longest_queue(cfg), limiter)
    return made


def _longest_queue(cfg: Config) -> float:
    """Seconds until a function must have answered, if every call before ours takes all its time."""
    calls = (cfg.staleness.max_age + 1) * cfg.trainer.prompts * cfg.sampler.samples
    return cfg.deadlines.judge + cfg.reward.fn_deadline * calls / cfg.reward.fn_workers
