"""Distillation from a teacher: exact over the vocabulary, on the teacher's top k, or on sampled tokens.

S is the student's distribution at a prefix that the student wrote, T the teacher's. In nats per token.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["forward", "reverse", "skew_forward", "skew_reverse", "jsd", "jsd_gkd"]
KINDS = ("forward", "reverse", "skew_forward", "skew_reverse", "jsd", "jsd_gkd")
TAIL_MIN = 1e-7  # what a teacher's top k leaves at least: float32 cannot resolve 1 - mass below it


def full_divergence(
    student_logits: Tensor,
    teacher_logp: Tensor,
    mask: Tensor,
    *,
    kind: Kind = "reverse",
    temperature: float = 1.0,
    teacher_temperature: float = 1.0,
    beta: float = 0.5,
    alpha: float = 0.1,
    vocab: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Divergence over the whole vocabulary.

    forward       KL(T || S) = sum_v T log(T / S)           dL/dz = (S - T) / temperature
    reverse       KL(S || T) = sum_v S log(S / T)           dL/dz = S (log(S / T) - L) / temperature
    skew_forward  KL(T || alpha T + (1 - alpha) S)          at most -log(alpha)
    skew_reverse  KL(S || alpha S + (1 - alpha) T)          at most -log(alpha)
    jsd           (1 - beta) KL(T || M) + beta KL(S || M)   M = beta T + (1 - beta) S; from forward (beta 0)
                                                            to reverse (beta 1) without a jump
    jsd_gkd       beta KL(T || M) + (1 - beta) KL(S || M)   as published: tends to 0 at both ends, where
                                                            forward and reverse are put instead

    S = softmax(student_logits / temperature), T = softmax(teacher_logp / teacher_temperature). The gradient
    shrinks with temperature (dL/dz has 1 / temperature); a factor temperature² makes up for softening both.
    Where T is 0 and S is not, reverse is +inf: take a skewed kind.

    Args:
      student_logits: [..., V]. teacher_logp: [..., V] log-probs or logits, constant; with an axis K in front
        for several teachers, mask and loss are [K, ...]. mask: bool.
      beta: in [0, 1]. alpha: in (0, 1). vocab: keep the first vocab columns of both; padding rows of a head
        are no tokens, and their logits would take probability.
    Returns: loss, 0 off-mask whatever stands there; aux: entropy and teacher_entropy.
    Raises ValueError for widths that differ without vocab, and for arguments out of range.
    See "On-Policy Distillation of Language Models" (GKD, arXiv:2306.13649), "DistiLLM" (arXiv:2402.03898).
    """
    _check_kind(kind, beta, alpha)
    widths = student_logits.shape[-1], teacher_logp.shape[-1]
    if min(temperature, teacher_temperature) <= 0:
        raise ValueError(f"full_divergence: want temperatures > 0, got {temperature}, {teacher_temperature}")
    if (vocab is None and widths[0] != widths[1]) or (vocab is not None and not 0 < vocab <= min(widths)):
        raise ValueError(
            f"full_divergence: student has {widths[0]} columns, teacher {widths[1]}, vocab is {vocab}; "
            "pass the number of real tokens as vocab to drop the padding of a head"
        )
    width = vocab or widths[0]
    on = mask.unsqueeze(-1)
    log_s = (_kept(on, student_logits[..., :width]) / temperature).log_softmax(-1)
    log_t = (_kept(on, teacher_logp.detach()[..., :width]) / teacher_temperature).log_softmax(-1)
    loss = _divergence(log_s, log_t, kind, beta, alpha)
    return _out(mask, loss, entropy=_entropy(log_s), teacher_entropy=_entropy(log_t))


