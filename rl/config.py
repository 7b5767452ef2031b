"""What a run is made of. Frozen, nested once, stdlib only: `run.py --help` reads this file and nothing
heavier.

The line of text under a field is its help on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Data:
    file: str | None = None
    """JSONL with one prompt a line: {"prompt", "answer"?, "key"?, ...}. None: the demo's own tasks."""
    tasks: tuple[Literal["reverse", "sort", "add"], ...] = ("reverse",)
    """Demo tasks: reverse, sort, add. The task's name is the prompt's key."""
    size: int = 20_000
    """Demo prompts generated for training."""
    held_out: int = 512
    """Held-out prompts: judged and checked before and after, never trained on. A file gives its last ones."""
    shuffle: bool = True
    """A new order every epoch, a function of the seed and the epoch alone."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    model: str = "demo"
    """"demo" (built and cached), or a Hugging Face folder."""
    warm_accuracy: float = 0.3
    """Demo only: the supervised warm-up stops at this sampled accuracy."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    replicas: int = 1
    samples: int = 8
    """G: samples of one prompt, the group of GRPO."""
    temperature: float = 1.0
    max_tokens: int = 8
    slots: int = 256
    """Sequences that one engine runs at a time."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    model: str = "demo"
    """"demo" (built and cached for the data's tasks), or a Hugging Face folder."""
    replicas: int = 1
    template: str = "j{problem}{candidate}?"
    """Fields: {problem}, {candidate}, {reference}."""
    delimiter: str | None = None
    """Put the candidate between <delimiter> tags. None: the template itself delimits it, as the demo's."""
    neutralise: bool = False
    """Rewrite what looks like a verdict in the candidate; the demo's alphabet has no characters for it."""
    label: str = "S:"
    """The score stands after the last occurrence of this label in the judge's own text."""
    lo: float = 0.0
    hi: float = 5.0
    """Declared bounds: what lies outside is a parse failure, never clamped."""
    temperature: float = 0.7
    max_tokens: int = 32
    slots: int = 256


@dataclass(frozen=True, kw_only=True)
class Teacher:
    model: str = "demo"
    """"demo" (built and cached for its keys), or a Hugging Face folder with the policy's vocabulary."""
    keys: tuple[str, ...] = ()
    """Prompt keys that this teacher serves."""
    replicas: int = 1
    slots: int = 256


@dataclass(frozen=True, kw_only=True)
class Reward:
    judge: float = 0.0
    """Weight of the generative judge's score, normalised to [0, 1]. 0: no judge is started."""
    rule: float = 0.0
    """Weight of the verifiable rule: 1 if the answer is right, else 0."""
    rule_name: Literal["exact"] = "exact"


@dataclass(frozen=True, kw_only=True)
class Loss:
    policy: float = 1.0
    """Coefficient of the clipped policy-gradient term (GRPO)."""
    eps_low: float = 0.2
    eps_high: float = 0.28
    """Clip-higher (DAPO, arXiv 2503.14476)."""
    dual_clip: float | None = None
    """Upper bound c of the loss ratio for negative advantages, c > 1. None: off."""
    scale: Literal["std", "none"] = "std"
    """Divide the centred reward by the group's standard deviation (GRPO) or not (Dr.GRPO)."""
    agg: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant", "prompt_mean"] = (
        "token_mean"
    )
    """How per-token losses become one number; from global counts, whatever the split."""
    zero_signal: Literal["keep", "drop"] = "keep"
    """Groups whose rewards are all equal: train them (their policy gradient is zero), or drop and admit
    others."""
    kl: float = 0.0
    """Coefficient of the KL to the frozen initial policy. 0: no reference is loaded."""
    kl_form: Literal["k2", "k3"] = "k2"
    """k2's gradient is that of the reverse KL; k3's is that of the forward KL (losses/kl.py). k1 has none
    in expectation."""
    distill: float = 0.0
    """Coefficient of the distillation from the prompt's teacher. 0: no teacher is started."""
    distill_form: Literal["divergence", "advantage"] = "divergence"
    """Back-propagate the divergence itself, or add -(logp - teacher_logp) to the advantage."""
    distill_kind: Literal["reverse", "forward"] = "reverse"
    distill_top_k: int = 0
    """Teacher log-probs sent per token: 0 = the whole vocabulary, else the K best and the tail's mass."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    steps: int = 250
    prompts: int = 32
    """B: groups per optimiser step, counted over all ranks."""
    lr: float = 5e-4
    warmup: int = 5
    """Steps of linear warm-up."""
    final_lr: float = 0.1
    """Share of lr that is left at the last step, reached linearly. 1: constant."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    """Bound on the global gradient norm. 0: off."""
    ranks: int = 1
    """FSDP2 processes."""
    micro_tokens: int = 8192
    """Tokens (prompt and answer) of one packed micro-batch, at most."""
    compile: bool | None = None
    """torch.compile each block and the loss. None: on for CUDA, off on CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 1
    """CPU threads of one rank."""


