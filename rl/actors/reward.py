"""The rule's shell: verifiable rewards, computed in a process of their own."""

from __future__ import annotations

from collections.abc import Sequence

from rl.rewards import RULES
from rl.types import Outcome, Prompt


class Reward:
    def __init__(self, rule: str) -> None:
        self.rule = RULES[rule]

    async def start(self) -> None:
        pass

    async def rate(self, prompt: Prompt, texts: Sequence[str]) -> list[Outcome]:
        return [self.rule(prompt, text) for text in texts]

    async def stop(self) -> None:
        pass