def topk_divergence(
    student_logits: Tensor,
    teacher_ids: Tensor,
    teacher_logp: Tensor,
    mask: Tensor,
    *,
    kind: Kind = "reverse",
    tail: bool = True,
    temperature: float = 1.0,
    beta: float = 0.5,
    alpha: float = 0.1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Divergence on the partition {k_1}, …, {k_K}, {all other tokens}, with the D of `full_divergence`.

    L = D((S_k1, …, S_kK, 1 - sum_K S), (T_k1, …, T_kK, 1 - sum_K T))

    0 <= L <= the divergence over the vocabulary. Sums cut off at K instead are no divergence: they go
    negative, and the reverse one is least where the student leaves K. tail=False renormalises both over K
    and is blind to the mass that the student puts there.

    Args:
      student_logits: [..., V]; S = softmax(student_logits / temperature).
      teacher_ids: [..., K], distinct. teacher_logp: [..., K], log-probs over the teacher's whole vocabulary
        at the temperature that it was asked for (a tail cannot be re-softened). -inf: the slot is unused and
        its id ignored. With an axis of several teachers in front, mask and loss have it too.
    Returns: loss, 0 off-mask; aux: tail and teacher_tail, the mass outside of K.
    Raises ValueError for shapes that do not fit, K = 1 without tail, and arguments out of range.
    """
    if temperature <= 0 or teacher_ids.shape != teacher_logp.shape:
        raise ValueError(
            "topk_divergence: want teacher_ids and teacher_logp [..., K] and temperature > 0, "
            f"got {tuple(teacher_ids.shape)}, {tuple(teacher_logp.shape)} and {temperature}"
        )
    used = mask.unsqueeze(-1) & (teacher_logp > -math.inf)
    logits = (_kept(mask.unsqueeze(-1), student_logits) / temperature).expand(*used.shape[:-1], -1)
    lse = logits.logsumexp(-1)
    log_k = logits.gather(-1, torch.where(used, teacher_ids, 0)) - lse.unsqueeze(-1)
    in_k = torch.zeros_like(logits[..., :1], dtype=torch.bool).expand(*lse.shape, logits.shape[-1] + 1)
    in_k = in_k.scatter(-1, torch.where(used, teacher_ids, logits.shape[-1]), True)[..., :-1]
    # summed over the rest: 1 - sum_K would lose every tail below 1e-7
    rest = logits.masked_fill(in_k, -math.inf)
    none = (rest == -math.inf).all(-1)
    log_rest = rest.masked_fill(none.unsqueeze(-1), 0.0).logsumexp(-1) - lse
    return partition_divergence(
        log_k.masked_fill(~used, -math.inf), log_rest.masked_fill(none, -math.inf), teacher_logp, mask,
        kind=kind, tail=tail, beta=beta, alpha=alpha,
    )  # fmt: skip


def partition_divergence(
    logp_k: Tensor,
    log_rest: Tensor,
    teacher_logp: Tensor,
    mask: Tensor,
    *,
    kind: Kind = "reverse",
    tail: bool = True,
    beta: float = 0.5,
    alpha: float = 0.1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`topk_divergence` from the student's log-probs: of the K tokens, and of all others together.

    logp_k [..., K], log_rest [...] carry the gradient, as from `linear_loss(..., topk_ids=teacher_ids)`;
    teacher_logp [..., K] is -inf in unused slots. log_rest = -inf says that the student has no other token:
    the tail is then left out. Other arguments, results and errors: see `topk_divergence`.
    """
    _check_kind(kind, beta, alpha)
    if logp_k.shape != teacher_logp.shape or log_rest.shape != logp_k.shape[:-1]:
        raise ValueError(
            "partition_divergence: want logp_k and teacher_logp [..., K], log_rest [...], "
            f"got {tuple(logp_k.shape)}, {tuple(teacher_logp.shape)} and {tuple(log_rest.shape)}"
        )
    if not tail and logp_k.shape[-1] == 1:
        raise ValueError("partition_divergence: one renormalised token is always 0; want tail=True or K >= 2")
    on = mask.unsqueeze(-1)
    log_s, log_t, log_s_rest = _kept(on, logp_k), _kept(on, teacher_logp.detach()), _kept(mask, log_rest)
    log_s = log_s.masked_fill(log_t == -math.inf, -math.inf)
    mass = log_t.logsumexp(-1).clamp(max=math.log1p(-TAIL_MIN))
    log_t_rest = torch.log(-torch.expm1(mass)).masked_fill(log_s_rest == -math.inf, -math.inf)
    if tail:
        log_s = torch.cat([log_s, log_s_rest.unsqueeze(-1)], dim=-1)
        log_t = torch.cat([log_t, log_t_rest.unsqueeze(-1)], dim=-1)
    else:
        log_s, log_t = log_s.log_softmax(-1), log_t.log_softmax(-1)
    loss = _divergence(log_s, log_t, kind, beta, alpha)
    return _out(mask, loss, tail=log_s_rest.exp(), teacher_tail=log_t_rest.exp())


def distill_advantage(
    logp: Tensor, teacher_logp: Tensor, mask: Tensor, *, clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sampled reverse KL as an advantage per token, without gradient.

    A_t = -(log S(a_t) - log T(a_t));   E_S[A ∇log S] = -∇KL(S || T) at each prefix

    Add coef · A to the advantage of a policy loss on tokens a_t that the student sampled; that loss's ratio
    corrects for their age. A token answers for its own prefix only, not for the divergence of later ones.

    logp, teacher_logp: [...], of one shape. clip bounds |A| and biases the gradient; None is exact.
    Returns: adv, 0 off-mask; aux: kl = log S - log T before clipping, whose mean estimates KL(S || T).
    Raises ValueError for shapes that differ (rows cut differently), and clip <= 0.
    See "On-Policy Distillation" (Thinking Machines Lab, 2025).
    """
    if logp.shape != teacher_logp.shape or (clip is not None and clip <= 0):
        raise ValueError(
            "distill_advantage: want logp and teacher_logp of one shape, cut to the response, and clip > 0, "
            f"got {tuple(logp.shape)}, {tuple(teacher_logp.shape)} and {clip}"
        )
    gap = _kept(mask, logp.detach()) - _kept(mask, teacher_logp.detach())
    return _out(mask, -gap if clip is None else -gap.clamp(-clip, clip), kl=gap)


def sampled_divergence(
    logp: Tensor, teacher_logp: Tensor, mask: Tensor, *, kind: Literal["forward", "reverse"] = "reverse"
) -> tuple[Tensor, dict[str, Tensor]]:
    """Divergence to back-propagate, from sampled tokens alone. With d = log S(a) - log T(a) and a from S,

    reverse  d² / 2              E[gradient] = ∇KL(S || T);   the value is only roughly the KL
    forward  expm1(-d) + d       E[gradient] = ∇KL(T || S);   E[value] = KL(S || T)

    d itself is not offered: its value is right and its gradient has no teacher in it. Tokens of an older
    policy want a weight π / μ on the loss. Shapes, aux and errors: see `distill_advantage`.
    See "Approximating KL Divergence" (Schulman, 2020).
    """
    if logp.shape != teacher_logp.shape or kind not in ("forward", "reverse"):
        raise ValueError(
            "sampled_divergence: want logp and teacher_logp of one shape, kind forward or reverse, "
            f"got {tuple(logp.shape)}, {tuple(teacher_logp.shape)} and {kind!r}"
        )
    gap = _kept(mask, logp) - _kept(mask, teacher_logp.detach())
    return _out(mask, gap.square() / 2 if kind == "reverse" else torch.expm1(-gap) + gap, kl=gap)


def _check_kind(kind: str, beta: float, alpha: float) -> None:
    if kind not in KINDS or not 0 <= beta <= 1 or not 0 < alpha < 1:
        raise ValueError(
            f"want kind of {KINDS}, beta in [0, 1] and alpha in (0, 1), got {kind!r}, {beta} and {alpha}"
        )


def _divergence(log_s: Tensor, log_t: Tensor, kind: str, beta: float, alpha: float) -> Tensor:
    """D over the last axis of log-probs, among which -inf is allowed."""
    if kind.startswith("jsd") and beta in (0.0, 1.0):
        kind = "reverse" if beta else "forward"
    if kind == "forward":
        return _kl(log_t, log_s)
    if kind == "reverse":
        return _kl(log_s, log_t)
    if kind == "skew_forward":
        return _kl(log_t, _log_mix(log_t, log_s, alpha))
    if kind == "skew_reverse":
        return _kl(log_s, _log_mix(log_s, log_t, alpha))
    log_m = _log_mix(log_t, log_s, beta)
    w = beta if kind == "jsd_gkd" else 1 - beta
    return w * _kl(log_t, log_m) + (1 - w) * _kl(log_s, log_m)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum p (log p - log q); p = 0 gives 0, q = 0 < p gives +inf."""
    some = log_p > -math.inf
    return (log_p.exp() * (torch.where(some, log_p, 0.0) - torch.where(some, log_q, 0.0))).sum(-1)


def _log_mix(log_a: Tensor, log_b: Tensor, w: float) -> Tensor:
    """log(w a + (1 - w) b). logaddexp never sees two -inf, whose gradient would be NaN."""
    none = (log_a == -math.inf) & (log_b == -math.inf)
    log_a, log_b = log_a.masked_fill(none, 0.0), log_b.masked_fill(none, 0.0)
    return torch.logaddexp(log_a + math.log(w), log_b + math.log1p(-w)).masked_fill(none, -math.inf)


def _entropy(log_p: Tensor) -> Tensor:
    return -_kl(log_p, torch.zeros_like(log_p))


def _kept(on: Tensor, x: Tensor) -> Tensor:
    """In float32 or better, and 0 off-mask before any arithmetic."""
    return torch.where(on, x, 0.0).to(torch.promote_types(x.dtype, torch.float32))


def _out(mask: Tensor, loss: Tensor, **aux: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Everything 0 off-mask and of the loss's shape; aux without gradient."""
    loss = torch.where(mask, loss, 0.0)
    return loss, {k: torch.where(mask, x.detach(), 0.0).expand_as(loss) for k, x in aux.items()}
