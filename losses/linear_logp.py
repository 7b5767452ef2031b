"""Fused head: from hidden states and head weight to log-probs and entropy, a chunk of tokens at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Scales = tuple[float, float | None, float]  # logit_scale, softcap, temperature


def linear_logp(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk: int = 2048,
    grad_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each position, never holding more than chunk × V logits.

    a    = (hidden weightᵀ + bias) · logit_scale
    z    = softcap · tanh(a / softcap) / temperature,  or a / temperature without softcap
    logp = z_target - logsumexp z;   H = -sum_v p log p
    dL/dz_v = g_logp (1[v = target] - p_v) - g_H p_v (log p_v + H)

    The backward pass computes the logits of a chunk again: four matmuls in all, and any loss may follow, also
    one that couples tokens, as GSPO. For a sum over tokens `linear_loss` takes three.

    Args:
      hidden: [T, D]. weight: [V, D]; padding rows are no tokens, pass weight[:vocab]. A DTensor is gathered,
        its gradient summed over the ranks of its mesh (their tokens differ). bias: [V].
      target: [T]; outside [0, V), as -100, logp is 0 without gradient.
      chunk: tokens at a time; a chunk's float32 logits take 4 · chunk · V bytes, and there are a few of them.
      grad_dtype: accumulator of the head's gradient over chunks; default weight.dtype.
    Returns: logp [T], entropy [T] in float32 (float64 of float64), nats.
    Raises ValueError for shapes that do not fit, and for scales and chunk <= 0.
    """
    if weight.dim() != 2 or hidden.dim() != 2 or weight.shape[1:] != hidden.shape[1:]:
        raise ValueError(
            "linear_logp: want hidden [T, D] and weight [V, D], "
            f"got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    positive = (temperature, logit_scale, softcap, chunk)
    if target.shape != hidden.shape[:1] or any(x is not None and x <= 0 for x in positive):
        raise ValueError(
            f"linear_logp: want target [{len(hidden)}] and temperature, logit_scale, softcap, chunk > 0, "
            f"got {tuple(target.shape)} and {positive}"
        )
    weight = gather_head(weight) if hasattr(weight, "full_tensor") else weight
    scales = (float(logit_scale), softcap, float(temperature))
    logp, entropy, _ = _LinearLogp.apply(
        hidden, weight, bias, target, scales, chunk, grad_dtype or weight.dtype
    )  # type: ignore[misc]
    return logp, entropy


def gather_head(weight: Any) -> Tensor:
    """The whole of a head. Backward sums its gradient over the ranks, whose tokens differ, and shards it."""
    from torch.distributed.tensor import Partial

    return weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, scales: Scales, chunk: int,
        grad_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        parts = []
        for h, y in zip(hidden.split(chunk), target.split(chunk), strict=True):
            z, _ = _logits(h, weight, bias, scales)
            lse = z.logsumexp(-1)
            log_p = z - lse[:, None]
            known = (y >= 0) & (y < z.shape[1])
            picked = log_p.gather(1, torch.where(known, y, 0)[:, None]).squeeze(1)
            parts.append((torch.where(known, picked, 0.0), -(log_p.exp() * _finite(log_p)).sum(-1), lse))
        logp, entropy, lse = (torch.cat(x) for x in zip(*parts, strict=True))
        return logp, entropy, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        hidden, weight, bias, target, ctx.scales, ctx.chunk, ctx.grad_dtype = inputs
        ctx.save_for_backward(hidden, weight, bias, target, *output[1:])
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, g_logp: Tensor, g_entropy: Tensor, _: Tensor):  # type: ignore[override]
        hidden, weight, bias, target, entropy, lse = ctx.saved_tensors
        dhs, db = [], torch.zeros(weight.shape[0], dtype=lse.dtype, device=lse.device)
        dw = torch.zeros_like(weight, dtype=ctx.grad_dtype)
        idle = (g_logp == 0) & (g_entropy == 0)  # NaN in a row that nothing asks for stays there
        hidden = hidden.masked_fill(idle[:, None], 0)
        entropy, lse = entropy.masked_fill(idle, 0), lse.masked_fill(idle, 0)
        rows = (x.split(ctx.chunk) for x in (hidden, target, entropy, lse, g_logp, g_entropy))
        for h, y, ent, log_sum, g, g_h in zip(*rows, strict=True):
            z, slope = _logits(h, weight, bias, ctx.scales)
            log_p = z - log_sum[:, None]
            known = (y >= 0) & (y < z.shape[1])
            g = torch.where(known, g, 0.0)[:, None]
            dz = -log_p.exp() * (g + g_h[:, None] * (_finite(log_p) + ent[:, None]))
            dz = dz.scatter_add(1, torch.where(known, y, 0)[:, None], g) * slope
            db = db if bias is None else db + dz.sum(0)
            dhs.append(dz.to(weight.dtype) @ weight)
            dw.addmm_(dz.T.to(dw.dtype), h.to(dw.dtype))
        db = None if bias is None else db.to(bias.dtype)
        return torch.cat(dhs), dw.to(weight.dtype), db, None, None, None, None


def _logits(h: Tensor, weight: Tensor, bias: Tensor | None, scales: Scales) -> tuple[Tensor, Tensor | float]:
    """z and its slope in the product of hidden and weight, in float32 or better."""
    logit_scale, softcap, temperature = scales
    x = (h @ weight.T).to(torch.promote_types(h.dtype, torch.float32))
    x = x if bias is None else x + bias
    if softcap is None:
        return x * (logit_scale / temperature), logit_scale / temperature
    bent = torch.tanh(x * (logit_scale / softcap))
    z = torch.where(x == -math.inf, -math.inf, bent * (softcap / temperature))
    return z, (1 - bent * bent) * (logit_scale / temperature)


def _finite(log_p: Tensor) -> Tensor:
    """Such that p log p = 0 where p = 0."""
    return log_p.clamp(min=-1e30)
