"""New weights: from the trainer to every sampler, and the proof that they arrived.

The trainer stands still while it packs them (`publish`). All the rest goes on beside its next step: it says
what must be true of whoever holds them, they travel, each sampler takes them between two decoding steps and
proves it. What a sampler made of weights that it has not proved yet waits (`proven`), and is thrown away
where the proof fails. Then that sampler leaves the run, and the pool brings it back with the newest weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rl import sync
from rl.config import Config
from rl.pool import Pool
from rl.replica import Handle, RoleError, within
from rl.roles import TrainerGroup
from rl.types import SampleMeta
from rl.wire.parcel import Broadcast, Mapped, Parcel, Place, Transport, choose


@dataclass(slots=True)
class Line:
    """How weights reach one sampler."""

    place: Place
    transport: Transport
    joined: int = 0  # groups that it was in: a broken one is of no more use
    mapped: Mapped | None = None


@dataclass(slots=True)
class Delivery:
    """`served` is the version that every sampler in the run has proved to hold."""

    cfg: Config
    trainer: TrainerGroup
    pool: Pool
    served: int = 0
    proved: dict[str, int] = field(default_factory=dict)  # sampler → version, of those in the run
    address: tuple[str, int] = ("", 0)  # of the trainer's store
    manifest: sync.Manifest | None = None  # of the newest published weights
    arrays: Any = None  # a reference to them, where anybody gets them by value
    delta: Any = None  # likewise, to what has changed since the version before
    metrics: dict[str, float] = field(default_factory=dict)  # of the last delivery, in milliseconds
    _lines: dict[str, Line] = field(default_factory=dict)
    _still: asyncio.Lock = field(default_factory=asyncio.Lock)  # the packed weights stay what they are
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.pool.revive = self._readmit

    async def publish(self) -> None:
        """Pack the trainer's weights as they are; waits for a delivery that is under way."""
        async with self._still:
            began = time.monotonic()
            self.manifest = self.arrays = self.delta = None  # they are of the version before
            await self.trainer.call("publish", deadline=self.cfg.deadlines.sync)
            self.metrics = {"sync/publish_ms": 1e3 * (time.monotonic() - began)}

    async def deliver(self, *, by_value: bool = False) -> tuple[sync.Manifest, Any]:
        """Hand what is published to every sampler in the run. Returns the manifest, and with by_value a
        reference to the weights themselves.

        A sampler that fails leaves the run; whether others are left to wait for is the pool's business.
        Raises SyncError where none is and one holds other weights.
        """
        async with self._still:
            began = time.monotonic()
            handles = self.pool.up
            self.proved = {h.name: self.proved[h.name] for h in handles if h.name in self.proved}
            await asyncio.gather(*(self._connect(h) for h in handles if h.name not in self._lines))
            stored = [h.name for h in handles if self._lines[h.name].transport == "store"]
            self.delta = await self._reference("delta") if self.cfg.sync.delta and stored else None
            whole = by_value or any(not self._may_take_delta(name) for name in stored)
            manifest, self.arrays = await asyncio.gather(self._call("manifest"), self._value(whole))
            self.manifest = manifest
            told = await asyncio.gather(*map(self._try, handles))
            failed = {h.name: e for h, e in zip(handles, told, strict=True) if isinstance(e, Exception)}
            for handle in handles:
                if handle.name in failed:
                    self._expel(handle, failed[handle.name])
            wrong = [error for error in failed.values() if isinstance(error, sync.SyncError)]
            if wrong and not self.proved:
                raise wrong[0]
            self.metrics |= _milliseconds([t for t in told if not isinstance(t, Exception)])
            self.metrics |= {"sync/total_ms": 1e3 * (time.monotonic() - began), "sync/lost": len(failed)}
            self._note()
            return manifest, self.arrays

    async def proven(self, metas: Sequence[SampleMeta]) -> bool:
        """Whether these samples come of proved weights; waits until it is known."""
        while True:
            wanted = [m for m in metas if self.proved.get(m.engine, -1) < m.version_max]
            if not wanted:
                return True
            if any(m.engine not in self.proved for m in wanted):
                return False  # it has left the run
            changed = self._changed
            await changed.wait()

    # ── One sampler ───────────────────────────────────────────────────────────────────────────────

    async def _connect(self, handle: Handle) -> None:
        wait = self.cfg.deadlines.sync
        trainer, engine = await asyncio.gather(self._call("place"), within(wait, handle, "place"))
        try:
            line = Line(engine, choose(self.cfg.sync.transport, trainer, engine))
        except ValueError as error:
            raise sync.SyncError(f"{handle.name}: {error}") from None
        if line.transport == "ipc":
            line.mapped = await self._call("mapped")
        self._lines[handle.name] = line

    async def _try(self, handle: Handle) -> Mapping[str, float] | RoleError | sync.SyncError:
        try:
            return await self._give(handle)
        except (RoleError, sync.SyncError) as error:
            return error

    async def _give(self, handle: Handle) -> Mapping[str, float]:
        """The published weights to one sampler; how long its parts took. Raises RoleError, SyncError."""
        assert self.manifest is not None
        parcel, wait = self._parcel(handle.name), self.cfg.deadlines.sync
        sends = [self._call("send", parcel)] if isinstance(parcel, Broadcast) else []
        mode = self.cfg.staleness.weights
        calls = [within(wait, handle, "update", self.manifest.version, parcel, mode), *sends]
        ended: list[Any] = await asyncio.gather(*calls, return_exceptions=True)  # both have come to an end
        for result in ended:
            if isinstance(result, BaseException):
                raise result
        report = ended[0]
        sync.verify(self.manifest, report, handle.name)
        self.proved[handle.name] = self.manifest.version
        return report.seconds

    def _parcel(self, name: str) -> Parcel:
        line = self._lines[name]
        if line.transport == "ipc":
            assert line.mapped is not None
            return line.mapped
        if line.transport == "store":
            return self.delta if self._may_take_delta(name) else self.arrays
        host, port = self.address
        return Broadcast(
            host=host,
            port=port,
            key=f"{name}/{line.joined}",
            size=1 + line.place.ranks,
            seconds=0.9 * self.cfg.deadlines.sync,  # its own words come before those of the deadline
        )

    def _may_take_delta(self, name: str) -> bool:
        return self.delta is not None and name in self.proved

    def _expel(self, handle: Handle, why: Exception) -> None:
        self.proved.pop(handle.name, None)
        self._lines[handle.name].joined += 1
        self.pool.expel(handle, str(why))
        self._note()  # for those who wait for its proof

    async def _readmit(self, handle: Handle) -> bool:
        """Bring a sampler that left back into the run: started, with the newest weights, and proved."""
        wait = self.cfg.deadlines
        self.proved.pop(handle.name, None)
        await within(wait.start, handle, "start")
        await within(wait.sync, handle, "abort", None)  # what it made of weights that nobody vouches for
        async with self._still:
            joined = self._lines[handle.name].joined + 1 if handle.name in self._lines else 0
            await self._connect(handle)
            self._lines[handle.name].joined = joined
            self.manifest = self.manifest or await self._call("manifest")
            if self._lines[handle.name].transport == "store" and self.arrays is None:
                self.arrays = await self._value(True)
            try:
                await self._give(handle)
            except sync.SyncError as error:
                raise RoleError(str(error)) from error
            self._note()
        return True

    # ── The trainer ───────────────────────────────────────────────────────────────────────────────

    async def _call(self, method: str, *args: Any) -> Any:
        return await within(self.cfg.deadlines.sync, self.trainer.ranks[0], method, *args)

    async def _value(self, wanted: bool) -> Any:
        return await self._reference("arrays") if wanted else None

    async def _reference(self, method: str) -> Any:
        """To what the trainer hands out by value; None where it has nothing."""
        size, there = await within(self.cfg.deadlines.sync, self.trainer.ranks[0], method, returns=2)
        if size is not None:
            self.metrics["sync/bytes"] = size
        return None if size is None else there

    def _note(self) -> None:
        self.served = min(self.proved.values(), default=self.served)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _milliseconds(told: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean over the samplers of what the parts of an update took."""
    parts = sorted({part for seconds in told for part in seconds})
    return {f"sync/{part}_ms": 1e3 * fmean(t[part] for t in told if part in t) for part in parts}
