"""A teacher's shell: the student's tokens in, the teacher's log-probs of them out. A frozen reference is
one too."""

from __future__ import annotations

import time

from rl.batch import GroupTokens
from rl.config import Engine
from rl.engines.base import EngineStats
from rl.engines.build import build
from rl.engines.make import Bundle
from rl.teaching import Said
from rl.types import Scores

CPU = Engine()


class Teacher:
    """Sends the answer's tokens only: sampled log-probs, and with top_k the best K, or with full the
    vocabulary."""

    def __init__(
        self,
        bundle: Bundle,
        slots: int,
        temperature: float,
        top_k: int = 0,
        full: bool = False,
        engine: Engine = CPU,
    ) -> None:
        self.engine = build(bundle, engine, slots=slots, updates=False)
        self.temperature, self.top_k, self.full = temperature, top_k, full
        self.here = 0  # groups under way
        self.started = False

    async def start(self) -> None:
        """Harmless where it runs already: a pool asks again after failures."""
        if not self.started:
            await self.engine.start()
            self.started = True

    async def teach(self, group: GroupTokens) -> tuple[Said, list[Scores]]:
        """(what it cost, scores of each sample): the first for the controller, the second for the trainer."""
        prompt, began, ahead = group.prompt_ids.tolist(), time.monotonic(), self.here
        self.here += 1
        try:
            scores = await self.engine.score(
                [prompt + sample.tokens.tolist() for sample in group.samples],
                [len(prompt)] * len(group.samples),
                top_k=self.top_k,
                full=self.full,
                temperature=self.temperature,
            )
        finally:
            self.here -= 1
        n_tokens = sum(len(sample.tokens) for sample in group.samples)
        return Said(n_tokens=n_tokens, seconds=time.monotonic() - began, ahead=ahead), scores

    async def stats(self) -> EngineStats:
        return self.engine.stats()

    async def stop(self) -> None:
        await self.engine.stop()
