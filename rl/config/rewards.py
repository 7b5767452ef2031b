"""Who judges and teaches, and how they are asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rl.config.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A generative judge (GenRM): reads problem and answer, writes a judgement from which a score is read."""

    model: str = "demo"
    """"demo" (built and cached for the data's tasks), "smollm2", a Hugging Face folder, a name on a hub, or
    with urls the served name."""
    urls: tuple[str, ...] = ()
    """Base addresses of OpenAI-compatible servers, each a replica: http://host:8000/v1. Empty: our own
    engine."""
    api_key: str = "OPENAI_API_KEY"
    """Environment variable that holds the servers' key; not set: none is sent."""
    replicas: int = 1
    """Engines; with urls each address is one."""
    template: str = "j{problem}{candidate}?"
    """Fields: {problem}, {candidate}, {reference}; pairwise: {first}, {second}; rubric: {criterion}."""
    chat: bool = False
    """Send the rendered template as a user message of the judge's chat template. Servers always do."""
    delimiter: str | None = None
    """Put the candidate between <delimiter> tags. None: the template itself delimits it, as the demo's."""
    neutralise: bool = False
    """Rewrite what looks like a verdict in the candidate; the demo's alphabet has no characters for it."""
    nonce: bool = False
    """Format tag: the tag carries a random word of this call, so that no candidate can write it."""
    format: Literal["label", "json", "tag", "boxed", "yes_no", "pairwise", "rubric", "logprob"] = "label"
    """How the judge gives its verdict. pairwise compares the answers of a group; rubric asks yes or no of
    each criterion; logprob reads the probabilities of `labels` as the next token, without sampling."""
    label: str = "S:"
    """Label, key (json) or tag: the score stands after the last one in the judge's own text."""
    lo: float = 0.0
    hi: float = 5.0
    """Declared bounds: what lies outside is a parse failure, never clamped."""
    votes: int = 1
    """Sampled judgements of one question."""
    vote: Literal["mean", "median", "majority"] = "mean"
    """Of the votes that could be read."""
    criteria: tuple[str, ...] = ()
    """Of a rubric: each is put to the judge alone."""
    points: tuple[float, ...] = ()
    """One weight per criterion, below 0 for a fault. Empty: 1 each."""
    labels: tuple[str, ...] = ("Yes", "No")
    """Of logprob: the words that may come next."""
    values: tuple[float, ...] = (1.0, 0.0)
    """Of logprob: what each label is worth, on the scale lo..hi."""
    coverage: float = 0.5
    """Of logprob: the labels' probability below which nothing was said."""
    opponents: int = 0
    """Pairwise: how many other answers of the group each one meets; 0: all."""
    orders: Literal["both", "one"] = "both"
    """Pairwise: show each pair in both orders, which cancels a preference for a place."""
    temperature: float = 0.7
    max_tokens: int = 32
    slots: int = 256
    engine: Engine = field(default_factory=Engine)


