"""The sampler's shell: prompt ids in; what the controller must know and the token arrays out, apart."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rl.batch import GroupTokens
from rl.config import Engine
from rl.engines.base import Engine as EngineInterface
from rl.engines.base import EngineStats, PauseMode, UpdateReport
from rl.engines.build import build
from rl.engines.make import Bundle
from rl.follow import Broken
from rl.types import Completion, SampleMeta, SamplingParams
from rl.wire.parcel import Parcel, Place

CPU = Engine()
NO_IDS, NO_LOGPS = np.zeros(0, np.int32), np.zeros(0, np.float32)


class Rollout:
    def __init__(
        self,
        bundle: Bundle,
        params: SamplingParams,
        slots: int,
        version: int = 0,
        engine: Engine = CPU,
        name: str = "sampler",
    ) -> None:
        blank = engine.kind == "vllm"  # its first weights come as all later ones do
        own = replace(bundle, weights={}) if blank else bundle
        self._make = partial(build, own, engine, slots=slots, version=version)
        self._starting = asyncio.Lock()
        self._engine: EngineInterface | None = None
        self.tokenizer, self.params, self.name = bundle.tokenizer, params, name
        self._vocab_size = bundle.cfg.vocab_size

    async def start(self) -> None:
        """Harmless where an engine runs, enough where it has failed: the new one has the first weights."""
        async with self._starting:
            if self._engine is not None and _alive(self._engine):
                return
            engine = self._make()
            await engine.start()
            self._engine = engine

    @property
    def engine(self) -> EngineInterface:
        if self._engine is None:
            raise RuntimeError(f"{self.name}: not started")
        return self._engine

    async def place(self) -> Place:
        return await self.engine.place()

    async def generate(
        self, prompt_ids: Sequence[int], seeds: Sequence[int], request_id: str
    ) -> tuple[list[SampleMeta], GroupTokens]:
        """One of each per seed. A sample that cannot be trained is `Broken`, and stands without tokens."""
        samples: dict[int, Completion] = {}
        async for i, sample in self.engine.generate(
            prompt_ids, params=self.params, seeds=seeds, request_id=request_id
        ):
            samples[i] = sample
        found = [samples.get(i) for i in range(len(seeds))]
        faults = [fault(sample, self._vocab_size) for sample in found]
        sound = [sample for sample, why in zip(found, faults, strict=True) if sample and not why]
        version = min((sample.version_min for sample in sound), default=0)
        told = [self._told(sample, why, version) for sample, why in zip(found, faults, strict=True)]
        group = GroupTokens(np.asarray(prompt_ids, np.int32), tuple(sample for _, sample in told))
        return [meta for meta, _ in told], group

    def _told(self, sample: Completion | None, why: str, version: int) -> tuple[SampleMeta, Completion]:
        """version: that of a broken sample's mates, so that it makes its group neither older nor younger."""
        if sample is None or why:
            finish = sample.finish if sample else "stop"
            meta = Broken(
                engine=self.name,
                text="",
                n_tokens=0,
                finish=finish,
                version_min=version,
                version_max=version,
                fault=why,
            )
            return meta, Completion(tokens=NO_IDS, logps=NO_LOGPS, versions=NO_IDS, finish=finish)
        meta = SampleMeta(
            engine=self.name,
            text=self.tokenizer.decode(sample.tokens.tolist()),
            n_tokens=len(sample.tokens),
            finish=sample.finish,
            version_min=sample.version_min,
            version_max=int(sample.versions.max()),
        )
        return meta, sample

    async def update(self, version: int, weights: Parcel, mode: PauseMode) -> UpdateReport:
        return await self.engine.update(version, weights, mode=mode)

    async def abort(self, request_id: str) -> int:
        return await self.engine.abort(request_id)

    async def stats(self) -> EngineStats:
        return self.engine.stats()

    async def stop(self) -> None:
        if self._engine is not None:
            await self._engine.stop()


def fault(sample: Completion | None, vocab_size: int) -> str:
    """Why a sample cannot be trained; empty: it can."""
    if sample is None:
        return "the engine did not send it"
    columns = {"tokens": "iu", "logps": "f", "versions": "iu"}
    found = {name: np.asarray(getattr(sample, name)) for name in columns}
    for name, column in found.items():
        if column.ndim != 1 or column.dtype.kind not in columns[name]:
            return f"its {name} are {column.dtype} {column.shape}"
    if not len(sample.tokens) or len({len(column) for column in found.values()}) > 1:
        return f"it has {', '.join(f'{len(column)} {name}' for name, column in found.items())}"
    if not np.isfinite(sample.logps).all():
        return "not all of its logps are finite"
    if sample.tokens.min() < 0 or sample.tokens.max() >= vocab_size:
        return f"its tokens are not all among the {vocab_size} of the vocabulary"
    return ""


def _alive(engine: EngineInterface) -> bool:
    try:
        engine.stats()
    except RuntimeError:
        return False
    return True


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
