"""The shells of rewards without a model: rules, and users' functions in processes that can be killed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rl.config import Reward as RewardConfig
from rl.rewards.combine import RULES
from rl.rewards.function_pool import FunctionPool
from rl.types import Prompt, Verdict


def sandbox(cfg: RewardConfig) -> dict[str, Any]:
    """What verl hands to functions that run code on a server; the bound on calls is shared by the workers."""
    if not cfg.sandbox_url:
        return {}
    return {
        "sandbox_fusion_url": cfg.sandbox_url,
        "concurrent_semaphore": max(1, cfg.sandbox_concurrency // cfg.fn_workers),
        "memory_limit_mb": cfg.sandbox_memory_mb,
    }


class Reward:
    def __init__(self, rule: str) -> None:
        self.rule = RULES[rule]

    async def start(self) -> None:
        pass

    async def rate(self, prompt: Prompt, texts: Sequence[str]) -> list[Verdict]:
        return [Verdict(outcome=self.rule(prompt, text)) for text in texts]

    async def stop(self) -> None:
        pass


class Function:
    def __init__(self, spec: str, cfg: RewardConfig) -> None:
        """spec: path/to/file.py:name, the path absolute."""
        self.pool = FunctionPool(
            spec,
            workers=cfg.fn_workers,
            deadline=cfg.fn_deadline,
            fixed=json.loads(cfg.fn_kwargs) if cfg.fn_kwargs else {},
            offered=sandbox(cfg),
        )

    async def start(self) -> None:
        await self.pool.start()

    async def rate(self, prompt: Prompt, texts: Sequence[str]) -> list[Verdict]:
        rated = await self.pool.score(prompt, texts)
        return [Verdict(outcome=outcome, told=metrics) for outcome, metrics in rated]

    async def stop(self) -> None:
        await self.pool.stop()
