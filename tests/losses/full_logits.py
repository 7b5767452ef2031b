"""A policy loss with entropy and top-k distillation: by the fused head, and from all logits in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from losses.distill import partition_divergence
from losses.grpo import grpo_loss
from losses.linear_loss import linear_loss, separable

T, D, V, K = 11, 6, 37, 4
Aux = tuple[Tensor, dict[str, Tensor]]


def problem(dtype: torch.dtype = torch.float64, *, n: int = T) -> dict[str, Any]:
    """With a masked token of NaN, a target of -100 and one in the top k, an unused slot and a row of them."""
    g = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    h, w, bias = randn(n, D), randn(V, D), randn(V)
    teacher, ids = (h @ w.T + randn(n, V)).log_softmax(-1).topk(K)
    y = torch.randint(V, (n,), generator=g)
    token_weight, adv = torch.rand(n, generator=g, dtype=torch.float64) + 0.1, randn(n)
    logp_mu = (h @ w.T).log_softmax(-1).gather(1, y[:, None]).squeeze(1) + 0.3 * randn(n)
    if n == T:
        y[3], y[0] = -100, ids[0, 1]
        ids[2, 1], ids[7] = -1, -1
        token_weight[5], adv[5], h[5] = 0.0, math.nan, math.nan
    teacher = torch.where(ids >= 0, teacher, -math.inf)
    h, w, bias = (x.to(dtype).requires_grad_() for x in (h, w, bias))
    token_weight, adv, logp_mu, teacher = (
        x.to(torch.promote_types(dtype, torch.float32)) for x in (token_weight, adv, logp_mu, teacher)
    )
    return {"h": h, "w": w, "bias": bias, "y": y, "token_weight": token_weight, "adv": adv,
            "logp_mu": logp_mu,
            "ids": ids, "teacher": teacher}  # fmt: skip


def everything(*leaves: Tensor, entropy: bool, topk: bool, args: tuple[Tensor, ...]) -> Aux:
    """Clipped policy loss - 0.3 entropy + top-k reverse KL, of what there is."""
    adv, logp_mu, teacher = args
    rest = list(leaves)
    logp = rest.pop(0)
    on = torch.ones_like(logp, dtype=torch.bool)
    loss, aux = grpo_loss(logp, logp_mu, adv, on)
    if entropy:
        loss = loss - 0.3 * rest.pop(0)
    if topk:
        loss = loss + partition_divergence(rest[0], rest[1], teacher, on)[0]
    return loss, aux


def ours(
    x: dict[str, Any], *, entropy: bool = False, topk: bool = False, head: dict[str, Any], **kw: Any
) -> Aux:
    token_loss = separable(lambda *a: everything(*a[:-3], entropy=entropy, topk=topk, args=a[-3:]))
    return linear_loss(
        x["h"], x["w"], x["y"], x["token_weight"], token_loss, x["adv"], x["logp_mu"], x["teacher"],
        entropy=entropy, topk_ids=x["ids"] if topk else None, **head, **kw,
    )  # fmt: skip


def naive(
    x: dict[str, Any], *, entropy: bool = False, topk: bool = False, head: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, logp, entropy) from all logits in float64."""
    temperature, scale, cap = (head.get(k) for k in ("temperature", "logit_scale", "softcap"))
    keep = x["token_weight"] > 0
    h = torch.where(keep[:, None], x["h"], 0.0).double()
    a = h @ x["w"].double().T
    a = (a if head.get("bias") is None else a + x["bias"].double()) * (scale or 1.0)
    log_p = ((cap * torch.tanh(a / cap) if cap else a) / (temperature or 1.0)).log_softmax(-1)
    known = x["y"] >= 0
    logp = torch.where(known, log_p.gather(1, torch.where(known, x["y"], 0)[:, None]).squeeze(1), 0.0)
    h_all = -(log_p.exp() * log_p).sum(-1)
    used = x["ids"] >= 0
    in_k = torch.zeros(len(a), V + 1, dtype=torch.bool).scatter(1, torch.where(used, x["ids"], V), True)[
        :, :V
    ]
    log_k = torch.where(used, log_p.gather(1, x["ids"].clamp(min=0)), -math.inf)
    leaves = (
        logp,
        *((h_all,) if entropy else ()),
        *((log_k, log_p.masked_fill(in_k, -math.inf).logsumexp(-1)) if topk else ()),
    )
    args = torch.where(keep, x["adv"], 0.0).double(), x["logp_mu"].double(), x["teacher"].double()
    loss, _ = everything(*leaves, entropy=entropy, topk=topk, args=args)
    return (x["token_weight"] * torch.where(keep, loss, 0.0)).sum(), logp, h_all
