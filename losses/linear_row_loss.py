"""Fused head under any loss of whole rows of logits, as the divergence from a teacher's full distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

RowLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def linear_row_loss(
    hidden: Tensor,
    weight: Tensor,
    token_weight: Tensor,
    row_loss: RowLoss,
    *args: Tensor,
    chunk: int = 512,
    grad_dtype: torch.dtype | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over tokens of token_weight · row_loss(logits), with the gradients found in the forward pass.

    logits = hidden weightᵀ, in float32;   (loss [t], aux) = row_loss(logits [t, V], *args) on each chunk
    d hidden = (d logits) weight,   d weight = (d logits)ᵀ hidden: three matmuls

    Row t of the loss may depend on row t of the logits and of args only. A teacher with its own head may come
    as hidden states; its logits then live for one chunk, as the student's:

        def loss(logits, teacher_hidden, mask):
            return full_divergence(logits, teacher_hidden @ teacher_head.T, mask)

    Args:
      hidden: [T, D]. weight: [V, D]; a DTensor is gathered, its gradient summed over the ranks of its mesh.
      token_weight: [T] float, mask and normaliser, from global counts. Where it is 0, anything may stand.
      args: [T, ...] constants. chunk: tokens at a time; several float32 tensors of chunk × V are held.
      grad_dtype: accumulator of the head's gradient over chunks; default weight.dtype.
    Returns: loss []; aux: loss and the aux of row_loss, [T] each, detached. backward() may be called once.
    Raises ValueError for shapes that do not fit, and chunk <= 0.
    """
    n = hidden.shape[0]
    if hidden.dim() != 2 or weight.shape[1:] != hidden.shape[1:] or chunk <= 0:
        raise ValueError(
            "linear_row_loss: want hidden [T, D], weight [V, D] and chunk > 0, "
            f"got {tuple(hidden.shape)}, {tuple(weight.shape)} and {chunk}"
        )
    if token_weight.shape != (n,) or any(x.shape[:1] != (n,) for x in args):
        raise ValueError(
            f"linear_row_loss: want token_weight [{n}] and args [{n}, ...], "
            f"got {[tuple(x.shape) for x in (token_weight, *args)]}"
        )
    weight = _gather_head(weight) if hasattr(weight, "full_tensor") else weight
    learn = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight)]
    with torch.no_grad():
        dh = torch.empty_like(hidden) if learn[0] else None
        dw = torch.zeros_like(weight, dtype=grad_dtype or weight.dtype) if learn[1] else None
        total, parts = 0.0, []
        for start in range(0, max(n, 1), chunk):
            at = slice(start, min(start + chunk, n))
            w = token_weight[at]
            h = hidden[at].masked_fill((w == 0)[:, None], 0.0)
            logits = (h @ weight.T).to(torch.promote_types(h.dtype, torch.float32))
            dz, (loss, aux) = _row_grad(row_loss, logits, w, [x[at] for x in args])
            total = total + (w * loss).sum()
            parts.append({"loss": loss, **aux})
            if dh is not None:
                dh[at] = dz.to(weight.dtype) @ weight
            if dw is not None:
                dw.addmm_(dz.T.to(dw.dtype), h.to(dw.dtype))
        grads = [None if d is None else d.to(x.dtype) for d, x in ((dh, hidden), (dw, weight))]
        off = token_weight == 0
        aux = {k: torch.cat([p[k] for p in parts]).masked_fill(off, 0) for k in parts[0]}
    return _Attach.apply(total, hidden, weight, *grads), aux  # type: ignore[return-value]


def _row_grad(row_loss: RowLoss, logits: Tensor, w: Tensor, args: list[Tensor]) -> tuple[Tensor, Any]:
    def total(logits: Tensor):
        loss, aux = row_loss(logits, *args)
        loss = loss.masked_fill(w == 0, 0.0)
        return (w * loss).sum(), (loss, aux)

    grad, rest = torch.func.grad(total, has_aux=True)(logits)
    return grad.masked_fill((w == 0)[:, None], 0.0), rest


class _Attach(torch.autograd.Function):
    """The loss, with gradients that are known. Scaled in place: a second head gradient is too much memory."""

    @staticmethod
    def forward(loss: Tensor, hidden: Tensor, weight: Tensor, dh: Tensor | None, dw: Tensor | None) -> Tensor:
        return loss.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[3:])

    @staticmethod
    def backward(ctx: Any, g: Tensor):  # type: ignore[override]
        return None, *(None if d is None else d.mul_(g) for d in ctx.saved_tensors), None, None


def _gather_head(weight: Any) -> Tensor:
    """The whole head. Backward sums its gradient over the ranks, whose tokens differ, and shards it."""
    from torch.distributed.tensor import Partial

    return weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)
