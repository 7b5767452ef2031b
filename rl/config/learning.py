"""What is learnt from the answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Every term is coef · Σ weight · term. A number left at None is the paper's own (losses/README.md)."""

    advantage: Literal[
        "grpo", "dr_grpo", "batch_std", "rloo", "gpg", "maxrl", "passk", "best_of_group", "opo",
        "reinforce_pp_baseline", "shrunk",
    ] = "grpo"  # fmt: skip
    """What a reward is measured against. shrunk: grpo, less where judge.votes disagree."""
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
    distill_mix: Literal["routed", "arithmetic", "geometric", "sum"] = "routed"
    """Each prompt has the teacher of its key; or all teachers teach every prompt: as one distribution, the
    mean of their probabilities or of their log-probs, or each with its own divergence, added by weight."""
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
    """Processes, each with a GPU of its own where it trains on CUDA."""
    micro_tokens: int = 8192
    """Tokens (prompt and answer) of one packed micro-batch, at most."""
    stream: bool = False
    """Train groups as they become ready, and step once the batch is complete; the same gradient. For losses
    of one term, to which the rest of the batch adds a count alone."""
    share_prompt: bool = False
    """Compute a group's prompt once for all its answers; worth it where prompts are long beside answers."""
    compile: bool | None = None
    """torch.compile each block and the loss. None: on for CUDA, off on CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """In which it computes; master weights, sums and optimiser are float32. auto: the policy's own on
    CUDA, float32 on the CPU."""
    gpus: float = 1.0
    """GPUs of one rank, where it trains on CUDA. Below 1: a share, beside other roles; it takes no
    more of the memory."""
    attention: Literal["auto", "fa4", "flash", "varlen", "padded"] = "auto"
    """FlashAttention 4 or 2 (packages flash-attn-4, flash-attn), torch's own, or padded sequences, as on the
    CPU. auto: the first of them that can run; the log names it."""
    recompute: Literal["none", "selective", "full"] = "none"
    """In the backward pass, to save memory: nothing dear; all but matmuls and attention; whole blocks."""
    full_blocks: int = 0
    """So many blocks recompute all, whatever recompute says, until the others' activations fit."""
    offload: bool = False
    """Master weights, gradients and optimiser stay in the host's memory: slow, by what trainer.threads takes
    for AdamW, and saves 16 bytes a parameter."""
    keep_gathered: bool | None = None
    """Gather each weight once a step, not in every forward and backward, for 2 bytes a parameter in bfloat16.
    None: where that is below a tenth of the GPU's memory."""
    shard: bool | None = None
    """Of several ranks, each has a part of the weights that compute and gathers the others (FSDP2), or all of
    them and a part of the masters (ZeRO). None: all, where that leaves two fifths of its GPU's memory."""
    exchange: Literal["auto", "messages", "memory"] = "auto"
    """How ranks that have all weights hand each other rows of them and of gradients: messages (NCCL), or
    writes into each other's memory, within one machine. auto: the latter on GPUs that can; the log says."""
    threads: int = 1
    """CPU threads of one rank."""
