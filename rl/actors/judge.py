"""The generative judge's shell: questions in, replies out. It runs an engine, or speaks to a server."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace

from rl.config import Judge as JudgeConfig
from rl.engines.base import EngineStats
from rl.engines.make import Bundle
from rl.judges.http import OpenAIClient
from rl.judges.local import LocalJudge
from rl.types import Ask, Reply


class Judge:
    """Of `bundle` and `url` one is given: our own engine, or the address of an OpenAI-compatible server."""

    def __init__(
        self, bundle: Bundle | None, cfg: JudgeConfig, url: str | None = None, name: str = "judge"
    ) -> None:
        self.name = name
        self.judge: LocalJudge | OpenAIClient
        match bundle, url:
            case Bundle(), None:
                self.judge = LocalJudge(bundle, cfg)
            case None, str():
                self.judge = OpenAIClient(
                    url,
                    cfg.model,
                    key=os.environ.get(cfg.api_key),
                    temperature=cfg.temperature,
                    max_tokens=cfg.max_tokens,
                    connections=cfg.slots,
                )
            case _:
                raise ValueError(f"{name}: expected a model or a url, got {'both' if url else 'neither'}")

    async def start(self) -> None:
        """Harmless to a judge that runs, enough for one that was born anew or whose engine failed. Raises
        RuntimeError where a server cannot be reached."""
        await self.judge.start()

    async def answer(self, asks: Sequence[Ask], seconds: float = math.inf) -> list[Reply]:
        """One reply per question, in their order. What fails, or is not there in `seconds`, fails alone."""
        return [replace(reply, replica=self.name) for reply in await self.judge.answer(asks, seconds)]

    async def stats(self) -> EngineStats:
        return self.judge.stats()

    async def stop(self) -> None:
        await self.judge.stop()
