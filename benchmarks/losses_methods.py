"""The problem that benchmarks/losses.py times, its float64 answers, and the ways to solve it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from losses.distill import partition_divergence
from losses.grpo import grpo_loss
from losses.linear_logp import linear_logp
from losses.linear_loss import linear_loss, separable

TOPK, ENTROPY_COEF = 64, 0.01


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem with its float64 answers: for a loss, (dH, dW, logp)."""

    name: str
    hidden: Tensor
    head: Tensor
    target: Tensor
    weight: Tensor
    adv: Tensor
    logp_mu: Tensor
    ids: Tensor
    teacher: Tensor
    flop: float  # of three matmuls
    truth: dict[str, tuple[Tensor, Tensor, Tensor]]


def policy(logp: Tensor, adv: Tensor, logp_mu: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return grpo_loss(logp, logp_mu, adv, torch.ones_like(logp, dtype=torch.bool))


def policy_entropy(
    logp: Tensor, entropy: Tensor, adv: Tensor, logp_mu: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    loss, aux = policy(logp, adv, logp_mu)
    return loss - ENTROPY_COEF * entropy, aux


def distill(logp: Tensor, logp_k: Tensor, rest: Tensor, teacher: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return partition_divergence(logp_k, rest, teacher, torch.ones_like(logp, dtype=torch.bool))


def token_args(case: Case, loss: str) -> tuple[Tensor, ...]:
    return (case.teacher,) if loss == "top-k" else (case.adv, case.logp_mu)


def from_logits(case: Case, loss: str, logits: Tensor, at: slice) -> tuple[Tensor, Tensor]:
    """(summed weighted loss, logp) of some rows, in the plain way."""
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    logp = log_p.gather(-1, case.target[at, None]).squeeze(-1)
    args = [x[at] for x in token_args(case, loss)]
    if loss == "policy":
        value, _ = policy(logp, *args)
    elif loss == "entropy":
        value, _ = policy_entropy(logp, -(log_p.exp() * log_p).sum(-1), *args)
    else:
        rest = log_p.scatter(-1, case.ids[at], -torch.inf).logsumexp(-1)
        value, _ = distill(logp, log_p.gather(-1, case.ids[at]), rest, *args)
    return (case.weight[at] * value).sum(), logp.detach()


# ── The ways: each returns (loss, log-probs or None), ready for backward ─────────────────────────────

Method = Callable[[Case, Tensor, Tensor], tuple[Tensor, Tensor | None]]


@functools.cache
def token_loss_of(loss: str, compiled: bool) -> Any:
    token_loss = separable({"policy": policy, "entropy": policy_entropy, "top-k": distill}[loss])
    return torch.compile(token_loss, dynamic=True) if compiled else token_loss


def ours(loss: str, chunk: int | None, rows: Any, *, compiled: bool = True, **kw: Any) -> Method:
    token_loss = token_loss_of(loss, compiled)

    def run(case: Case, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor | None]:
        value, aux = linear_loss(
            h, w, case.target, case.weight, token_loss, *token_args(case, loss), entropy=loss == "entropy",
            topk_ids=case.ids if loss == "top-k" else None, chunk=chunk, rows=rows, **kw,
        )  # fmt: skip
        return value, aux["logp"]

    return run


def full_logits(loss: str, compiled: bool) -> Method:
    def run(case: Case, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor | None]:
        return from_logits(case, loss, h @ w.T, slice(None))

    return torch.compile(run, dynamic=False) if compiled else run


def checkpointed(loss: str, chunk: int, compiled: bool) -> Method:
    """Logits of a chunk at a time, recomputed in the backward pass: what TRL does."""

    def logps(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
        logits = (h @ w.T).float()
        return logits.gather(-1, target[:, None]).squeeze(-1) - logits.logsumexp(-1)

    part = torch.compile(logps, dynamic=False) if compiled else logps

    def run(case: Case, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor | None]:
        pieces = zip(h.split(chunk), case.target.split(chunk), strict=True)
        logp = torch.cat([checkpoint(part, x, w, y, use_reentrant=False) for x, y in pieces])
        return (case.weight * policy(logp, case.adv, case.logp_mu)[0]).sum(), logp.detach()

    return run


def recomputing(chunk: int, compiled: bool) -> Method:
    def run(case: Case, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor | None]:
        logp, _ = linear_logp(h, w, case.target, chunk=chunk)
        return (case.weight * policy(logp, case.adv, case.logp_mu)[0]).sum(), logp.detach()

    return torch.compile(run, dynamic=False) if compiled else run


def cut_cross_entropy(filter_eps: str | None) -> Method:
    from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found]

    def run(case: Case, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor | None]:
        logp = -linear_cross_entropy(h, w, case.target, reduction="none", filter_eps=filter_eps).float()
        return (case.weight * policy(logp, case.adv, case.logp_mu)[0]).sum(), logp.detach()

    return run


def liger_cross_entropy() -> Method:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]

    fused = LigerFusedLinearCrossEntropyLoss(reduction="mean")
    return lambda case, h, w: (fused(w, h, case.target), None)


def liger_grpo(compiled: bool) -> Method:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # type: ignore[import-not-found]

    fused = LigerFusedLinearGRPOLoss(
        beta=0.0, epsilon_low=0.2, epsilon_high=0.28, use_ref_model=False, compiled=compiled, loss_type="bnpo"
    )

    def run(case: Case, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor | None]:
        rows = 16 if len(h) % 16 == 0 else 1
        adv = case.adv.view(rows, -1)[:, 0].contiguous()  # one advantage a row: its errors are not comparable
        value = fused(
            h.view(rows, -1, h.shape[1]), w, case.target.view(rows, -1),
            torch.ones_like(case.target).view(rows, -1), adv, old_per_token_logps=case.logp_mu.view(rows, -1),
        )  # fmt: skip
        return value[0], None

    return run


def make_case(n: int, d: int, v: int, device: torch.device, dtype: torch.dtype, losses: list[str]) -> Case:
    """Logits of standard deviation 2, targets lifted to log-probs from about -12 to 0, ratios around 1."""
    g = torch.Generator(device=device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=g)

    head = (randn(v, d) / d**0.5).to(dtype)
    target = torch.randint(v, (n,), device=device, generator=g)
    lift = 4.0 + 14.0 * torch.rand(n, 1, device=device, generator=g)
    hidden = (2.0 * randn(n, d) + lift * head[target].float()).to(dtype)
    ids, teacher = [], []
    for h in hidden.split(1024):  # a teacher near the student: its logits with noise
        logits = (h @ head.T).float()
        top = (
            (logits + 0.5 * torch.randn(logits.shape, device=device, generator=g))
            .log_softmax(-1)
            .topk(min(TOPK, v // 2))
        )
        ids.append(top.indices)
        teacher.append(top.values)
    case = Case(
        name=f"N={n} D={d} V={v} {str(dtype)[6:]}", hidden=hidden, head=head, target=target, adv=randn(n),
        weight=torch.full((n,), 1.0 / n, device=device), logp_mu=torch.zeros(n, device=device),
        ids=torch.cat(ids),
        teacher=torch.cat(teacher), flop=3 * 2 * n * d * v, truth={},
    )  # fmt: skip
    with torch.no_grad():
        exact = torch.cat([
            (h.double() @ head.double().T).log_softmax(-1).gather(-1, y[:, None]).squeeze(-1)
            for h, y in zip(hidden.split(512), target.split(512), strict=True)
        ])  # fmt: skip
    case.logp_mu.copy_(exact + 0.15 * randn(n))
    for loss in losses:
        case.truth[loss] = truth(case, loss)
    return case


def truth(case: Case, loss: str) -> tuple[Tensor, Tensor, Tensor]:
    """float64 throughout, chunk by chunk; the gradients are kept in float32."""
    head = case.head.double()
    dw = torch.zeros_like(head)
    dhs, logps = [], []
    for start in range(0, len(case.hidden), 512):
        at = slice(start, start + 512)
        h = case.hidden[at].double()
        logits = (h @ head.T).requires_grad_()
        value, logp = from_logits(case, loss, logits, at)
        (dz,) = torch.autograd.grad(value, logits)
        dhs.append((dz @ head).float())
        dw.addmm_(dz.T, h)
        logps.append(logp)
    return torch.cat(dhs), dw.float(), torch.cat(logps)
