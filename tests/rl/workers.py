"""Replicas that do as told and count what they are asked, pools of them, and a real event loop's clock."""

import asyncio
from dataclasses import dataclass, field

from rl.config import Dispatch
from rl.pool import Pool
from rl.roles import Local

QUICK = Dispatch(
    attempt=2.0, attempts=3, breaker=2, rest=0.05, in_flight=4, queue=8, patience=5.0, affinity=2
)


@dataclass
class Worker:
    """Does what `mode` says; counts what it is asked for."""

    mode: str = "ok"  # ok, fail, hang, refuse
    seconds: float = 0.0
    asked: list = field(default_factory=list)
    starts: int = 0
    now: int = 0
    most: int = 0

    async def start(self):
        self.starts += 1

    async def work(self, x=None):
        self.asked.append(x)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if self.mode == "hang":
                await asyncio.sleep(60)
            await asyncio.sleep(self.seconds)
            if self.mode == "fail":
                raise RuntimeError("out of memory")
            if self.mode == "refuse":
                raise ValueError("too long")
            return x
        finally:
            self.now -= 1


@dataclass
class Restarted(Worker):
    """As a restarted actor: it does nothing before its start."""

    up: bool = True
    start_works: bool = True

    async def start(self):
        self.starts += 1
        if not self.start_works:
            raise RuntimeError("still dead")
        self.up = True

    async def work(self, x=None):
        if not self.up:
            self.asked.append(x)
            raise RuntimeError("not started")
        return await super().work(x)


def pool_of(*workers, dispatch: Dispatch | None = QUICK, **numbers) -> Pool:
    cfg = Dispatch(**{**vars(dispatch), **numbers}) if dispatch else None
    return Pool([Local(f"w-{i}", worker) for i, worker in enumerate(workers)], "workers", cfg)


def run(coroutine, seconds=10.0):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


async def until(true, seconds=3.0):
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.005)
