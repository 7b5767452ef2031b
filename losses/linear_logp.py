"""Fused head: hidden states and the head's weight to log-probs and entropy, a chunk of tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
    """Log-prob of each target token and entropy of each position, never holding more than chunk × V logits.

        a = (hidden weightᵀ + bias) · logit_scale,   z = softcap · tanh(a / softcap) / temperature   (z = a / temperature without)
        logp_t = z_t[target_t] - lse_t,              entropy_t = -Σ_v p_v log p_v

    The backward pass recomputes the logits of a chunk (four matmuls in all) and uses the closed form

        dz_v = g_logp (1[v = target] - p_v) - g_entropy · p_v (log p_v + entropy)

    so any loss of the log-probs may follow, also one that couples tokens (GSPO). Where the loss is a sum over tokens,
    `linear_loss` needs three matmuls.

    Args:
        hidden: [T, D]. weight: [V, D]; a DTensor head is gathered, and its gradient is the sum over its mesh's ranks, each of
            which holds its own tokens. Padding rows of the head: pass weight[:vocab]. bias: [V].
        target: [T] ids. Ids outside [0, V) (-100 at ignored positions) give logp 0 without gradient; entropy is not masked.
        chunk: tokens per step. A chunk of bf16 logits is 2·chunk·V bytes, its float32 softmax 4·chunk·V.
        grad_dtype: dtype in which the head's gradient is accumulated over chunks; default weight.dtype.

    Returns:
        (logp [T], entropy [T]) in float32 (float64 for float64 inputs), nats.

    Raises:
        ValueError: shapes do not match; temperature, softcap or chunk not positive.
    """
    if hasattr(weight, "full_tensor"):
        weight = gather_head(weight)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear_logp: hidden must be [T, D] and weight [V, D], got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if target.shape != hidden.shape[:1]:
        raise ValueError(f"linear_logp: target must be [{hidden.shape[0]}], got {tuple(target.shape)}")
    if temperature <= 0 or chunk < 1 or (softcap is not None and softcap <= 0):
        raise ValueError(
            f"linear_logp: temperature, chunk, softcap must be > 0, got {temperature}, {chunk}, {softcap}"
        )
    scales = (float(logit_scale), softcap, float(temperature))
    return _LinearLogp.apply(hidden, weight, bias, target, scales, chunk, grad_dtype or weight.dtype)  # type: ignore[return-value]


def gather_head(weight: Tensor) -> Tensor:
    """The whole head on this rank. Backward sums the gradient over the ranks of its mesh and hands each its shard."""
    from torch.distributed.tensor import Partial

    mesh = weight.device_mesh  # type: ignore[attr-defined]
    return weight.full_tensor(grad_placements=[Partial()] * mesh.ndim)  # type: ignore[attr-defined]


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, target, scales, chunk, grad_dtype):
        lses, logps, entropies = [], [], []
        for h, y in zip(hidden.split(chunk), target.split(chunk), strict=True):
            z, _ = _logits(h, weight, bias, scales)
            lse = z.logsumexp(-1, keepdim=True)
            log_p = z - lse
            known = (y >= 0) & (y < z.shape[-1])
            picked = log_p.gather(-1, torch.where(known, y, 0).unsqueeze(-1)).squeeze(-1)
            logps.append(torch.where(known, picked, 0.0))
            # -inf logits have p = 0 and take no part
            entropies.append(-(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1))
            lses.append(lse.squeeze(-1))
        logp, entropy, lse = torch.cat(logps), torch.cat(entropies), torch.cat(lses)
        ctx.save_for_backward(hidden, weight, bias, target, lse, entropy)
        ctx.scales, ctx.chunk, ctx.grad_dtype = scales, chunk, grad_dtype
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        hidden, weight, bias, target, lse, entropy = ctx.saved_tensors
        g_logp, g_entropy = grads
        dh = torch.empty_like(hidden)
        dw = torch.zeros_like(weight, dtype=ctx.grad_dtype)
        db = None if bias is None else torch.zeros_like(bias, dtype=lse.dtype)
        start = 0
        for h in hidden.split(ctx.chunk):
            rows = slice(start, start + h.shape[0])
            start = rows.stop
            z, slope = _logits(h, weight, bias, ctx.scales)
            log_p = z - lse[rows, None]
            p = log_p.exp()
            y, g, g_h = target[rows], g_logp[rows], g_entropy[rows]
            known = (y >= 0) & (y < z.shape[-1])
            g = torch.where(known, g, 0.0)
            log_p = log_p.clamp(min=torch.finfo(log_p.dtype).min)
            dz = -p * (g[:, None] + g_h[:, None] * (log_p + entropy[rows, None]))
            dz = dz.scatter_add(-1, torch.where(known, y, 0)[:, None], g[:, None]) * slope
            if db is not None:
                db += dz.sum(0)
            dz = dz.to(weight.dtype)
            dh[rows] = dz @ weight
            dw += dz.T @ h
        return dh, dw.to(weight.dtype), None if db is None else db.to(bias.dtype), None, None, None, None


def _logits(h: Tensor, weight: Tensor, bias: Tensor | None, scales: tuple) -> tuple[Tensor, Tensor | float]:
    """z and dz/da·logit_scale, in float32."""
    logit_scale, softcap, temperature = scales
    z = (h @ weight.T).to(torch.promote_types(h.dtype, torch.float32))
    if bias is not None:
        z = z + bias
    z = z * logit_scale
    if softcap is None:
        return z / temperature, logit_scale / temperature
    bent = torch.tanh(z / softcap)
    return bent * (softcap / temperature), (1 - bent * bent) * (logit_scale / temperature)
