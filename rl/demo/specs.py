"""What the demo can build. Frozen; together with the sources it names a folder of the cache."""

from __future__ import annotations

from dataclasses import dataclass

from rl.demo.tasks import check_tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """About 0.1M parameters as it stands."""

    d_model: int = 64
    n_layers: int = 2
    n_heads: int = 4
    head_dim: int = 32  # the smallest that vLLM runs on a CPU
    d_ff: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """A policy to improve: half of the answers that it learned from had one wrong digit."""

    tasks: tuple[str, ...] = ("reverse",)
    seed: int = 0
    accuracy: float = 0.3  # sampled, on every task: where the warm-up stops
    steps: int = 1500  # at most
    size: Size = Size()

    def __post_init__(self) -> None:
        check_tasks(self.tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSpec:
    """A model that has the skill."""

    tasks: tuple[str, ...]
    seed: int = 0
    accuracy: float = 0.98  # sampled, on every task, twice in a row: where training stops
    steps: int = 1500  # at most
    size: Size = Size()

    def __post_init__(self) -> None:
        check_tasks(self.tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSpec:
    """A generative judge: reads problem and answer, writes a critique that ends in a score of 0 to 5."""

    tasks: tuple[str, ...] = ("reverse",)
    seed: int = 0
    accuracy: float = 0.995  # of sampled verdicts, three times in a row: where training stops
    temperature: float = 0.7  # at which its verdicts are measured
    steps: int = 1500  # at most
    size: Size = Size()

    def __post_init__(self) -> None:
        check_tasks(self.tasks)


Spec = PolicySpec | TeacherSpec | JudgeSpec