@dataclass(frozen=True, kw_only=True)
class Staleness:
    max_age: int = 2
    """η: no token older than this many versions is ever trained. 0 is exactly synchronous training."""
    late: Literal["drop", "wait"] = "drop"
    """A group that is not ready when its step could start: left behind (and dropped once too old), or
    waited for."""
    weights: Literal["keep", "recompute", "wait"] = "keep"
    """What new weights do to running samples: go on over the old KV cache, re-prefill, or finish first."""
    attempts: int = 8
    """How often one prompt is issued at most, counting re-issues after staleness or failure."""


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    start: float = 120.0
    """Seconds until every engine and trainer rank must be up."""
    generate: float = 120.0
    judge: float = 60.0
    teach: float = 60.0
    train: float = 300.0
    sync: float = 60.0
    patience: int = 2000
    """Groups in a row that may be dropped without one becoming ready; then the run ends and says why."""


@dataclass(frozen=True, kw_only=True)
class Ray:
    address: str | None = None
    """None: a private cluster on this machine. "auto" or host:port: join a running one."""
    spread: bool = False
    """Place the actors over as many nodes as there are, instead of as few as possible."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    every: int = 50
    """Steps between checkpoints; one more at the end. 0: none."""
    keep: int = 2


@dataclass(frozen=True, kw_only=True)
class Log:
    dir: str = "runs"
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online where an account is configured, else offline. metrics.jsonl is always written."""
    project: str = "viva"


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str = "run"
    """The run's folder below log.dir, suffixed with the time."""
    seed: int = 0
    data: Data = field(default_factory=Data)
    policy: Policy = field(default_factory=Policy)
    sampler: Sampler = field(default_factory=Sampler)
    judge: Judge = field(default_factory=Judge)
    teachers: Mapping[str, Teacher] = field(default_factory=dict)
    reward: Reward = field(default_factory=Reward)
    loss: Loss = field(default_factory=Loss)
    trainer: Trainer = field(default_factory=Trainer)
    staleness: Staleness = field(default_factory=Staleness)
    deadlines: Deadlines = field(default_factory=Deadlines)
    ray: Ray = field(default_factory=Ray)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    log: Log = field(default_factory=Log)

    @property
    def uses_judge(self) -> bool:
        return self.reward.judge != 0

    @property
    def uses_teachers(self) -> bool:
        return self.loss.distill != 0

    @property
    def uses_reward(self) -> bool:
        return self.loss.policy != 0 and (self.reward.judge != 0 or self.reward.rule != 0)

    @property
    def uses_reference(self) -> bool:
        return self.loss.kl != 0


class ConfigError(ValueError):
    """A configuration that cannot mean what it says; the message names the field and what to do."""


def to_dict(cfg: Config) -> dict[str, Any]:
    return asdict(cfg)


def check(cfg: Config) -> None:
    """Raises ConfigError with every fault found, one a line, before anything starts."""
    faults = [message for bad, message in _rules(cfg) if bad]
    if faults:
        raise ConfigError("\n".join(faults))


