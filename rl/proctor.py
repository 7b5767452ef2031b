"""What is asked beside training: held-out problems before, meanwhile and after, and the judges' health."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.config import Config
from rl.display import Display
from rl.evaluate import evaluate
from rl.log import RunLog
from rl.monitor import Monitor
from rl.roles import Roles
from rl.seeds import fold_in
from rl.sync import Manifest
from rl.types import Prompt, SampleMeta, Score
from rl.validation import Validation


@dataclass(slots=True)
class Proctor:
    """Nothing here holds training up: the loop starts a task and goes on."""

    cfg: Config
    roles: Roles
    held_out: Sequence[Prompt]
    monitor: Monitor
    log: RunLog
    show: Display
    canaries: list[str] = field(default_factory=list)  # the first held-out answers at version 0
    looks: list[asyncio.Task[None]] = field(default_factory=list)
    validation: Validation = field(init=False)

    def __post_init__(self) -> None:
        prompts = self.held_out[: self.cfg.validation.prompts or len(self.held_out)]
        self.validation = Validation(self.cfg, self.roles, prompts, asyncio.Event())

    async def begin(self) -> dict[str, float]:
        """Held-out results before any training; the answers are the canaries from now on."""
        found, answers = await self.evaluate()
        self.canaries = answers[: self.cfg.health.canaries]
        if self.monitor.watches:
            await self._look()  # their first scores
            await self._look()  # and the judges' own noise
        return found

    async def evaluate(self) -> tuple[dict[str, float], list[str]]:
        """Held-out results and answers of the weights that the samplers hold, while nothing else goes on."""

        async def answer(i: int, prompt: Prompt, seed: int) -> SampleMeta:
            name, wait = f"held-out-{i}", self.cfg.deadlines.generate
            sampler = self.roles.sampler
            metas, _ = await sampler.call("generate", prompt.ids, [seed], name, deadline=wait, returns=2)
            return metas[0]

        return await evaluate(self.cfg, self.roles.producers, self.held_out, answer, len(self.held_out))

    def stepped(self, version: int, tasks: asyncio.TaskGroup) -> None:
        """After an optimiser step: see to the judges when it is time."""
        if self.monitor.watches and version % self.cfg.health.every == 0:
            self.looks = [look for look in self.looks if not look.done()]
            self.looks.append(tasks.create_task(self._look()))

    def served(self, manifest: Manifest, weights: Any, tasks: asyncio.TaskGroup) -> None:
        """The engines hold a version whose validation is due."""
        self.validation.task = tasks.create_task(self._validate(manifest, weights))

    async def end(self) -> None:
        """What is under way comes to its end."""
        self.validation.idle.set()
        validation = [self.validation.task] if self.validation.task is not None else []
        await asyncio.gather(*self.looks, *validation)

    async def _validate(self, manifest: Manifest, weights: Any) -> None:
        found = await self.validation.run(manifest, weights)
        self.log.validation(found)
        self.show.validation(found)

    async def _look(self) -> None:
        """Judge the canaries once more and see whether the judges can still be trusted."""
        prompts = list(zip(self.held_out, self.canaries, strict=False))
        seeds = [fold_in(self.cfg.seed, "canary", i) for i in range(len(prompts))]

        async def again(name: str) -> dict[str, float | None]:
            rate = self.roles.producers[name].rate
            asked = (rate(p, [text], [seed]) for (p, text), seed in zip(prompts, seeds, strict=True))
            said = [verdicts[0].outcome for verdicts in await asyncio.gather(*asked)]
            return {str(i): o.value if isinstance(o, Score) else None for i, o in enumerate(said)}

        names = list(self.monitor.watches)
        scores = dict(zip(names, await asyncio.gather(*map(again, names)), strict=True))
        for message in self.monitor.look(scores):
            self.show.note(f"alarm: {message}", "bold yellow")
