"""The shells of rewards without a model: rules, and users' functions in processes that can be killed."""

from __future__ import annotations

from collections.abc import Sequence

from rl.function_pool import FunctionPool
from rl.functions import Rated
from rl.rewards import RULES
from rl.types import Prompt


class Reward:
    def __init__(self, rule: str) -> None:
        self.rule = RULES[rule]

    async def start(self) -> None:
        pass

    async def rate(self, prompt: Prompt, texts: Sequence[str]) -> list[Rated]:
        return [(self.rule(prompt, text), {}) for text in texts]

    async def stop(self) -> None:
        pass


class Function:
    def __init__(self, spec: str, workers: int, deadline: float) -> None:
        self.pool = FunctionPool(spec, workers=workers, deadline=deadline)

    async def start(self) -> None:
        await self.pool.start()

    async def rate(self, prompt: Prompt, texts: Sequence[str]) -> list[Rated]:
        return await self.pool.score(prompt, texts)

    async def stop(self) -> None:
        await self.pool.stop()
