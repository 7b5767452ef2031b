"""Checkpoints beside training. The trainer stands still while its state is copied to the hosts' memory; all
the rest goes on during the next steps: it is written, hashed, and renamed at the end."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl import checkpoint
from rl.config import Config
from rl.ledger import Ledger
from rl.monitor import Monitor
from rl.roles import RoleError, TrainerGroup


@dataclass(slots=True)
class Saving:
    """At most one checkpoint is under way. Metrics go with the next step's."""

    cfg: Config
    trainer: TrainerGroup
    folder: Path  # of the run
    monitor: Monitor
    under_way: asyncio.Task[None] | None = None

    async def ended(self) -> None:
        """Wait for the one that is under way, if any. Raises RoleError where it could not be written."""
        began = time.monotonic()
        await self._outcome()
        self._note("wait", began)

    async def settled(self) -> None:
        """Wait for the one that is under way, whatever comes of it: the run has failed elsewhere."""
        if self.under_way is not None:
            await asyncio.gather(self.under_way, return_exceptions=True)

    async def save(
        self, version: int, ledger: Ledger, extra: dict[str, Any], tasks: asyncio.TaskGroup
    ) -> None:  # fmt: skip
        """Copy the trainer's state, of `version` as all the rest is, and write it beside `tasks`, which its
        failure ends, but whose failure does not end it. The one before must have ended."""
        began = time.monotonic()
        await self.trainer.call("stage", deadline=self.cfg.deadlines.train)
        self._note("stage", began)
        self.under_way = asyncio.create_task(self._write(version, ledger, extra))
        tasks.create_task(self._outcome())

    async def _outcome(self) -> None:
        if self.under_way is not None:
            await asyncio.shield(self.under_way)

    async def _write(self, version: int, ledger: Ledger, extra: dict[str, Any]) -> None:
        began, wait = time.monotonic(), self.cfg.deadlines.train
        trainer, keep = self.trainer, self.cfg.checkpoint.keep
        try:
            aside = await asyncio.to_thread(checkpoint.begin, self.folder, version)
            await trainer.call("write", lambda rank: (str(aside),), deadline=wait)
            unseen = [h.name for r, h in enumerate(trainer.ranks) if not (aside / f"rank_{r}").exists()]
            if unseen:
                raise RoleError(
                    f"{', '.join(unseen)} cannot write to {aside}: log.dir must be a folder that all nodes "
                    "share"
                )
            await trainer.call("write_policy", lambda rank: (str(aside),), deadline=wait)
            await asyncio.to_thread(checkpoint.commit, self.folder, version, ledger, extra, keep=keep)
        except OSError as error:
            raise RoleError(f"the checkpoint of step {version} cannot be written: {error}") from error
        self._note("write", began)

    def _note(self, part: str, began: float) -> None:
        self.monitor.aside[f"checkpoint/{part}_ms"] = 1e3 * (time.monotonic() - began)