def _rules(cfg: Config) -> list[tuple[bool, str]]:
    s, t, loss, st = cfg.sampler, cfg.trainer, cfg.loss, cfg.staleness
    sampled_only = loss.distill_form == "advantage"
    return [
        (st.max_age < 0, f"staleness.max_age (η) must be >= 0, got {st.max_age}; 0 is synchronous training"),
        (st.attempts < 1, f"staleness.attempts must be >= 1, got {st.attempts}"),
        (s.samples < 1, f"sampler.samples must be >= 1, got {s.samples}"),
        (
            cfg.uses_reward and s.samples == 1,
            "sampler.samples is 1 but the policy term uses a group baseline, so every advantage is zero: "
            "use sampler.samples >= 2, or loss.policy 0 with a teacher",
        ),
        (
            s.temperature <= 0,
            f"sampler.temperature must be > 0, got {s.temperature}: greedy samples teach nothing",
        ),
        (s.max_tokens < 1, f"sampler.max_tokens must be >= 1, got {s.max_tokens}"),
        (
            s.slots < s.samples,
            f"sampler.slots ({s.slots}) cannot hold a group of sampler.samples ({s.samples})",
        ),
        (s.replicas < 1, f"sampler.replicas must be >= 1, got {s.replicas}"),
        (t.steps < 1, f"trainer.steps must be >= 1, got {t.steps}"),
        (t.prompts < 1, f"trainer.prompts must be >= 1, got {t.prompts}"),
        (t.ranks < 1, f"trainer.ranks must be >= 1, got {t.ranks}"),
        (
            t.prompts < t.ranks,
            f"trainer.prompts ({t.prompts}) must be >= trainer.ranks ({t.ranks}): every rank needs a group",
        ),
        (t.lr < 0, f"trainer.lr must be >= 0, got {t.lr}"),
        (not 0 <= t.final_lr <= 1, f"trainer.final_lr is a share of lr, in [0, 1], got {t.final_lr}"),
        (t.micro_tokens < 1, f"trainer.micro_tokens must be >= 1, got {t.micro_tokens}"),
        (
            not 0 <= loss.eps_low <= 1 or loss.eps_high < 0,
            f"loss.eps_low must lie in [0, 1] and loss.eps_high be >= 0, got {loss.eps_low}, {loss.eps_high}",
        ),
        (
            loss.dual_clip is not None and loss.dual_clip <= 1,
            f"loss.dual_clip must be > 1, got {loss.dual_clip}",
        ),
        (
            loss.policy == 0 and loss.distill == 0,
            "nothing to learn from: loss.policy and loss.distill are both 0",
        ),
        (
            loss.policy != 0 and not cfg.uses_reward and not (cfg.uses_teachers and sampled_only),
            "loss.policy needs an advantage: set reward.judge or reward.rule, or distil with "
            "loss.distill_form advantage, or set loss.policy 0",
        ),
        (
            cfg.uses_teachers and sampled_only and loss.policy == 0,
            "loss.distill_form advantage acts through the policy term: set loss.policy 1",
        ),
        (
            cfg.uses_teachers and sampled_only and loss.distill_top_k != 0,
            "loss.distill_top_k has no effect with loss.distill_form advantage: set it to 0",
        ),
        (cfg.uses_teachers and not cfg.teachers, "loss.distill is not 0 but there are no teachers"),
        (
            cfg.uses_judge and not cfg.judge.lo < cfg.judge.hi,
            f"judge.lo must be below judge.hi, got {cfg.judge.lo} and {cfg.judge.hi}",
        ),
        (
            cfg.uses_judge and "{candidate}" not in cfg.judge.template,
            "judge.template must contain {candidate}",
        ),
        (cfg.data.held_out < 0, f"data.held_out must be >= 0, got {cfg.data.held_out}"),
        *_teacher_rules(cfg),
    ]


def _teacher_rules(cfg: Config) -> list[tuple[bool, str]]:
    owners: dict[str, str] = {}
    rules = []
    for name, teacher in cfg.teachers.items():
        rules.append((not teacher.keys, f"teachers.{name}.keys is empty: it would never be asked"))
        for key in teacher.keys:
            rules.append((key in owners, f"key {key!r} has two teachers, {owners.get(key)} and {name}"))
            owners[key] = name
    return rules


def route(cfg: Config) -> dict[str, str]:
    """Prompt key → name of the teacher that serves it."""
    return {key: name for name, teacher in cfg.teachers.items() for key in teacher.keys}
