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
    rule_name: Literal["exact", "gsm8k"] = "exact"
    """The ground truth, also of the metrics. exact: the text is the answer. gsm8k: its final number is."""
    fn: tuple[str, ...] = ()
    """Your functions, each "path/to/file.py:name", with our signature or verl's (rl/functions.py)."""
    fn_weights: tuple[float, ...] = ()
    """One weight per function. Empty: 1 each."""
    fn_workers: int = 2
    """Processes of each function."""
    fn_deadline: float = 10.0
    """Seconds of one call; a call that takes longer is killed, and the reward is missing."""

    @property
    def weights(self) -> dict[str, float]:
        """Producer → weight, of those that are used; a function goes by its place, fn/0, fn/1, ..."""
        weights = self.fn_weights or (1.0,) * len(self.fn)
        named = {"judge": self.judge, "rule": self.rule, **{f"fn/{i}": w for i, w in enumerate(weights)}}
        return {name: weight for name, weight in named.items() if weight}


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Every term is coef · Σ weight · term. A number left at None is the paper's own (losses/README.md)."""

    advantage: Literal[
        "grpo", "dr_grpo", "batch_std", "rloo", "gpg", "maxrl", "passk", "best_of_group", "opo",
        "reinforce_pp_baseline",
    ] = "grpo"  # fmt: skip
    """What a reward is measured against."""
    k: int = 4
    """The k of advantage passk."""
    policy: float = 1.0
    """Coefficient of the policy term."""
    form: Literal[
        "grpo", "gspo", "gspo_token", "gmpo", "cispo", "aipo", "topr", "vespo", "sapo", "dppo_tv", "dppo_kl",
        "dro", "reinforce", "clip_cov", "kl_cov",
    ] = "grpo"  # fmt: skip
    """The policy loss."""
    eps_low: float | None = None
    """Lower clip, of grpo, gspo, gspo_token, gmpo, clip_cov."""
    eps_high: float | None = None
    dual_clip: float | None = None
    """grpo: upper bound c of the loss ratio for negative advantages."""
    cap: float | None = None
    """Largest weight, of cispo, aipo, topr."""
    floor: float | None = None
    """Smallest weight, of cispo."""
    tau_pos: float | None = None
    """Of sapo."""
    tau_neg: float | None = None
    limit_low: float | None = None
    """Trust region, of dppo_tv, dppo_kl."""
    limit_high: float | None = None
    beta: float | None = None
    """Of dro, which has no default."""
    k_pos: float | None = None
    """Of vespo."""
    lam_pos: float | None = None
    k_neg: float | None = None
    lam_neg: float | None = None
    coef: float | None = None
    """Of kl_cov."""
    cov_ratio: float | None = None
    """Share of tokens that clip_cov and kl_cov pick."""
    agg: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant", "prompt_mean"] = (
        "token_mean"
    )
    """How per-token losses become one number; from global counts, whatever the split."""
    zero_signal: Literal["keep", "drop"] = "keep"
    """Groups whose rewards are all equal: train them (no gradient), or drop them and admit others."""
    kl: float = 0.0
    """Coefficient of the KL to the frozen initial policy. 0: no reference is loaded."""
    kl_form: Literal["k2", "k3", "k1_st", "k3_st", "k3_weighted"] = "k2"
    """k2, k1_st, k3_st, k3_weighted have the gradient of the reverse KL, k3 that of the forward KL."""
    distill: float = 0.0
    """Coefficient of the distillation from the prompt's teacher. 0: no teacher is started."""
    distill_form: Literal["divergence", "advantage"] = "divergence"
    """Back-propagate the divergence itself, or add -(logp - teacher_logp) to the advantage."""
    distill_kind: Literal["reverse", "forward", "skew_reverse", "skew_forward", "jsd", "jsd_gkd"] = "reverse"
    distill_beta: float = 0.5
    """Of jsd and jsd_gkd."""
    distill_alpha: float = 0.1
    """Of the skewed kinds."""
    distill_top_k: int = 0
    """Teacher log-probs sent per token: 0 = the whole vocabulary, else the K best and the tail's mass."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """For samples of an older policy. The weight multiplies the policy term; what is rejected is zero in the
    policy and the distillation term, and stays counted."""

    prox: Literal["sampler", "loglinear"] = "sampler"
    """Where the clip is centred: at the sampler, whose ratio then corrects and clips at once, or at
    the policy of the last step, interpolated by each token's age (A-3PO, arXiv 2512.06547)."""
    weight: Literal["none", "tis", "mis", "icepop"] = "none"
    """Importance weight: truncated, or zero outside the bounds, or that token by token."""
    level: Literal["token", "sequence", "geometric"] = "token"
    low: float | None = None
    high: float | None = None
    """Bounds of the weight. None: the paper's."""
    normalise: bool = False
    """Divide the weight by its mean over the step."""
    reject: Literal["none", "token", "sequence", "geometric", "k3", "veto", "opsm", "m2po"] = "none"
    """Leave out by ratio, by divergence, by the worst token, or (opsm) bad answers left behind."""
    keep_low: float | None = None
    keep_high: float | None = None
    """Bounds of what is kept: ratios; for k3, opsm, m2po (squared) upper, in nats; for veto lower."""


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
    correction: Correction = field(default_factory=Correction)
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