@dataclass(frozen=True, kw_only=True)
class Scalar:
    """A scalar judge (DisRM): a sequence-classification model whose one logit is the score."""

    model: str = "demo"
    """"demo" (built and cached for the data's tasks), or a folder or a name on a hub, with one label."""
    replicas: int = 1
    template: str = "j{problem}{candidate}?"
    """Fields: {problem}, {candidate}, {reference}."""
    chat: bool = False
    """Problem and candidate as user and assistant message of the model's chat template instead."""
    activation: Literal["none", "sigmoid"] = "none"
    slots: int = 256
    engine: Engine = field(default_factory=Engine)


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """How calls to judges and teachers are spread over replicas, and what happens when one fails."""

    attempt: float = 30.0
    """Seconds of one attempt; then another replica is asked."""
    attempts: int = 3
    """Of one call; then the outcome is an infra failure, and the reward is missing."""
    breaker: int = 3
    """Failures in a row after which a replica is not asked any more."""
    rest: float = 2.0
    """Seconds until such a replica is tried again."""
    in_flight: int = 2048
    """Questions that one replica has at a time; more wait in a queue."""
    queue: int = 16384
    """Questions in the queue beyond which no new group is admitted."""
    patience: float = 120.0
    """Seconds to wait for the first replica to come back when all are down; then the run ends."""
    affinity: int = 64
    """Questions more than the least loaded replica that a prompt's usual one may have and still get it, for
    its cached prefix."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """When the log warns of a judge that cannot be trusted; see rl/judges/health.py for each measure."""

    every: int = 10
    """Steps between looks; each is over the judgements since the last one."""
    canaries: int = 16
    """Answers judged at every look, the same each time: their scores must not move. 0: off."""
    drift: float = 0.1
    """Largest mean move of a canary's score."""
    saturation: float = 0.9
    """Largest share of scores at one end of the scale, while the ground truth is elsewhere or unknown."""
    position: float = 0.15
    """Pairwise: largest distance from 1/2 of how often the first place wins."""
    length: float = 0.5
    """Largest correlation of score and length within groups (Spearman)."""
    gap: float = 0.2
    """Largest growth since the start of judge score minus ground truth: reward hacking."""
    failures: float = 0.2
    """Largest share of judgements without a score."""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    model: str = "demo"
    """"demo" (built and cached for its keys), or a folder or hub name, with the policy's vocabulary."""
    keys: tuple[str, ...] = ()
    """Prompt keys that this teacher serves. Of a mixture (loss.distill_mix): empty, each serves all."""
    weight: float = 1.0
    """Share in a mixture; routed: factor of this teacher's loss."""
    replicas: int = 1
    """Engines, unless teacher_replicas is set."""
    slots: int = 256
    engine: Engine = field(default_factory=Engine)


@dataclass(frozen=True, kw_only=True)
class Reward:
    legacy: str | None = None
    """YAML file with verl's reward_model, custom_reward_function, sandbox_fusion groups: read, translated and
    reported before anything else (rl/migrate.py)."""
    judge: float = 0.0
    """Weight of the generative judge's score, normalised to [0, 1]. 0: no judge is started."""
    scalar: float = 0.0
    """Weight of the scalar judge's score. 0: none is started."""
    rule: float = 0.0
    """Weight of the verifiable rule: 1 if the answer is right, else 0."""
    rule_name: Literal["exact", "gsm8k", "reasoning_gym"] = "exact"
    """The ground truth, also of the metrics. exact: the text is the answer. gsm8k: its final number is.
    reasoning_gym: the task's own scorer says."""
    fn: tuple[str, ...] = ()
    """Your functions, each "path/to/file.py:name", with our signature or verl's (rl/rewards/functions.py)."""
    fn_weights: tuple[float, ...] = ()
    """One weight per function. Empty: 1 each."""
    fn_workers: int = 2
    """Processes of each function."""
    fn_deadline: float = 10.0
    """Seconds of one call; a call that takes longer is killed, and the reward is missing."""
    fn_kwargs: str = ""
    """JSON object of further arguments to each function."""
    ramp: int = 0
    """Steps over which the functions' weights rise linearly; of the trainer's version alone. 0: none."""
    rate: float = 0.0
    """Calls per minute to all functions together. 0: no limit."""
    sandbox_url: str = ""
    """Code-execution server: handed to functions that take sandbox_fusion_url, as verl's do."""
    sandbox_concurrency: int = 64
    """Calls to it at a time: functions that take concurrent_semaphore get one."""
    sandbox_memory_mb: int = 1024

    @property
    def weights(self) -> dict[str, float]:
        """Producer → weight, of those that are used; a function goes by its place, fn/0, fn/1, ..."""
        weights = self.fn_weights or (1.0,) * len(self.fn)
        named = {"judge": self.judge, "scalar": self.scalar, "rule": self.rule}
        named |= {f"fn/{i}": w for i, w in enumerate(weights)}
        return {name: weight for name, weight in named.items() if weight}

    def weights_at(self, version: int) -> dict[str, float]:
        """The weights of the optimiser step that begins at this version."""
        risen = min(1.0, (version + 1) / self.ramp) if self.ramp else 1.0
        return {name: w * risen if name.startswith("fn/") else w for name, w in self.weights.items()}
