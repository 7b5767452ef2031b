"""The sampler's shell: prompt ids in; what the controller must know and the token arrays out, apart."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl.batch import GroupTokens
from rl.config import Engine
from rl.engines.base import EngineStats, PauseMode, UpdateReport
from rl.engines.build import build
from rl.engines.make import Bundle
from rl.types import Completion, SampleMeta, SamplingParams

CPU = Engine()


class Rollout:
    def __init__(
        self, bundle: Bundle, params: SamplingParams, slots: int, version: int = 0, engine: Engine = CPU
    ) -> None:  # fmt: skip
        self.engine = build(bundle, engine, slots=slots, version=version)
        self.tokenizer, self.params = bundle.tokenizer, params

    async def start(self) -> UpdateReport:
        await self.engine.start()
        return await self.engine.report()

    async def generate(
        self, prompt_ids: Sequence[int], seeds: Sequence[int], request_id: str
    ) -> tuple[list[SampleMeta], GroupTokens]:
        samples: dict[int, Completion] = {}
        async for i, sample in self.engine.generate(
            prompt_ids, params=self.params, seeds=seeds, request_id=request_id
        ):
            samples[i] = sample
        group = GroupTokens(np.asarray(prompt_ids, np.int32), tuple(samples[i] for i in range(len(seeds))))
        return [self._meta(sample) for sample in group.samples], group

    def _meta(self, sample: Completion) -> SampleMeta:
        return SampleMeta(
            text=self.tokenizer.decode(sample.tokens.tolist()),
            n_tokens=len(sample.tokens),
            finish=sample.finish,
            version_min=sample.version_min,
            version_max=int(sample.versions.max(initial=0)),
        )

    async def update(self, version: int, weights: Mapping[str, Any], mode: PauseMode) -> UpdateReport:
        return await self.engine.update(version, weights, mode=mode)

    async def abort(self, request_id: str) -> int:
        return await self.engine.abort(request_id)

    async def stats(self) -> EngineStats:
        return self.engine.stats()

    async def stop(self) -> None:
        await self.engine.stop()


class Snapshot:
    """A rollout that stands still between calls, inside an actor without an event loop: the weights of one
    version, kept while the trainer goes on with others."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout, self.runner, self.started = rollout, asyncio.Runner(), False

    def hold(self, version: int, weights: Mapping[str, Any]) -> UpdateReport:
        return self.runner.run(self._hold(version, weights))

    async def _hold(self, version: int, weights: Mapping[str, Any]) -> UpdateReport:
        if not self.started:
            await self.rollout.start()
            self.started = True
        return await self.rollout.update(version, weights, "wait")

    def answer(self, asked: Sequence[tuple[Sequence[int], int]]) -> list[SampleMeta]:
        """One sample for each (prompt ids, seed)."""
        return self.runner.run(self._answer(asked))

    async def _answer(self, asked: Sequence[tuple[Sequence[int], int]]) -> list[SampleMeta]:
        calls = (self.rollout.generate(ids, [seed], f"held-{i}") for i, (ids, seed) in enumerate(asked))
        return [metas[0] for metas, _ in await asyncio.gather(*calls)]
