"""Fused head and loss, gradients found in the forward pass: three matmuls, where recomputing logits takes four.

One buffer holds the logits of a chunk of tokens; one pass takes each row's statistics and makes it its gradient.
"""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

# Any: missing on machines without a GPU, where kernel="torch" needs neither
triton: Any = importlib.import_module("triton") if importlib.util.find_spec("triton") else None
tl: Any = importlib.import_module("triton.language") if triton else None

TokenLoss = Callable[..., tuple[tuple[Tensor, ...], Tensor, dict[str, Tensor]]]
FLOOR = -1e30  # a finite -inf: its differences are finite, and 0 * FLOOR is 0
BUFFER_BYTES = int(0.96 * 2**30)  # a chunk's logits, by default; an eighth in torch, whose temporaries are float32


def separable(loss_fn: Callable[..., tuple[Tensor, dict[str, Tensor]]]) -> TokenLoss:
    """A per-token loss together with its gradient, as `linear_loss` takes it.

    (loss, aux) = loss_fn(*leaves, *args)  ->  (d sum_t token_weight_t loss_t / d leaves, loss, aux)

    Row t of the loss may depend on row t of its arguments only. Where token_weight is 0, loss and gradient are.
    The caller may compile the result, once: torch.compile(separable(f)) makes two kernels of thirty.
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
    kernel: Literal["auto", "triton", "torch"] = "auto",
    launch: tuple[int, int, int] = (1024, 16, 3),
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of token_weight · loss over tokens, from hidden states and head, never holding more than chunk × V.

    a      = (hidden weightᵀ + bias) · logit_scale
    z      = softcap · tanh(a / softcap) / temperature,  or a / temperature without softcap
    loss_t = loss_fn(logp_t[target] [, H_t] [, logp_t[topk_ids_t], log rest_t], *args_t),  logp = log softmax z
    dL/dz  = g 1[v = target] + g_k 1[v = k] + p (g_rest / rest 1[v not in K] - sum(g) - g_H (logp + H))

    with g the gradients of token_weight · loss and sum(g) = g + sum_k g_k + g_rest. If only logp[target] has one,
    dL/dz = g (1[v = target] - p): the bracket is written in the pass that takes the statistics, and g scales the
    D columns of hidden and of its gradient instead of the V of the logits.

    Args:
      hidden: [T, D]. weight: [V, D]; a DTensor is gathered, its gradient summed over the ranks of its mesh.
      target: [T]; outside [0, V), as -100, logp is 0 without gradient.
      token_weight: [T] float, mask and normaliser, from global counts. Where it is 0, anything may stand.
      token_loss: separable(loss_fn). args: [T, ...] constants that loss_fn reads.
      entropy: give H [T], with gradient, to loss_fn; it is reported in any case.
      topk_ids: [T, K] distinct ids, or -1 in unused slots: loss_fn gets their logp [T, K], -inf where unused,
        and the log of the mass of all others [T], as `partition_divergence` takes them.
      chunk: tokens at a time; default what BUFFER_BYTES hold. kernel: auto is triton for CUDA tensors where it
        is installed, else torch. launch: lanes, warps, stages of the kernel.
      logit_dtype: float32 keeps the logits of a bf16 matmul unrounded, in three times the buffer.
      grad_dtype: accumulator of the head's gradient over chunks; default weight.dtype.
    Returns: loss []; aux: loss, logp, entropy and the aux of loss_fn, [T] each. Float32, nats. backward() once
      only: it scales the stored gradients in place.
    Raises ValueError for shapes that do not fit, scales and chunk <= 0, and triton where it is not installed.
    """
    weight = _gather_head(weight) if hasattr(weight, "full_tensor") else weight
    _check(hidden, weight, target, token_weight, args, topk_ids, (temperature, logit_scale, softcap, chunk))
    if kernel == "triton" and triton is None:
        raise ValueError("linear_loss: kernel='triton', and triton is not installed; take 'torch'")
    on_gpu = triton is not None and hidden.is_cuda and hidden.dtype != torch.float64
    fast = kernel == "triton" or (kernel == "auto" and on_gpu)
    head = _Head(bias, float(logit_scale), softcap, float(temperature), launch if fast else None)
    (n, _), vocab, logit_dtype = hidden.shape, weight.shape[0], logit_dtype or hidden.dtype
    if chunk is None:
        row_bytes = vocab * logit_dtype.itemsize * (1 if fast else 8)
        chunk = max(128, BUFFER_BYTES // row_bytes // 128 * 128)  # a matmul's tiles have 128 rows
    learn = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    with torch.no_grad():
        dh = torch.empty_like(hidden) if learn[0] else None
        dw = torch.empty_like(weight, dtype=grad_dtype or weight.dtype) if learn[1] else None
        db = torch.zeros_like(bias, dtype=torch.float32) if learn[2] and bias is not None else None
        buffer = hidden.new_empty(min(chunk, n), vocab, dtype=logit_dtype)
        dbuffer = buffer if logit_dtype == hidden.dtype else torch.empty_like(buffer, dtype=hidden.dtype)
        loss, parts = 0.0, []
        for start in range(0, max(n, 1), chunk):  # once for no tokens too: aux has its keys
            rows = slice(start, min(start + chunk, n))
            a, da, w = buffer[: rows.stop - start], dbuffer[: rows.stop - start], token_weight[rows]
            on = (w != 0)[:, None]
            h = torch.where(on, hidden[rows], 0.0)
            _mm(h, weight.T, a)
            ids = None if topk_ids is None else torch.where(on, topk_ids[rows], -1)
            part = [x[rows] for x in args]
            g, aux = _chunk_loss(head, a, da, w, target[rows], ids, token_loss, part, entropy, any(learn))
            loss = loss + (w * aux["loss"]).sum()
            parts.append(aux)
            if dh is not None:
                torch.mm(da, weight, out=dh[rows])
                dh[rows].mul_(g[:, None])
            if db is not None:
                db += (g.to(da.dtype) @ da).to(db.dtype)
            if dw is not None:
                _accumulate(dw, da.T, h.mul_(g[:, None]), beta=float(start > 0))
        grads = [None if d is None else d.to(x.dtype) for d, x in ((dh, hidden), (dw, weight), (db, bias))]
        del dh, dw, db
    return _Attach.apply(loss, hidden, weight, bias, *grads), {k: torch.cat([p[k] for p in parts]) for k in parts[0]}


class _Attach(torch.autograd.Function):
    """The loss, with gradients that are known already. In place: another head gradient would double the memory."""

    @staticmethod
    def forward(loss, hidden, weight, bias, dh, dw, db):
        return loss.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[4:])

    @staticmethod
    def backward(ctx: Any, g: Tensor):  # type: ignore[override]
        return None, *(None if d is None else d.mul_(g) for d in ctx.saved_tensors), None, None, None


