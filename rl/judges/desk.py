"""Questions to judges: a group's go to one replica together, and those that fail go to another one.

A judge's replica has `answer(asks, seconds) -> list[Reply]` (rl/actors/judge.py), a scalar one
`answer(asks)` (rl/actors/scalar.py). A failure reads "kind: why". Kinds, and what follows:

    question   the judge refuses this question (too long, unreadable): nothing is wrong with the replica
    rate       asked too fast: the replica is left alone for a while; neither a failure nor an attempt
    timeout, connection, server, response, address, key, engine, replica
               where a whole call fails so, it counts against the replica, whose circuit opens after a few
    queue      no replica was free before the deadline
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rl.config import Dispatch, Scalar
from rl.config import Judge as JudgeConfig
from rl.judges.questions import questions, scalar_questions
from rl.judges.verdicts import scalar_verdicts, verdicts
from rl.pool import TICK, Pool, Seat
from rl.replica import PoolDown, Replica, RoleError
from rl.types import Ask, Prompt, Reply, Verdict

OWN = 0.9  # share of an attempt's seconds that the replica may use; the rest is for the way back
BACK_OFF = 1.0  # seconds, of a server that is asked too fast and does not say how long to wait
HARMLESS = ("question", "rate")  # kinds of failure that say nothing against a replica
AGAINST = ("timeout", "connection", "server", "response", "address", "key", "engine", "replica")


def kind(reply: Reply) -> str:
    """Of its failure; empty if there is none."""
    told = reply.failure.partition(":")[0]
    if not told or told in (*HARMLESS, *AGAINST, "queue"):
        return told
    return "replica" if reply.again else "question"


@dataclass(slots=True)
class Desk:
    """A pool of judges' replicas, and the counters of what was asked."""

    pool: Pool
    cfg: Dispatch
    timed: bool = True  # the replica's `answer` takes seconds, and gives up single questions by itself
    asked: int = 0  # questions that are settled, answered or not
    attempts: int = 0  # of these questions
    seconds: float = 0.0  # summed over these questions, queue and further attempts included
    failures: Counter[str] = field(default_factory=Counter)  # by kind, of attempts, also where another helped
    lost: int = 0  # questions without an answer at the end
    since: float | None = None  # loop time of the last `metrics`

    async def answer(self, asks: Sequence[Ask], *, key: str, deadline: float) -> list[Reply]:
        """One reply per question, in their order, within `deadline` seconds on the pool's clock.

        What failed and may do better is asked again, alone, of another replica, up to cfg.attempts times;
        what still failed is a reply with a failure. Raises PoolDown, nothing else.
        """
        began, until = asyncio.get_running_loop().time(), self.pool.clock() + deadline
        never = Reply(failure="queue: no replica was free before the deadline", attempts=0)
        replies, spent, tried = [never] * len(asks), [0] * len(asks), list[Replica]()
        pending = list(range(len(asks)))
        while pending and until - self.pool.clock() > TICK:
            try:
                async with self.pool.seat(until=until, key=key, weight=len(pending), tried=tried) as seat:
                    found = await self._attempt(seat, [asks[i] for i in pending], until)
                    probe = seat.probe
                    tried.append(seat.replica)
            except PoolDown:
                raise
            except RoleError:  # the deadline, in the queue
                break
            for i, reply in zip(pending, found, strict=True):
                spent[i] += kind(reply) != "rate" and not (probe and reply.failure)
                replies[i] = replace(reply, attempts=replies[i].attempts + 1)
            pending = [
                i for i in pending if replies[i].failure and replies[i].again and spent[i] < self.cfg.attempts
            ]
        self._count(replies, asyncio.get_running_loop().time() - began)
        return replies

    async def _attempt(self, seat: Seat, asks: Sequence[Ask], until: float) -> list[Reply]:
        """One call to one replica; what it means for the replica is told to the seat."""
        began, name = asyncio.get_running_loop().time(), seat.replica.handle.name
        seconds = min(self.cfg.attempt, until - self.pool.clock())
        try:
            args = (asks, OWN * seconds) if self.timed else (asks,)
            replies: list[Reply] = await seat.ask("answer", *args, deadline=seconds)
        except RoleError as error:
            took = asyncio.get_running_loop().time() - began
            replies = [Reply(failure=f"replica: {error}", seconds=took, replica=name)] * len(asks)
        if all(reply.failure and kind(reply) not in HARMLESS for reply in replies):
            seat.failure = replies[0].failure
        seat.pause = max(r.after or BACK_OFF * (kind(r) == "rate") for r in replies)
        self.failures.update(kind(reply) for reply in replies if reply.failure)
        return replies

    def _count(self, replies: Sequence[Reply], seconds: float) -> None:
        self.asked += len(replies)
        self.attempts += sum(reply.attempts for reply in replies)
        self.seconds += seconds * len(replies)
        never = sum(kind(reply) == "queue" for reply in replies)
        self.failures.update({"queue": never} if never else {})
        self.lost += sum(bool(reply.failure) for reply in replies)

    def metrics(self) -> dict[str, float]:
        """What happened since the last call of this method, and what waits now.

        rate: questions settled per second; seconds: mean of a question from `answer` to its reply.
        """
        now, n = asyncio.get_running_loop().time(), max(1, self.asked)
        up = [replica.state == "up" for replica in self.pool.replicas]
        found = {
            "queue": float(self.pool.waiting),
            "in_flight": float(sum(self.pool.load)),
            "replicas_up": float(sum(up)),
            "rate": self.asked / (now - self.since) if self.since is not None and now > self.since else 0.0,
            "seconds": self.seconds / n,
            "attempts": self.attempts / n,
            "lost": self.lost / n,
            **{f"failures/{name}": float(count) for name, count in sorted(self.failures.items())},
        }
        self.asked = self.attempts = self.lost = 0
        self.seconds, self.since = 0.0, now
        self.failures.clear()
        return found


class Judging:
    """A generative or a scalar judge as a producer of rewards."""

    def __init__(
        self, pool: Pool, cfg: JudgeConfig | Scalar, dispatch: Dispatch, *, deadline: float, name: str = ""
    ) -> None:
        self.desk = Desk(pool, dispatch, timed=not isinstance(cfg, Scalar))
        self.cfg, self.deadline = cfg, deadline
        self.name = name or ("scalar" if isinstance(cfg, Scalar) else "judge")

    async def rate(self, prompt: Prompt, texts: Sequence[str], seeds: Sequence[int]) -> list[Verdict]:
        """One verdict per answer of a group: questions → replies → verdicts. Raises PoolDown."""
        cfg = self.cfg
        if isinstance(cfg, Scalar):
            asks = scalar_questions(cfg, prompt, texts)
        else:
            asks = questions(cfg, prompt, texts, seeds)
        replies = await self.desk.answer(asks, key=prompt.text, deadline=self.deadline)
        if isinstance(cfg, Scalar):
            return scalar_verdicts(cfg, asks, replies, len(texts), producer=self.name)
        return verdicts(cfg, asks, replies, len(texts), producer=self.name)
