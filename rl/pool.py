"""Replicas behind one call: who is asked, who waits for how long, and who is asked instead."""

from __future__ import annotations

import asyncio
import hashlib
import math
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rl.config import Dispatch
from rl.replica import Handle, PoolDown, Replica, RoleError, within

AWAY = ("open", "out")
TICK = 0.001  # seconds; a timer may come so much early
SIMPLE = Dispatch(attempt=math.inf, attempts=1, breaker=sys.maxsize, in_flight=sys.maxsize, queue=sys.maxsize)


@dataclass(slots=True, eq=False)
class Seat:
    """Room for one call at a replica. Who sits there may say what was learned of the replica.

    failure: empty if it answered, else why it did not; None: nothing was learned. pause: seconds for which
    it asked to be left alone, which is no failure.
    """

    replica: Replica
    weight: int
    probe: bool
    failure: str | None = None
    pause: float = 0.0

    async def ask(self, method: str, *args: Any, deadline: float, returns: int = 1) -> Any:
        return await within(deadline, self.replica.handle, method, *args, returns=returns)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    key: str
    weight: int
    tried: Sequence[Replica]
    seat: asyncio.Future[Seat]


class Pool:
    """Replicas of one role. Without `dispatch` a call goes to the least loaded one and has its deadline:
    no second attempt, no queue, no breaker.

    `waiting`: questions in the queue. `down_since`: loop time since which nobody can be asked, or None.
    `last_failure`: the latest of any replica, in words. `news`: who left and who came back, for a person.
    """

    def __init__(self, handles: Sequence[Handle], name: str = "", dispatch: Dispatch | None = None) -> None:
        if not handles:
            raise ValueError(f"Pool: {name or 'a role'} has no replicas")
        self.handles, self.name, self.cfg = handles, name or handles[0].name, dispatch or SIMPLE
        self.replicas = [Replica(handle, self.cfg) for handle in handles]
        self.waiting = 0
        self.down_since: float | None = None
        self.last_failure = ""
        self.news: deque[str] = deque(maxlen=100)
        self._failing_since: float | None = None  # as down_since, but only an answer ends it, not a trial
        self._lost = 0.0  # seconds down before the last recovery
        self._queue: dict[_Waiter, None] = {}  # in the order of arrival
        self._reviving: set[asyncio.Task[None]] = set()
        # Brings back one that failed; whether it is sure, or is still to be tried by one call.
        self.revive: Callable[[Handle], Awaitable[bool]] = self._start

    # ── What callers see ──────────────────────────────────────────────────────────────────────────────

    async def call(
        self, method: str, *args: Any, deadline: float, returns: int = 1, key: str = "", weight: int = 1
    ) -> Any:
        """The first answer that one of up to `attempts` replicas gives within `deadline` seconds.

        key: calls with the same one go to the same replica while that is not much busier than others.
        weight: questions in this call. The deadline includes the queue, but no time in which all are down.
        A ValueError of the method is the caller's fault: it counts against nobody, and no other is asked.

        Raises RoleError; PoolDown if no replica has answered for `patience` seconds.
        """
        until, tried = self.clock() + deadline, []
        while True:
            try:
                async with self.seat(until=until, key=key, weight=weight, tried=tried) as seat:
                    if not seat.probe:  # to wait for the first replica that comes back is no attempt
                        tried.append(seat.replica)
                    left = min(self.cfg.attempt, until - self.clock())
                    return await seat.ask(method, *args, deadline=left, returns=returns)
            except RoleError as error:
                over = len(tried) >= self.cfg.attempts or until - self.clock() <= TICK
                if over or isinstance(error, PoolDown) or isinstance(error.__cause__, ValueError):
                    raise

    @asynccontextmanager
    async def seat(
        self, *, until: float, key: str = "", weight: int = 1, tried: Sequence[Replica] = ()
    ) -> AsyncIterator[Seat]:
        """Wait for a replica, of those tried least often, and hold room for `weight` questions there.

        until: on this pool's `clock`. A RoleError inside is the replica's failure; leaving otherwise means
        that it answered, unless seat.failure says why not. Raises RoleError when the time is over, PoolDown.
        """
        future: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()
        seat = await self._wait(_Waiter(key, weight, tried, future), until)
        try:
            yield seat
            seat.failure = seat.failure or ""
        except RoleError as error:
            seat.failure = "" if isinstance(error.__cause__, ValueError) else str(error)
            raise
        finally:
            self._settle(seat)

    async def all(self, method: str, *args: Any, deadline: float) -> list[Any]:
        """The same call to every replica at once, up or not; results in the order of `handles`. Raises the
        first RoleError."""
        return await asyncio.gather(*(within(deadline, h, method, *args) for h in self.handles))

    async def each(self, method: str, *args: Any, deadline: float) -> list[Any]:
        """As `all`, but a replica that fails has its RoleError in the place of a result."""
        calls = (within(deadline, h, method, *args) for h in self.handles)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, RoleError):
                raise result
        return results

    def clock(self) -> float:
        """Seconds, of which none pass while every replica is down."""
        now = asyncio.get_running_loop().time() if self.down_since is None else self.down_since
        return now - self._lost

    def check(self) -> None:
        """Raises PoolDown if nobody can be asked and patience is over."""
        if self._given_up():
            raise self._down()

    @property
    def up(self) -> list[Handle]:
        """Those that are in the run."""
        return [replica.handle for replica in self.replicas if replica.state not in AWAY]

    @property
    def load(self) -> list[int]:
        """Questions under way at each replica."""
        return [replica.load for replica in self.replicas]

    @property
    def trouble(self) -> str:
        """Why no more work should come, in words; empty: it may."""
        if self.down_since is not None:
            return f"no replica of {self.name} answers ({self.last_failure})"
        return f"{self.waiting} questions wait for {self.name}" if self.full else ""

    @property
    def full(self) -> bool:
        return self.waiting >= self.cfg.queue

    # ── Who comes next ────────────────────────────────────────────────────────────────────────────────

    async def _wait(self, waiter: _Waiter, until: float) -> Seat:
        self._queue[waiter] = None
        self.waiting += waiter.weight
        self._dispatch()
        taken = False
        try:
            while not waiter.seat.done():
                left = until - self.clock()
                if self.down_since is not None:  # the clock stands: look again now and then
                    left = max(left, 0.05)
                elif left <= 0:
                    why = f"; last failure: {self.last_failure}" if self.last_failure else ""
                    raise RoleError(f"{self.name}: no replica was free before the deadline{why}")
                await asyncio.wait([waiter.seat], timeout=left)
            taken = True
            return waiter.seat.result()
        finally:
            self._leave(waiter)
            if not taken and waiter.seat.done() and not waiter.seat.exception():
                self._settle(waiter.seat.result())  # given to a caller who was cancelled meanwhile

    def _leave(self, waiter: _Waiter) -> None:
        if waiter in self._queue:
            del self._queue[waiter]
            self.waiting -= waiter.weight

    def _dispatch(self) -> None:
        """Seats for whoever may have one, first come, first served at each replica."""
        self._note()
        if self._given_up():
            for waiter in list(self._queue):
                waiter.seat.set_exception(self._down())
                self._leave(waiter)
        now = asyncio.get_running_loop().time()
        usable = [r for r in self.replicas if r.may_be_asked(now)]
        free, seated = set(usable), list[_Waiter]()
        for waiter in self._queue:
            if not free:
                break
            fewest = min(waiter.tried.count(r) for r in usable)
            own = [r for r in usable if waiter.tried.count(r) == fewest]
            room = [r for r in own if r in free and r.has_room(waiter.weight)]
            if not room:
                free -= set(own)  # later arrivals must not overtake
                continue
            replica = self._choose(room, waiter.key)
            seat = Seat(replica, waiter.weight, probe=replica.take(waiter.weight))
            if seat.probe:
                usable.remove(replica)
                free.remove(replica)
            waiter.seat.set_result(seat)
            seated.append(waiter)
        for waiter in seated:
            self._leave(waiter)
        self._note()

    def _choose(self, room: Sequence[Replica], key: str) -> Replica:
        for replica in room:
            if replica.state == "trial":
                return replica
        least = min(room, key=lambda r: r.load)
        if not key:
            return least
        usual = max(room, key=lambda r: _affinity(key, r.handle.name))
        return usual if usual.load - least.load <= self.cfg.affinity else least

    # ── What became of it ─────────────────────────────────────────────────────────────────────────────

    def _settle(self, seat: Seat) -> None:
        loop, replica = asyncio.get_running_loop(), seat.replica
        if seat.pause > 0:
            replica.pause(seat.pause, loop.time())
            loop.call_at(replica.asleep + TICK, self._dispatch)
        was_open = replica.state == "open"
        replica.settle(seat.weight, seat.probe, seat.failure, paused=seat.pause > 0)
        if seat.failure:
            self.last_failure = seat.failure
        elif seat.failure == "":
            self._failing_since = None
        if replica.state == "open" and not was_open:
            self._bring_back(replica)
        self._dispatch()

    def expel(self, handle: Handle, why: str) -> None:
        """Ask this replica no more until `revive` has been with it."""
        replica = next(r for r in self.replicas if r.handle is handle)
        self.last_failure = why
        if replica.state not in AWAY:
            self._bring_back(replica)
        replica.state = "out"
        self._dispatch()

    def _bring_back(self, replica: Replica) -> None:
        self.news.append(f"{replica.handle.name} left the run: {self.last_failure}")
        task = asyncio.create_task(self._revive(replica))
        self._reviving.add(task)
        task.add_done_callback(self._reviving.discard)

    async def _revive(self, replica: Replica) -> None:
        while replica.state in AWAY:
            await asyncio.sleep(self.cfg.rest)
            try:
                sure = await self.revive(replica.handle)
            except RoleError as error:
                self.last_failure = str(error)
                continue
            if replica.state in AWAY:
                replica.state = "up" if sure else "trial"
                replica.failures = 0 if sure else replica.failures
                self._failing_since = None if sure else self._failing_since
                self.news.append(f"{replica.handle.name} is back")
                self._dispatch()

    async def _start(self, handle: Handle) -> bool:
        await within(self.cfg.patience, handle, "start")
        return False

    def _note(self) -> None:
        """Whether anybody can be asked. A probe under way is not yet an answer."""
        loop = asyncio.get_running_loop()
        down = all(replica.state in (*AWAY, "probed") for replica in self.replicas)
        if down and self.down_since is None:
            self.down_since = loop.time()
            self._failing_since = self._failing_since or self.down_since
            loop.call_at(self._failing_since + self.cfg.patience + TICK, self._dispatch)
        elif not down and self.down_since is not None:
            self._lost += loop.time() - self.down_since
            self.down_since = None

    def _failing(self) -> float:
        since = self._failing_since
        return 0.0 if since is None else asyncio.get_running_loop().time() - since

    def _given_up(self) -> bool:
        return self.down_since is not None and self._failing() >= self.cfg.patience

    def _down(self) -> PoolDown:
        return PoolDown(
            f"{self.name}: none of {len(self.replicas)} replicas has answered for {self._failing():.3g} s "
            f"(dispatch.patience {self.cfg.patience:g}); last failure: {self.last_failure}"
        )


def _affinity(key: str, name: str) -> bytes:
    """Rendezvous hashing: a replica's rank for a key depends on no other replica."""
    return hashlib.blake2b(f"{len(key)} {key}{name}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