class _Head(NamedTuple):
    """How raw logits, hidden weightᵀ, become z; and the Triton launch, or None for torch."""

    bias: Tensor | None
    logit_scale: float
    softcap: float | None
    temperature: float
    launch: tuple[int, int, int] | None


def _chunk_loss(
    head: _Head, a: Tensor, da: Tensor, w: Tensor, y: Tensor, ids: Tensor | None,
    token_loss: TokenLoss, args: list[Tensor], entropy: bool, learn: bool,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """From raw logits a [t, V]: (g [t], aux), with g · da the gradient of a. da [t, V] may be a."""
    known = (y >= 0) & (y < a.shape[1])
    z_y, _ = _bend(head, a, torch.where(known, y, 0)[:, None])
    y = torch.where(known, y, -1)
    unit = learn and not entropy and ids is None
    lse_rest, log_rest, topk = torch.zeros(()), None, ()
    if ids is None:
        lse, h = _rows(head, a, da if unit else None, y)
        lse_rest, rest, log_rest = lse, torch.ones_like(lse), torch.zeros_like(lse)
    else:  # the K leave the row before its statistics: the rest is a sum, not a difference
        used = ids >= 0
        some = used.any(-1, keepdim=True)
        one = ids.argmax(-1, keepdim=True)  # a used slot: the unused ones do what it does
        slot = torch.where(used, ids, ids.gather(-1, one)).clamp(min=0)
        z_k, slope_k = _bend(head, a, slot)
        z_k = z_k.masked_fill(~used, -math.inf)
        a.scatter_(1, slot, torch.where(some, -math.inf, a.gather(1, slot)))
        lse_rest, h_rest = _rows(head, a, None, y)
        lse = torch.logaddexp(lse_rest, z_k.logsumexp(-1))
        log_rest, log_k = lse_rest - lse, z_k - lse[:, None]
        rest, p_k = log_rest.exp(), log_k.exp()
        h = rest * (h_rest - log_rest.clamp(min=FLOOR)) - (p_k * log_k.clamp(min=FLOOR)).sum(-1)
        topk = (log_k, log_rest)
    logp = torch.where(known, z_y.squeeze(-1) - lse, 0.0)
    grads, loss, aux = token_loss(w, (logp, *((h,) if entropy else ()), *topk), *args)
    aux = {"loss": loss, "logp": logp, "entropy": h, **aux}
    g = torch.where(known, grads[0], 0.0)
    if unit or not learn:
        return g, aux
    g_h, g_rest, g_sum = grads[1] if entropy else torch.zeros_like(g), torch.zeros_like(g), g
    if ids is not None:
        g_k, g_rest = torch.where(used, grads[-2], 0.0), torch.where(rest > 0, grads[-1], 0.0)
        g_sum = g + g_k.sum(-1) + g_rest
    # by r = p / rest nothing overflows: dL/dz = r (c0 + c1 log r) + g 1[v = target] outside of K
    c0 = g_rest - rest * (g_sum + g_h * (h + log_rest.clamp(min=FLOOR)))
    _rows(head, a, da, y, lse_rest, (c0, -rest * g_h, g))
    if ids is not None:
        d_k = g_k + g[:, None] * (ids == y[:, None])
        d_k -= p_k * (g_sum[:, None] + g_h[:, None] * (log_k.clamp(min=FLOOR) + h[:, None]))
        d_k = (d_k * slope_k).to(da.dtype)
        d_one = torch.where(some, d_k.gather(-1, one), da.gather(1, slot))
        da.scatter_(1, slot, torch.where(used, d_k, d_one))
    return torch.ones_like(g), aux


def _bend(head: _Head, a: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """z and dz/da of raw logits, or of their columns ids [t, k]. -inf says "no such token", and stays."""
    a, bias = (a, head.bias) if ids is None else (a.gather(1, ids), None if head.bias is None else head.bias[ids])
    x = a.to(torch.promote_types(a.dtype, torch.float32))
    x = x if bias is None else x + bias
    slope = head.logit_scale / head.temperature
    if head.softcap is None:
        return x * slope, torch.full_like(x[:, :1], slope)
    bent = torch.tanh(x * (head.logit_scale / head.softcap))
    z = torch.where(x == -math.inf, -math.inf, bent * (head.softcap / head.temperature))
    return z, (1 - bent * bent) * slope


def _rows(
    head: _Head, a: Tensor, da: Tensor | None, y: Tensor, lse: Tensor | None = None,
    coef: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(lse, entropy) of each row of z, unless lse is given. And if da is given, into da, which may be a:

    (r (c0 + c1 log r) + gy 1[v = y]) dz/da,   r = exp(z - lse),   (c0, c1, gy) = (-1, 0, 1) unless given
    """
    if head.launch is not None:
        return _rows_triton(head, head.launch, a, da, y, lse, coef)
    z, slope = _bend(head, a)
    lse = z.logsumexp(-1) if lse is None else lse
    log_r = (z - lse.clamp(min=FLOOR)[:, None]).clamp(min=FLOOR)
    r = log_r.exp()
    if da is not None:
        c0, c1, gy = coef or (-torch.ones_like(lse), torch.zeros_like(lse), torch.ones_like(lse))
        dz = r * (c0[:, None] + c1[:, None] * log_r)
        da.copy_(dz.scatter_add_(1, y.clamp(min=0)[:, None], torch.where(y >= 0, gy, 0.0)[:, None]) * slope)
    return lse, -(r * log_r).sum(-1)


def _rows_triton(
    head: _Head, launch: tuple[int, int, int], a: Tensor, da: Tensor | None, y: Tensor, lse: Tensor | None,
    coef: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (lanes, warps, stages), stats, slope, cap = launch, lse is None, head.logit_scale / head.temperature, head.softcap
    lse = torch.empty(a.shape[0], device=a.device) if lse is None else lse
    h = torch.empty_like(lse)
    k = (slope if cap is None else cap / head.temperature) * math.log2(math.e)
    pre = 1.0 if cap is None else head.logit_scale / cap
    if a.shape[0]:
        _rows_kernel[(a.shape[0],)](
            a, a if da is None else da, y, lse if head.bias is None else head.bias, lse, h,
            *(coef or (lse, lse, lse)), pre, k, slope, STATS=stats, WRITE=da is not None, GIVEN=coef is not None,
            BIAS=head.bias is not None, CAP=cap is not None, VOCAB=a.shape[1], LANES=lanes, STAGES=stages,
            num_warps=warps,
        )  # fmt: skip
    return lse.masked_fill(lse < FLOOR / 10, -math.inf), h


def _read(a_ptr, bias_ptr, col, pre, VOCAB: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr):
    """v, with z = v k / log2(e): the raw logit, its sum with the bias, or the tanh of a soft cap."""
    inside = col < VOCAB
    v = (tl.load(a_ptr + col) if WHOLE else tl.load(a_ptr + col, inside, float("-inf"))).to(tl.float32)
    if BIAS:
        v += tl.load(bias_ptr + col, inside, 0.0).to(tl.float32)
    if CAP:
        v = tl.where(v == float("-inf"), v, 1 - 2 / (tl.exp2(v * pre * 2.8853900817779268) + 1))
    return v


def _absorb(v, top, mass, tilt, k):
    """Takes [LANES, 8] values into each lane's maximum, sum of 2^x and sum of 2^x x, where x = (v - top) k."""
    v = tl.maximum(v, -1e30, propagate_nan=tl.PropagateNan.ALL)
    new = tl.maximum(top, tl.max(v, 1))
    x = v * k - (new * k)[:, None]
    e, fall = tl.exp2(x), (top - new) * k
    shrink = tl.exp2(fall)
    return new, shrink * mass + tl.sum(e, 1), shrink * (tilt + mass * fall) + tl.sum(e * x, 1)


def _slope(v, log_mass, k, c0, c1, scale, GIVEN: tl.constexpr, CAP: tl.constexpr):
    """r (c0 + c1 log2 r) dz/da; or -r dz/da, for which log_mass is less by log2(scale)."""
    x = v * k - log_mass
    d = -tl.exp2(x)
    if GIVEN:
        d = tl.exp2(x) * (c0 + c1 * tl.maximum(x, -1e30, propagate_nan=tl.PropagateNan.ALL)) * scale
    if CAP:
        d *= 1 - tl.minimum(v * v, 1.0)  # -inf has no gradient
    return d


def _rows_kernel(
    a_ptr, da_ptr, y_ptr, bias_ptr, lse_ptr, h_ptr, c0_ptr, c1_ptr, gy_ptr, pre, k, scale,
    STATS: tl.constexpr, WRITE: tl.constexpr, GIVEN: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    VOCAB: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`_rows` for one row, in units of log 2. A lane keeps its own maximum, so no step waits for other lanes."""
    row = tl.program_id(0).to(tl.int64)
    a_ptr += row * VOCAB
    da_ptr += row * VOCAB
    STEP: tl.constexpr = LANES * 8
    WHOLE: tl.constexpr = VOCAB // STEP
    cols = tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    y = tl.load(y_ptr + row)
    v_y = _read(a_ptr, bias_ptr, tl.maximum(y, 0), pre, VOCAB, True, BIAS, CAP)
    if STATS:
        top, mass, tilt = tl.full([LANES], -1e30, tl.float32), tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
        for i in tl.range(0, WHOLE, num_stages=STAGES):
            v = _read(a_ptr, bias_ptr, i * STEP + cols, pre, VOCAB, True, BIAS, CAP)
            top, mass, tilt = _absorb(v, top, mass, tilt, k)
        if VOCAB % STEP:
            v = _read(a_ptr, bias_ptr, WHOLE * STEP + cols, pre, VOCAB, False, BIAS, CAP)
            top, mass, tilt = _absorb(v, top, mass, tilt, k)
        peak = tl.max(top, 0)
        fall = (top - peak) * k
        tilt = tl.sum(tl.exp2(fall) * (tilt + mass * fall), 0)
        mass = tl.sum(tl.exp2(fall) * mass, 0)
        log_mass = peak * k + tl.log2(mass)
        tl.store(lse_ptr + row, log_mass * 0.6931471805599453)
        tl.store(h_ptr + row, (tl.log2(mass) - tilt / mass) * 0.6931471805599453)
    else:
        log_mass = tl.maximum(tl.load(lse_ptr + row), -1e30) * 1.4426950408889634
    if WRITE:
        c0, c1, gy = -1.0, 0.0, 1.0
        if GIVEN:
            c0, c1, gy = tl.load(c0_ptr + row), tl.load(c1_ptr + row) * 0.6931471805599453, tl.load(gy_ptr + row)
        else:
            log_mass -= tl.log2(scale)
        if VOCAB % STEP:  # from the end, which is still in the cache
            col = WHOLE * STEP + cols
            v = _read(a_ptr, bias_ptr, col, pre, VOCAB, False, BIAS, CAP)
            d = _slope(v, log_mass, k, c0, c1, scale, GIVEN, CAP)
            tl.store(da_ptr + col, d.to(da_ptr.dtype.element_ty), col < VOCAB)
        for i in tl.range(0, WHOLE, num_stages=STAGES):
            col = (WHOLE - 1 - i) * STEP + cols
            v = _read(a_ptr, bias_ptr, col, pre, VOCAB, True, BIAS, CAP)
            tl.store(da_ptr + col, _slope(v, log_mass, k, c0, c1, scale, GIVEN, CAP).to(da_ptr.dtype.element_ty))
        tl.debug_barrier()  # the row is written, then its target over it
        d = gy * scale + _slope(v_y, log_mass, k, c0, c1, scale, GIVEN, False)
        if CAP:
            d *= 1 - tl.minimum(v_y * v_y, 1.0)
        tl.store(da_ptr + y, d.to(da_ptr.dtype.element_ty), y >= 0)


if triton:
    _read, _absorb, _slope, _rows_kernel = map(triton.jit, (_read, _absorb, _slope, _rows_kernel))


def _mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b, of bf16 factors into float32 too: CUDA does not round in between, CPU multiplies in float32."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _accumulate(total: Tensor, a: Tensor, b: Tensor, *, beta: float) -> None:
    """total = beta total + a b, in the dtype of total."""
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif a.is_cuda:
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def _gather_head(weight: Any) -> Tensor:
    """The whole head. Backward sums its gradient over the ranks, which have different tokens, and shards it."""
    from torch.distributed.tensor import Partial

    return weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)


def _check(
    hidden: Tensor, weight: Tensor, target: Tensor, token_weight: Tensor, args: tuple[Tensor, ...],
    topk_ids: Tensor | None, positive: tuple[float | None, ...],
) -> None:  # fmt: skip
    n, topk = hidden.shape[:1], () if topk_ids is None else (topk_ids,)
    rows = (target, token_weight, *args, *topk)
    fits = all(x.shape[:1] == n for x in rows) and target.dim() == token_weight.dim() == 1 and all(x.dim() == 2 for x in topk)
    if hidden.dim() != 2 or weight.shape[1:] != hidden.shape[1:] or hidden.dtype != weight.dtype or not fits:
        raise ValueError(
            "linear_loss: want hidden [T, D] and weight [V, D] of one dtype, target and token_weight [T], args [T, ...], "
            f"topk_ids [T, K], got {hidden.dtype}, {weight.dtype}, {[tuple(x.shape) for x in (hidden, weight, *rows)]}"
        )
    if any(x is not None and x <= 0 for x in positive):
        raise ValueError(f"linear_loss: want temperature, logit_scale, softcap and chunk > 0, got {positive}")
