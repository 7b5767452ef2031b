"""Stand-ins for the actors, in this process: they take time, fail and lie on demand. The loop under test is
real."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from experiments.genrm_grpo import CONFIG
from rl.batch import GroupTokens
from rl.config import Checkpoint, Config, Log
from rl.data.prompts import Stream
from rl.display import Display
from rl.engines.base import EngineStats, UpdateReport
from rl.log import RunLog
from rl.loop import Loop
from rl.rewards.producers import Pooled
from rl.roles import Local, Pool, Roles, TrainerGroup
from rl.sync import Manifest
from rl.types import Completion, Prompt, SampleMeta, Score, Verdict
from rl.wire.parcel import Place


def small(steps=6, prompts=3, samples=2, **sections) -> Config:
    return replace(
        CONFIG,
        trainer=replace(CONFIG.trainer, steps=steps, prompts=prompts),
        sampler=replace(CONFIG.sampler, samples=samples),
        checkpoint=Checkpoint(every=0),
        log=Log(wandb="disabled"),
        **sections,
    )


@dataclass
class FakeSampler:
    delay: Callable[[int], float] = lambda call: 0.0  # seconds of the n-th group
    version: int = 0
    calls: int = 0
    finished: int = 0
    aborted: set[str] = field(default_factory=set)
    text: str = "x"
    corrupt_at: int = -1  # version at which it loses a tensor
    name: str = "sampler-0"

    async def start(self) -> None: ...

    async def place(self):
        return Place()

    async def generate(self, prompt_ids, seeds, request_id):
        self.calls += 1
        first, left = self.version, self.delay(self.calls)
        while left > 0 and request_id not in self.aborted:
            await asyncio.sleep(min(0.005, left))
            left -= 0.005
        self.finished += 1
        finish = "abort" if request_id in self.aborted else "stop"
        versions = np.array([first, self.version], np.int32)
        sample = Completion(tokens=np.array([1, 2]), logps=np.zeros(2), versions=versions, finish=finish)
        meta = SampleMeta(
            text=self.text,
            n_tokens=2,
            finish=finish,
            version_min=first,
            version_max=self.version,
            engine=self.name,
        )
        return [meta] * len(seeds), GroupTokens(np.array(prompt_ids), (sample,) * len(seeds))

    async def update(self, version, weights, mode):
        self.version = version
        sums = {"a": weights["a"] + (version == self.corrupt_at)}
        return UpdateReport(version=version, checksums=sums, probe=(0.0,))

    async def abort(self, request_id):
        self.aborted.add(request_id)
        return 1

    async def stats(self):
        return EngineStats(
            version=self.version,
            running=0,
            waiting=0,
            sampled_tokens=0,
            prompt_tokens=0,
            busy_s=0.0,
            wall_s=1.0,
        )

    async def stop(self) -> None: ...


@dataclass
class FakeTrainer:
    """Records what it was given to train: ages of all tokens, and every lesson."""

    max_age: int
    delay: float = 0.0
    version: int = 0
    ages: list[int] = field(default_factory=list)
    lessons: list = field(default_factory=list)
    packed: int = -1  # version of the published weights
    sampled: set[int] = field(default_factory=set)  # versions of all trained tokens
    fed: list[tuple[int, int]] = field(default_factory=list)  # (version, groups) of each part of a step
    scales: list[float] = field(default_factory=list)
    staged: int = -1  # version that a checkpoint is to have
    writing: float = 0.0  # seconds that its writing takes

    async def rendezvous(self):
        return "127.0.0.1", 0

    async def start(self, host, port) -> None: ...

    async def load(self, path, version):
        self.version = version

    async def step(self, errand, *arrays):
        await self.feed(errand, *arrays)
        return await self.finish(1.0)

    async def feed(self, errand, *arrays):
        self.fed.append((self.version, len(errand.groups)))
        await asyncio.sleep(self.delay)
        for group in arrays:
            for sample in group.samples:
                ages = self.version - sample.versions
                assert 0 <= ages.min() and ages.max() <= self.max_age, (
                    "a token older than the bound was trained"
                )
                self.ages += ages.tolist()
                self.sampled |= set(sample.versions.tolist())
        self.lessons += errand.lessons

    async def finish(self, scale):
        self.scales.append(scale)
        self.version += 1
        return {"loss/total": 0.0}

    async def publish(self):
        self.packed = self.version

    async def place(self):
        return Place()

    async def manifest(self):
        return Manifest(version=self.packed, checksums={"a": 100 + self.packed}, probe=(0.0,))

    async def arrays(self):
        return 8, {"a": 100 + self.packed}

    async def stage(self):
        self.staged = self.version

    async def write(self, path):
        await asyncio.sleep(self.writing)
        (Path(path) / "weights").write_text(str(self.staged))
        (Path(path) / "rank_0").touch()

    async def write_policy(self, path): ...

    async def stop(self) -> None: ...


@dataclass
class FakeJudge:
    """verdict(call, answer) says what becomes of each answer; it may raise."""

    verdict: Callable[[int, int], Verdict] = lambda call, i: Verdict(outcome=Score(float(i % 2)))
    delay: float = 0.0
    calls: int = 0

    async def start(self) -> None: ...

    async def rate(self, prompt, texts):
        self.calls += 1
        call = self.calls
        await asyncio.sleep(self.delay)
        return [self.verdict(call, i) for i in range(len(texts))]

    async def stats(self):
        return await FakeSampler().stats()

    async def stop(self) -> None: ...


def make_roles(cfg: Config, sampler=None, trainer=None, judge=None) -> Roles:
    pool = Pool([Local("judge-0", judge or FakeJudge())])
    return Roles(
        trainer=TrainerGroup([Local("trainer-0", trainer or FakeTrainer(cfg.staleness.max_age))]),
        sampler=Pool([Local("sampler-0", sampler or FakeSampler())]),
        judges={"judge": pool},
        producers={"judge": Pooled(pool, cfg.deadlines.judge)},
    )


def make_loop(folder: Path, cfg: Config, sampler=None, trainer=None, judge=None, **state) -> Loop:
    """state: fields of the loop; roles and prompts are made where they are not given."""
    prompts = state.pop("prompts", [Prompt(ids=(i,), text=str(i), answer="x") for i in range(10)])
    roles = state.pop("roles", None) or make_roles(cfg, sampler, trainer, judge)
    return Loop(
        cfg=cfg,
        roles=roles,
        stream=Stream(prompts, seed=0),
        held_out=prompts[:2],
        log=RunLog(folder, cfg),
        show=Display(cfg.trainer.steps, console=Console(file=io.StringIO())),
        **state,
    )


def finish(loop: Loop, seconds: float = 30.0) -> dict:
    async def bounded():
        async with asyncio.timeout(seconds):
            return await loop.run()

    return asyncio.run(bounded())
