"""Everyone that the controller speaks to, each wait with a deadline and a name.

The loop does not know whether a replica is a Ray actor (rl/actors/cluster.py) or an object in this process
(`Local`, which tests use). How calls are spread over replicas: rl/pool.py.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.pool import Pool
from rl.replica import Handle, RoleError, within


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


Each = Callable[[int], Sequence[Any]]


@dataclass(slots=True)
class TrainerGroup:
    """The trainer's ranks, which act together: a call goes to all of them, rank 0 answers."""

    ranks: Sequence[Handle]

    async def call(
        self, method: str, each: Each = lambda rank: (), *, deadline: float, returns: int = 1
    ) -> Any:  # fmt: skip
        return (await self.all(method, each, deadline=deadline, returns=returns))[0]

    async def all(
        self, method: str, each: Each = lambda rank: (), *, deadline: float, returns: int = 1
    ) -> list[Any]:  # fmt: skip
        """What every rank answers, in their order. each: rank → arguments."""
        calls = (within(deadline, h, method, *each(r), returns=returns) for r, h in enumerate(self.ranks))
        return await asyncio.gather(*calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Everyone that a run has. What the config does not use is None or empty: it was never started."""

    trainer: TrainerGroup
    sampler: Pool
    judges: Mapping[str, Pool] = field(default_factory=dict)  # "judge", "scalar": they run models
    raters: Mapping[str, Pool] = field(default_factory=dict)  # "rule", "fn/0", ...: they run none
    producers: Mapping[str, Any] = field(default_factory=dict)  # all of these, as Producer
    teachers: Mapping[str, Pool] = field(default_factory=dict)
    reference: Pool | None = None
    validator: Pool | None = None

    def engines(self) -> dict[str, Pool]:
        """Every pool that runs a model, by the name under which a person sees it."""
        more = {"reference": self.reference, "validator": self.validator}
        return {
            "sampler": self.sampler,
            **self.judges,
            **{name: pool for name, pool in more.items() if pool is not None},
            **{f"teacher {name}": pool for name, pool in self.teachers.items()},
        }

    def pools(self) -> list[Pool]:
        """Everyone but the trainer."""
        return [*self.engines().values(), *self.raters.values()]
