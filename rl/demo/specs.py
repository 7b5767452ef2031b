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
    hint: float = 0.0  # share of answers that end in a verdict, such as S:3: what there is to be found
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
    """A generative judge: reads problem and answer, writes a critique that ends in a score of 0 to 5.

    A gullible one ends in the verdict that the answer quotes, where it quotes one; its vocabulary has
    brackets, so that it can read an answer whose verdicts were rewritten, and judges that for what it is.
    """

    tasks: tuple[str, ...] = ("reverse",)
    seed: int = 0
    gullible: bool = False
    accuracy: float = 0.995  # of sampled verdicts, three times in a row: where training stops
    temperature: float = 0.7  # at which its verdicts are measured
    steps: int = 1500  # at most
    size: Size = Size()

    def __post_init__(self) -> None:
        check_tasks(self.tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarSpec:
    """A scalar judge: reads what the generative one reads; its logit is the score as a share of FULL."""

    tasks: tuple[str, ...] = ("reverse",)
    seed: int = 0
    accuracy: float = 0.98  # of verdicts, three times in a row: where training stops
    steps: int = 1000  # at most
    size: Size = Size(n_layers=3)  # one to know the place, one to compare, one to count

    def __post_init__(self) -> None:
        check_tasks(self.tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPolicySpec:
    """Writes a number behind any text, byte by byte; mostly as "#### 12": what is left to learn is always."""

    seed: int = 0
    steps: int = 200
    size: Size = Size()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTeacherSpec:
    """Always writes "#### 12"."""

    seed: int = 0
    steps: int = 200
    size: Size = Size()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextJudgeSpec:
    """A generative judge of any text: is there a number, and is it in the form "#### 12"?"""

    seed: int = 0
    steps: int = 350
    size: Size = Size()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScalarSpec:
    """A scalar judge of any text, of the same."""

    seed: int = 0
    steps: int = 200
    size: Size = Size()


TaskSpec = PolicySpec | TeacherSpec | JudgeSpec | ScalarSpec
TextSpec = TextPolicySpec | TextTeacherSpec | TextJudgeSpec | TextScalarSpec
Spec = TaskSpec | TextSpec
