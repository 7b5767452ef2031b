"""A teacher's shell: the student's tokens in, the teacher's log-probs of them out. A frozen reference is
one too."""

from __future__ import annotations

from rl.batch import GroupTokens
from rl.engines.base import EngineStats
from rl.engines.make import Bundle, make_engine
from rl.types import Scores


class Teacher:
    """Sends the answer's tokens only: sampled log-probs, and with top_k the best K, or with full the
    vocabulary."""

    def __init__(
        self, bundle: Bundle, slots: int, temperature: float, top_k: int = 0, full: bool = False
    ) -> None:
        self.engine = make_engine(bundle, slots=slots)
        self.temperature, self.top_k, self.full = temperature, top_k, full

    async def start(self) -> None:
        await self.engine.start()

    async def teach(self, group: GroupTokens) -> tuple[int, list[Scores]]:
        """(tokens scored, scores of each sample): the first for the controller, the second for the
        trainer."""
        prompt = group.prompt_ids.tolist()
        scores = await self.engine.score(
            [prompt + sample.tokens.tolist() for sample in group.samples],
            [len(prompt)] * len(group.samples),
            top_k=self.top_k,
            full=self.full,
            temperature=self.temperature,
        )
        return sum(len(sample.tokens) for sample in group.samples), scores

    async def stats(self) -> EngineStats:
        return self.engine.stats()

    async def stop(self) -> None:
        await self.engine.stop()
