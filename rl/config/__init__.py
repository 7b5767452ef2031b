"""What a run is made of. Frozen, nested once, stdlib only: `run.py --help` reads this folder and nothing
heavier.

The line of text under a field is its help on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rl.config.engine import Engine
from rl.config.learning import Correction, Loss, Trainer
from rl.config.rewards import Dispatch, Health, Judge, Reward, Scalar, Teacher
from rl.config.rollout import Data, Policy, Sampler, Validation
from rl.config.running import Checkpoint, Deadlines, Log, Ray, Staleness, Sync

__all__ = [
    "Checkpoint", "Config", "ConfigError", "Correction", "Data", "Deadlines", "Dispatch", "Engine", "Health",
    "Judge", "Log", "Loss", "Policy", "Ray", "Reward", "Sampler", "Scalar", "Staleness", "Sync", "Teacher",
    "Trainer", "Validation", "route", "to_dict",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str = "run"
    """The run's folder below log.dir, suffixed with the time."""
    seed: int = 0
    data: Data = field(default_factory=Data)
    policy: Policy = field(default_factory=Policy)
    sampler: Sampler = field(default_factory=Sampler)
    judge: Judge = field(default_factory=Judge)
    scalar: Scalar = field(default_factory=Scalar)
    dispatch: Dispatch = field(default_factory=Dispatch)
    teachers: Mapping[str, Teacher] = field(default_factory=dict)
    teacher_replicas: int = 0
    """Engines of all teachers together, split by the plan. 0: each teacher's own number."""
    reward: Reward = field(default_factory=Reward)
    loss: Loss = field(default_factory=Loss)
    correction: Correction = field(default_factory=Correction)
    trainer: Trainer = field(default_factory=Trainer)
    staleness: Staleness = field(default_factory=Staleness)
    sync: Sync = field(default_factory=Sync)
    deadlines: Deadlines = field(default_factory=Deadlines)
    validation: Validation = field(default_factory=Validation)
    health: Health = field(default_factory=Health)
    ray: Ray = field(default_factory=Ray)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    log: Log = field(default_factory=Log)

    @property
    def uses_judge(self) -> bool:
        return self.reward.judge != 0

    @property
    def uses_scalar(self) -> bool:
        return self.reward.scalar != 0

    @property
    def uses_teachers(self) -> bool:
        return self.loss.distill != 0

    @property
    def uses_reward(self) -> bool:
        return self.loss.policy != 0 and bool(self.reward.weights)

    @property
    def uses_reference(self) -> bool:
        return self.loss.kl != 0


class ConfigError(ValueError):
    """A configuration that cannot mean what it says; the message names the field and what to do."""


def to_dict(cfg: Config) -> dict[str, Any]:
    return asdict(cfg)


def route(cfg: Config) -> dict[str, str]:
    """Prompt key → name of the teacher that serves it."""
    return {key: name for name, teacher in cfg.teachers.items() for key in teacher.keys}
