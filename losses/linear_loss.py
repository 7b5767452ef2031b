"""Fused head and loss, gradients found in the forward pass: three matmuls, where recomputing takes four.

One buffer holds the logits of a chunk of tokens, and one pass turns each row of it into its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

TokenLoss = Callable[..., tuple[tuple[Tensor, ...], Tensor, dict[str, Tensor]]]
Seen = tuple[Tensor, Tensor, Tensor, Any, Any]  # None for what no topk_ids, or no entropy, asks for
Grads = tuple[Tensor, Any, Any, Any]
RowsOp = Callable[..., Seen]
Scales = tuple[float, float | None, float]  # logit_scale, softcap, temperature
FLOOR = -1e30  # a finite -inf: its differences are finite, and 0 * FLOOR is 0
CHUNK = 2304  # tokens: for D = 896 and 3584, tiles for whole waves of 132 multiprocessors
BUFFER_BYTES = int(0.96 * 2**30)  # holds the logits of fewer, if the vocabulary is larger


def separable(loss_fn: Callable[..., tuple[Tensor, dict[str, Tensor]]]) -> TokenLoss:
    """A per-token loss together with its gradient, as `linear_loss` takes it.

    (loss, aux) = loss_fn(*leaves, *args)  ->  (d sum_t token_weight_t loss_t / d leaves, loss, aux)

    Row t of the loss may depend on row t of its arguments only. Where token_weight is 0, so are loss and
    gradient. The caller may compile the result, once: torch.compile(separable(f)) makes 2 kernels of 30.
    """

    def with_grad(token_weight: Tensor, leaves: tuple[Tensor, ...], *args: Any):
        off = token_weight == 0

        def total(*leaves: Tensor):
            loss, aux = loss_fn(*leaves, *args)
            loss = loss.masked_fill(off, 0.0)
            return (token_weight * loss).sum(), (loss, aux)

        grads, (loss, aux) = torch.func.grad(total, argnums=tuple(range(len(leaves))), has_aux=True)(*leaves)
        return tuple(g.masked_fill(off if g.dim() == 1 else off[:, None], 0.0) for g in grads), loss, aux

    return with_grad


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    token_weight: Tensor,
    token_loss: TokenLoss,
    *args: Tensor,
    entropy: bool = False,
    topk_ids: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    logit_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    rows: RowsOp | None = None,
    scale: Callable[[Tensor, Tensor], Any] | None = None,
    splits: int = 1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of token_weight · loss over tokens, from hidden states and head, never holding more than chunk × V.

    a      = (hidden weightᵀ + bias) · logit_scale
    z      = softcap · tanh(a / softcap) / temperature,  or a / temperature without softcap
    loss_t = loss_fn(logp[target] [, H] [, logp[topk_ids], log rest], *args) of token t, logp = log softmax z
    dL/dz  = g 1[v = target] + g_k 1[v = k] + p (g_rest / rest 1[v not in K] - sum(g) - g_H (logp + H))

    with g the gradients of token_weight · loss and sum(g) = g + sum_k g_k + g_rest. If only logp[target] has
    one, dL/dz = g (1[v = target] - p): the bracket is written in the pass that takes the statistics, and g
    scales the D columns of hidden and of its gradient instead of the V of the logits.

    Args:
      hidden: [T, D]. weight: [V, D]; a DTensor is gathered, its gradient summed over the ranks of its mesh.
      target: [T]; outside [0, V), as -100, logp is 0 without gradient.
      token_weight: [T] float, mask and normaliser, from global counts. Where it is 0, anything may stand.
      token_loss: separable(loss_fn). args: [T, ...] constants that loss_fn reads.
      entropy: give H [T], with gradient, to loss_fn; it is reported in any case.
      topk_ids: [T, K] distinct ids, or -1 in unused slots: loss_fn gets their logp [T, K], -inf where unused,
        and the log of the mass of all others [T], as `partition_divergence` takes them.
      rows: the work on whole rows of logits: `rows_triton` of linear_rows.py on CUDA; None is rows_torch.
      scale: (gradient, backward's factor), in place: `scale_triton` of linear_rows.py on CUDA; None is mul_.
      splits: the sum over V in the gradient of hidden goes in so many parts, added in float32: for a D whose
        few tiles leave a GPU half idle. Divides V.
      chunk: tokens at a time; default CHUNK, or what BUFFER_BYTES of logits hold, an eighth of them in torch,
        whose float32 temporaries are several times as large.
      logit_dtype: float32 keeps the logits of a bf16 matmul unrounded, in three times the buffer.
      grad_dtype: accumulator of the head's gradient over chunks; default weight.dtype.
    Returns: loss []; aux: loss, logp, entropy and the aux of loss_fn, [T] each, 0 where token_weight is 0.
      In float32 and nats. backward() may be called once: it scales the stored gradients in place.
    Raises ValueError for shapes that do not fit, and for scales and chunk <= 0.
    """
    weight = _gather_head(weight) if hasattr(weight, "full_tensor") else weight
    _check(hidden, weight, target, token_weight, args, topk_ids)
    if any(x is not None and x <= 0 for x in (temperature, logit_scale, softcap, chunk, splits)):
        raise ValueError(
            "linear_loss: want temperature, logit_scale, softcap, chunk and splits > 0, "
            f"got {temperature}, {logit_scale}, {softcap}, {chunk} and {splits}"
        )
    if weight.shape[0] % splits:
        raise ValueError(f"linear_loss: splits must divide V, got {splits} and {weight.shape[0]}")
    head = (bias, (float(logit_scale), softcap, float(temperature)), rows or rows_torch)
    (n, _), vocab = hidden.shape, weight.shape[0]
    logit_dtype = logit_dtype or hidden.dtype
    if chunk is None:
        row_bytes = vocab * logit_dtype.itemsize * (8 if rows is None else 1)
        chunk = min(CHUNK, max(128, BUFFER_BYTES // row_bytes // 128 * 128))  # a matmul's tiles have 128 rows
    learn = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    with torch.no_grad():
        dh = torch.empty_like(hidden) if learn[0] else None
        dw = torch.empty_like(weight, dtype=grad_dtype or weight.dtype) if learn[1] else None
        db = torch.zeros_like(bias, dtype=torch.float32) if learn[2] and bias is not None else None
        buffer = hidden.new_empty(min(chunk, n), vocab, dtype=logit_dtype)
        dbuffer = buffer if logit_dtype == hidden.dtype else torch.empty_like(buffer, dtype=hidden.dtype)
        y = torch.where((target >= 0) & (target < vocab), target, -1)
        on, parts = (token_weight != 0)[:, None], []
        for start in range(0, max(n, 1), chunk):  # once for no tokens too: aux has its keys
            at = slice(start, min(start + chunk, n))
            a, da, w = buffer[: at.stop - start], dbuffer[: at.stop - start], token_weight[at]
            h = torch.where(on[at], hidden[at], 0.0)
            _mm(h, weight.T, a)
            ids = None if topk_ids is None else torch.where(on[at], topk_ids[at], -1)
            part = [x[at] for x in args]
            g, aux = _chunk_loss(head, a, da, w, y[at], ids, token_loss, part, entropy, any(learn))
            parts.append(aux)
            if dh is not None:
                _mm_split(da, weight, dh[at], splits)
            if dh is not None and g is not None:
                dh[at].mul_(g[:, None])
            if db is not None:
                db += da.sum(0, dtype=db.dtype) if g is None else (g.to(da.dtype) @ da).to(db.dtype)
            if dw is not None:
                _accumulate(dw, da.T, h if g is None else h.mul_(g[:, None]), beta=float(start > 0))
        del buffer, dbuffer, a, da
        pairs = ((dh, hidden), (dw, weight), (db, bias))
        grads = [None if d is None or x is None else d.to(x.dtype) for d, x in pairs]
        del dh, dw, db, pairs
        off = token_weight == 0
        tokens = {k: torch.cat([p[k] for p in parts]).masked_fill(off, 0) for k in parts[0]}
        loss = (token_weight * tokens["loss"]).sum()
    return _Attach.apply(loss, hidden, weight, bias, *grads, scale or Tensor.mul_), tokens


class _Attach(torch.autograd.Function):
    """The loss, with gradients that are known. Scaled in place: a second head gradient is too much memory."""

    @staticmethod
    def forward(loss, hidden, weight, bias, dh, dw, db, scale):
        return loss.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[4:-1])
        ctx.scale = inputs[-1]

    @staticmethod
    def backward(ctx: Any, g: Tensor):  # type: ignore[override]
        saved = ctx.saved_tensors
        for d in saved:
            if d is not None:
                ctx.scale(d, g)
        return None, *saved, None, None, None, None


def _chunk_loss(
    head: tuple[Tensor | None, Scales, RowsOp], a: Tensor, da: Tensor, w: Tensor, y: Tensor,
    ids: Tensor | None, token_loss: TokenLoss, args: list[Tensor], entropy: bool, learn: bool,
) -> tuple[Tensor | None, dict[str, Tensor]]:  # fmt: skip
    """From raw logits a [t, V]: (g [t], aux), with g · da the gradient of a, or da if g is None. da may be a.

    y: -1 for no target.
    """
    bias, scales, rows = head
    unit = learn and not entropy and ids is None
    seen = rows(a, da if unit else None, y, ids, bias, scales)
    _, logp, h, log_k, log_rest = seen
    leaves = (logp, *((h,) if entropy else ()), *(() if ids is None else (log_k, log_rest)))
    grads, loss, aux = token_loss(w, leaves, *args)
    aux = {"loss": loss, "logp": logp, "entropy": h, **aux}
    if unit or not learn:
        return torch.where(y >= 0, grads[0], 0.0), aux
    topk = (None, None) if ids is None else grads[-2:]
    rows(a, da, y, ids, bias, scales, seen, (grads[0], grads[1] if entropy else None, *topk))
    return None, aux


def rows_torch(
    a: Tensor, da: Tensor | None, y: Tensor, ids: Tensor | None, bias: Tensor | None, scales: Scales,
    seen: Seen | None = None, grads: Grads | None = None,
) -> Seen:  # fmt: skip
    """Statistics of the rows of log softmax z, bent from raw logits a [t, V]; and, unless da is None, the
    gradient of `linear_loss` into da, which may be a; without grads, g is 1.

    seen = lse of z, logp[y], entropy, logp[ids], log rest;  grads = (g, g_H, g_k, g_rest)

    y [t]: -1 for no target. ids [t, K]: -1 in unused slots. seen: if it is known. May be compiled.
    """
    z, slope = _bend(a, bias, scales)
    rest, slot = z, None
    if ids is not None:  # they leave the row before its statistics: the rest is a sum, not a difference
        slot = torch.where(ids >= 0, ids, a.shape[1])
        z = pad(z, (0, 1), value=-math.inf)  # a column for unused slots
        rest = z.scatter(1, slot, -math.inf)
    lse_rest = rest.logsumexp(-1)
    log_r = (rest - lse_rest.clamp(min=FLOOR)[:, None]).clamp(min=FLOOR)
    r = log_r.exp()
    if seen is None:
        lse, h, log_k, log_rest = lse_rest, -(r * log_r).sum(-1), None, None
        if slot is not None:
            z_k = z.gather(1, slot)
            lse = torch.logaddexp(lse_rest, z_k.logsumexp(-1))
            log_k, log_rest = z_k - lse[:, None], lse_rest - lse
            h = log_rest.exp() * (h - log_rest.clamp(min=FLOOR))
            h = h - (log_k.exp() * log_k.clamp(min=FLOOR)).sum(-1)
        logp = torch.where(y >= 0, z.gather(1, y.clamp(min=0)[:, None]).squeeze(1) - lse, 0.0)
        seen = (lse, logp, h, log_k, log_rest)
    if da is None:
        return seen
    _, _, h, log_k, log_rest = seen
    given: Grads = grads or (torch.ones_like(h), None, None, None)
    g, g_h, g_k, g_rest = given
    g, g_h = torch.where(y >= 0, g, 0.0), torch.zeros_like(h) if g_h is None else g_h
    if ids is None:
        c0, c1 = -(g + g_h * h), -g_h
    else:  # by r = p / rest nothing overflows: dL/dz = r (c0 + c1 log r) + g 1[v = y] outside of ids
        rest = log_rest.exp()
        g_k, g_rest = torch.where(ids >= 0, g_k, 0.0), torch.where(rest > 0, g_rest, 0.0)
        total = g + g_k.sum(-1) + g_rest
        c0, c1 = g_rest - rest * (total + g_h * (h + log_rest.clamp(min=FLOOR))), -g_h * rest
    dz = r * (c0[:, None] + c1[:, None] * log_r)
    dz = dz + g[:, None] * (torch.arange(z.shape[1], device=a.device) == y[:, None])
    if slot is not None:
        d_k = total[:, None] + g_h[:, None] * (log_k.clamp(min=FLOOR) + h[:, None])
        d_k = g_k + g[:, None] * (ids == y[:, None]) - log_k.exp() * d_k
        dz = dz.scatter(1, slot, d_k)[:, :-1]
    da.copy_(dz * slope)
    return seen


def _bend(a: Tensor, bias: Tensor | None, scales: Scales) -> tuple[Tensor, Tensor | float]:
    """z and dz/da of raw logits. -inf says "no such token", and stays."""
    logit_scale, softcap, temperature = scales
    x = a.to(torch.promote_types(a.dtype, torch.float32))
    x = x if bias is None else x + bias
    slope = logit_scale / temperature
    if softcap is None:
        return x * slope, slope
    bent = torch.tanh(x * (logit_scale / softcap))
    return torch.where(x == -math.inf, -math.inf, bent * (softcap / temperature)), (1 - bent * bent) * slope


def _mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b, of bf16 factors into float32 too: CUDA never rounds, CPU multiplies in float32."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _mm_split(a: Tensor, b: Tensor, out: Tensor, splits: int) -> None:
    """out = a b, the inner sum in parts."""
    if splits == 1:
        torch.mm(a, b, out=out)
        return
    parts = a.unflatten(1, (splits, -1)).transpose(0, 1), b.unflatten(0, (splits, -1))
    wide: dict[str, Any] = {"out_dtype": torch.float32} if a.is_cuda and a.dtype != torch.float32 else {}
    out.copy_(torch.bmm(*parts, **wide).sum(0))


def _accumulate(total: Tensor, a: Tensor, b: Tensor, *, beta: float) -> None:
    """total = beta total + a b, in the dtype of total."""
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif a.is_cuda:
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def _gather_head(weight: Any) -> Tensor:
    """The whole head. Backward sums its gradient over the ranks, whose tokens differ, and shards it."""
    from torch.distributed.tensor import Partial

    return weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)


def _check(
    hidden: Tensor, weight: Tensor, target: Tensor, token_weight: Tensor, args: tuple[Tensor, ...],
    topk_ids: Tensor | None,
) -> None:  # fmt: skip
    tokens = (target, token_weight, *args) if topk_ids is None else (target, token_weight, *args, topk_ids)
    fits = hidden.dim() == 2 and weight.shape[1:] == hidden.shape[1:] and hidden.dtype == weight.dtype
    fits = fits and target.dim() == token_weight.dim() == 1 and (topk_ids is None or topk_ids.dim() == 2)
    if not fits or any(x.shape[:1] != hidden.shape[:1] for x in tokens):
        shapes = [tuple(x.shape) for x in (hidden, weight, *tokens)]
        raise ValueError(
            "linear_loss: want hidden [T, D] and weight [V, D] of one dtype, target and token_weight [T], "
            f"args [T, ...], topk_ids [T, K], got {hidden.dtype}, {weight.dtype} and {shapes}"
        )
