"""One replica as its pool sees it: how to ask it, how much it has to do, and whether it may be asked at all.

Up until `breaker` failures in a row, then open: nobody asks it. Every `rest` seconds it gets a `start` (by
rl/pool.py), which so must be harmless to a replica that runs and enough for one that was born anew. Then
one call tries it, and an answer closes the circuit.

    up ── breaker failures ──▶ open ── rest, start ──▶ trial ── one call ──▶ probed ── answer ──▶ up
                                 ▲                                              └──── failure ──▶ open

One that was expelled is out: late answers do not bring it back.

The circuit breaker is described in "Release It!" by M. Nygard.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rl.config import Dispatch


class RoleError(RuntimeError):
    """A replica died, failed or did not answer in time. The message names it and what it was asked."""


class PoolDown(RoleError):
    """No replica of a pool has answered for as long as the configured patience."""


class Handle(Protocol):
    @property
    def name(self) -> str: ...

    async def call(self, method: str, *args: Any, returns: int = 1) -> Any:
        """The method's result. With returns > 1 the first value is fetched, the others stay where they are
        and come back as references that can be passed on. Raises RoleError if the replica died or the method
        raised, from the method's own error."""
        ...


async def within(deadline: float, handle: Handle, method: str, *args: Any, returns: int = 1) -> Any:
    """The handle's answer. Raises RoleError after `deadline` seconds without one."""
    try:
        async with asyncio.timeout(deadline):
            return await handle.call(method, *args, returns=returns)
    except TimeoutError:
        raise RoleError(f"{handle.name}.{method} gave no answer within {round(deadline, 2):g} s") from None


@dataclass(slots=True, eq=False)
class Replica:
    handle: Handle
    cfg: Dispatch
    state: Literal["up", "open", "out", "trial", "probed"] = "up"
    load: int = 0  # questions under way
    failures: int = 0  # in a row
    asleep: float = 0.0  # time until which it wants no calls
    limit: int = field(init=False)  # questions at a time: in_flight, or fewer where it was asked too fast

    def __post_init__(self) -> None:
        self.limit = self.cfg.in_flight

    def may_be_asked(self, now: float) -> bool:
        return self.state in ("up", "trial") and now >= self.asleep

    def has_room(self, weight: int) -> bool:
        """A call heavier than the limit is let in alone."""
        return not self.load or self.load + weight <= self.limit

    def take(self, weight: int) -> bool:
        """One more call under way; whether it is the one that tries the replica."""
        probe = self.state == "trial"
        self.state = "probed" if probe else self.state
        self.load += weight
        return probe

    def pause(self, seconds: float, now: float) -> None:
        """It asked not to be asked so soon: fewer questions at a time, by half for all calls of a burst."""
        if now >= self.asleep:
            self.limit = max(1, min(self.limit, self.load) // 2)
        self.asleep = max(self.asleep, now + seconds)

    def settle(self, weight: int, probe: bool, failure: str | None, paused: bool) -> None:
        """The call is over. failure: empty for an answer, None where nothing was learned."""
        self.load -= weight
        if self.state == "out":
            return
        tried = probe and self.state == "probed"
        if failure is None:
            self.state = "trial" if tried else self.state
        elif failure:
            self.failures += 1
            if tried or (self.state == "up" and self.failures >= self.cfg.breaker):
                self.state = "open"
        else:
            self.state, self.failures = "up", 0
            if not paused:
                self.limit = min(self.limit + 1, self.cfg.in_flight)
