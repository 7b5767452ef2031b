"""Held-out problems while training goes on, answered by the weights of exactly one version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rl import sync
from rl.config import Config
from rl.evaluate import evaluate
from rl.roles import Roles
from rl.types import Prompt, SampleMeta

CHUNK = 32  # prompts that one trainer rank answers before it looks for a batch again


@dataclass(slots=True)
class Validation:
    """Asked after every step whether one is due; one at a time. Training never waits for it."""

    cfg: Config
    roles: Roles
    prompts: Sequence[Prompt]
    idle: asyncio.Event  # set while the trainer has no batch
    task: asyncio.Task[None] | None = None
    skipped: int = 0  # due, but another was under way

    def due(self, version: int) -> bool:
        every = self.cfg.validation.every
        if not every or version % every:
            return False
        busy = self.task is not None and not self.task.done()
        self.skipped += busy
        return not busy

    async def run(self, manifest: sync.Manifest, weights: Any) -> dict[str, float]:
        """Metrics validation/...; `validation/version` says whose they are."""
        began, at_a_time = time.monotonic(), round(self.cfg.validation.share * len(self.prompts))
        lane = _Trainer(self) if self.cfg.validation.on == "trainer" else _Replica(self)
        await lane.hold(manifest, weights)
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(lane.work())
            found, _ = await evaluate(self.cfg, self.roles.producers, self.prompts, lane.answer, at_a_time)
            working.cancel()
        found = {f"validation/{name.replace(' ', '/')}": value for name, value in found.items()}
        return {
            **found,
            "validation/version": manifest.version,
            "validation/seconds": time.monotonic() - began,
            "validation/skipped": self.skipped,
        }


@dataclass(slots=True)
class _Replica:
    """An engine of its own, which gets weights only from here."""

    owner: Validation
    version: int = 0

    async def hold(self, manifest: sync.Manifest, weights: Any) -> None:
        pool, wait = self.owner.roles.validator, self.owner.cfg.deadlines.sync
        assert pool is not None
        self.version = manifest.version
        reports = await pool.all("update", manifest.version, weights, "wait", deadline=wait)
        for handle, report in zip(pool.handles, reports, strict=True):
            sync.verify(manifest, report, handle.name)

    async def answer(self, i: int, prompt: Prompt, seed: int) -> SampleMeta:
        pool, wait = self.owner.roles.validator, self.owner.cfg.deadlines.generate
        assert pool is not None
        name = f"validation-{self.version}-{i}"
        metas, _ = await pool.call("generate", prompt.ids, [seed], name, deadline=wait, returns=2)
        return metas[0]

    async def work(self) -> None:
        pass


@dataclass(slots=True)
class _Trainer:
    """The trainer's ranks hold a copy of the version's weights and answer while they have no batch."""

    owner: Validation
    asked: asyncio.Queue[tuple[Prompt, int, asyncio.Future[SampleMeta]]] = field(
        default_factory=asyncio.Queue
    )

    async def hold(self, manifest: sync.Manifest, weights: Any) -> None:
        trainer, wait = self.owner.roles.trainer, self.owner.cfg.deadlines.sync
        reports = await trainer.all("hold", lambda rank: (manifest.version, weights), deadline=wait)
        for handle, report in zip(trainer.ranks, reports, strict=True):
            sync.verify(manifest, report, handle.name)

    async def answer(self, i: int, prompt: Prompt, seed: int) -> SampleMeta:
        future: asyncio.Future[SampleMeta] = asyncio.get_running_loop().create_future()
        await self.asked.put((prompt, seed, future))
        return await future

    async def work(self) -> None:
        """Chunks of what was asked, spread over the ranks, whenever they are idle."""
        trainer, wait = self.owner.roles.trainer, self.owner.cfg.deadlines.generate
        n = len(trainer.ranks)
        while True:
            chunk = [await self.asked.get()]
            await self.owner.idle.wait()
            while not self.asked.empty() and len(chunk) < n * CHUNK:
                chunk.append(self.asked.get_nowait())
            parts = [[(prompt.ids, seed) for prompt, seed, _ in chunk[rank::n]] for rank in range(n)]
            answers = await trainer.all("answer", lambda rank, parts=parts: (parts[rank],), deadline=wait)
            for rank, metas in enumerate(answers):
                for (_, _, future), meta in zip(chunk[rank::n], metas, strict=True):
                    future.set_result(meta)
