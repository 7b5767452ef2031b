"""How the controller speaks to whoever does the work: replicas behind one call, each wait with a deadline
and a name.

The loop does not know whether a replica is a Ray actor (rl/actors/cluster.py) or an object in this process
(`Local`,
which tests use).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class RoleError(RuntimeError):
    """A replica died, failed or did not answer in time. The message names it and what it was asked."""


class Handle(Protocol):
    @property
    def name(self) -> str: ...

    async def call(self, method: str, *args: Any, returns: int = 1) -> Any:
        """The method's result. With returns > 1 the first value is fetched, the others stay where they are
        and come
        back as references that can be passed on. Raises RoleError if the replica died or the method
        raised."""
        ...


@dataclass(frozen=True, slots=True)
class Local:
    """A replica in this process."""

    name: str
    target: Any

    async def call(self, method: str, *args: Any, returns: int = 1) -> Any:
        try:
            result = getattr(self.target, method)(*args)
            return await result if inspect.isawaitable(result) else result
        except (ValueError, RuntimeError) as error:
            raise RoleError(f"{self.name}.{method} failed: {error}") from error


@dataclass(slots=True)
class Pool:
    """Replicas of one role; a call goes to the one with the fewest calls under way."""

    handles: Sequence[Handle]
    load: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.load = [0] * len(self.handles)

    async def call(self, method: str, *args: Any, deadline: float, returns: int = 1) -> Any:
        i = min(range(len(self.handles)), key=lambda r: (self.load[r], r))
        self.load[i] += 1
        try:
            return await within(deadline, self.handles[i], method, *args, returns=returns)
        finally:
            self.load[i] -= 1

    async def all(self, method: str, *args: Any, deadline: float) -> list[Any]:
        """The same call to every replica, at once; results in the order of `handles`."""
        return await asyncio.gather(*(within(deadline, h, method, *args) for h in self.handles))


async def within(deadline: float, handle: Handle, method: str, *args: Any, returns: int = 1) -> Any:
    try:
        async with asyncio.timeout(deadline):
            return await handle.call(method, *args, returns=returns)
    except TimeoutError:
        raise RoleError(f"{handle.name}.{method} gave no answer within {deadline:g} s") from None


@dataclass(slots=True)
class TrainerGroup:
    """The trainer's ranks, which act together: a call goes to all of them, rank 0 answers."""

    ranks: Sequence[Handle]

    async def call(
        self,
        method: str,
        each: Callable[[int], Sequence[Any]] = lambda rank: (),
        *,
        deadline: float,
        returns: int = 1,
    ) -> Any:
        calls = (within(deadline, h, method, *each(r), returns=returns) for r, h in enumerate(self.ranks))
        return (await asyncio.gather(*calls))[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Everyone that a run has. What the config does not use is None or empty: it was never started."""

    trainer: TrainerGroup
    sampler: Pool
    judge: Pool | None = None
    rule: Pool | None = None
    functions: Mapping[str, Pool] = field(default_factory=dict)
    teachers: Mapping[str, Pool] = field(default_factory=dict)
    reference: Pool | None = None

    def producers(self) -> dict[str, Pool]:
        """Rules and users' functions: everyone that rates texts without a model."""
        return {**({"rule": self.rule} if self.rule else {}), **self.functions}

    def engines(self) -> dict[str, Pool]:
        """Every pool that runs a model, by the name under which a person sees it."""
        named = {"sampler": self.sampler, "judge": self.judge, "reference": self.reference}
        pools = {name: pool for name, pool in named.items() if pool is not None}
        return {**pools, **{f"teacher {name}": pool for name, pool in self.teachers.items()}}
