"""Fused head and loss with the gradients found in the forward pass: three matmuls, where recomputing logits takes four.

One buffer holds the logits of a chunk of tokens; one pass takes each row's statistics and turns it into its gradient.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

# Any: both are missing on a machine without a GPU, where kernel="torch" needs neither
triton: Any = importlib.import_module("triton") if importlib.util.find_spec("triton") else None
tl: Any = importlib.import_module("triton.language") if triton else None


TokenLoss = Callable[..., tuple[tuple[Tensor, ...], Tensor, dict[str, Tensor]]]
FLOOR = -1e30  # a finite -inf: its differences stay finite and 0 · FLOOR is 0
BUFFER_BYTES = int(0.96 * 2**30)  # logits of a chunk by default; the torch path, whose temporaries are larger, takes 1/8


def separable(loss_fn: Callable[..., tuple[Tensor, dict[str, Tensor]]]) -> TokenLoss:
    """Pairs a per-token loss with its gradient, in the form that `linear_loss` takes.

        (loss, aux) = loss_fn(*leaves, *args)   ->   (∂ Σ_t token_weight_t · loss_t / ∂ leaves, loss, aux)

    Row t of the loss may depend on row t of the arguments only. Where token_weight is 0, so are loss and gradient. The
    caller may compile the result, once: torch.compile(separable(f)) makes two kernels of thirty.
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
    """Σ_t token_weight_t · loss_t of log-probs, with the gradients of hidden states and head found on the way.

        a = (hidden weightᵀ + bias) · logit_scale,  z = softcap · tanh(a / softcap) / temperature,  log p = log softmax z
        loss_t = loss_fn(log p_t[target_t] [, H_t] [, log p_t[topk_ids_t], log rest_t], *args_t)
        dz_v = g 1[v=target] + g_k 1[v=k] + g_rest p_v/rest 1[v∉K] - p_v (g + Σ_k g_k + g_rest + g_H (log p_v + H))

    where the g's are the derivatives of token_weight · loss. If only log p[target] has one, dz = g (1[v=target] - p_v):
    1[v=target] - p is then written in the pass that takes the statistics, and g scales D columns instead of V.

    Args:
        hidden: [T, D]. weight: [V, D]; a DTensor is gathered and its gradient summed over the ranks of its mesh.
        target: [T] ids; outside [0, V), say -100, log p is 0 and has no gradient.
        token_weight: [T] float, mask and normaliser from global counts. Where it is 0 anything may stand, NaN too.
        token_loss: `separable(loss_fn)`. args: [T, ...] constants that it reads, cut into chunks like hidden.
        entropy: hand H [T] to the loss, with its gradient. It is reported in any case.
        topk_ids: [T, K] distinct ids, -1 in unused slots. The loss gets their log p [T, K] (-inf in unused slots) and
            the log of the mass outside of them [T], as `partition_divergence` wants them.
        chunk: tokens per buffer; default as many as fit in BUFFER_BYTES of logits.
        logit_dtype: float32 keeps a bf16 matmul's logits unrounded, in three times the buffer. Default hidden.dtype.
        grad_dtype: accumulator of the head's gradient over chunks. Default weight.dtype. float32 takes 4·V·D bytes.
        kernel: "auto" is triton for CUDA tensors where it is installed, else torch. launch: its lanes, warps, stages.

    Returns:
        (loss [], tokens): tokens["loss"], ["logp"], ["entropy"] and loss_fn's aux, [T] each, detached. Float32, nats.
        backward() may be called once: it scales the stored gradients in place.

    Raises:
        ValueError: shapes do not match; a scale or chunk is not positive; triton asked for and not installed.
    """
    weight = _gather_head(weight) if hasattr(weight, "full_tensor") else weight
    _check(hidden, weight, target, token_weight, args, topk_ids, (temperature, softcap, chunk))
    if kernel == "triton" and triton is None:
        raise ValueError("linear_loss: kernel='triton' and triton is not installed; use kernel='torch'")
    fast = kernel == "triton" or (
        kernel == "auto" and triton is not None and hidden.is_cuda and hidden.dtype != torch.float64
    )
    head = _Head(bias, float(logit_scale), softcap, float(temperature), launch if fast else None)
    (n, _), vocab = hidden.shape, weight.shape[0]
    logit_dtype = logit_dtype or hidden.dtype
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
        for start in range(0, max(n, 1), chunk):  # once for no tokens too, so that aux has its keys
            rows = slice(start, min(start + chunk, n))
            w, a, da = token_weight[rows], buffer[: rows.stop - start], dbuffer[: rows.stop - start]
            on = (w != 0)[:, None]
            h = torch.where(on, hidden[rows], 0.0)
            _mm(h, weight.T, a)
            ids = None if topk_ids is None else torch.where(on, topk_ids[rows], -1)
            part = [x[rows] for x in args]
            g, tokens = _chunk_loss(head, a, da, w, target[rows], ids, token_loss, part, entropy, any(learn))
            loss = loss + (w * tokens["loss"]).sum()
            parts.append(tokens)
            if dh is not None:
                torch.mm(da, weight, out=dh[rows])
                dh[rows].mul_(g[:, None])
            if db is not None:
                db += (g.to(da.dtype) @ da).to(db.dtype)
            if dw is not None:
                _accumulate(dw, da.T, h.mul_(g[:, None]), beta=float(start > 0))
        tokens = {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
        grads = [None if d is None else d.to(x.dtype) for d, x in ((dh, hidden), (dw, weight), (db, bias))]
    return _Attach.apply(loss, hidden, weight, bias, *grads), tokens


class _Attach(torch.autograd.Function):
    """The loss, with gradients that are known already. In place: a second head gradient would double the memory."""

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
    """How raw logits a0 = hidden weightᵀ become z, and the Triton launch, or None for torch."""

    bias: Tensor | None
    logit_scale: float
    softcap: float | None
    temperature: float
    launch: tuple[int, int, int] | None


def _chunk_loss(
    head: _Head,
    a: Tensor,
    da: Tensor,
    w: Tensor,
    y: Tensor,
    ids: Tensor | None,
    token_loss: TokenLoss,
    args: list[Tensor],
    entropy: bool,
    learn: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses of a chunk from its raw logits a [t, V]; da [t, V], of which row t is still to be scaled by g [t]."""
    known = (y >= 0) & (y < a.shape[1])
    z_y, _ = _pick(head, a, torch.where(known, y, 0)[:, None])
    y = torch.where(known, y, -1)
    unit = learn and not entropy and ids is None
    if ids is None:
        lse, h = _rows(head, a, da if unit else None, y)
        lse_all, rest, log_rest, extra = lse, torch.ones_like(lse), torch.zeros_like(lse), ()
    else:  # the top k leave the row before its statistics: the rest is then a sum, not a difference
        used = ids >= 0
        one = ids.argmax(-1, keepdim=True)  # a used slot, if there is one: unused slots repeat what it does
        some = used.any(-1, keepdim=True)
        slot = torch.where(used, ids, ids.gather(-1, one)).clamp(min=0)
        z_k, slope_k = _pick(head, a, slot)
        a.scatter_(1, slot, torch.where(some, -math.inf, a.gather(1, slot)))
        lse, h_rest = _rows(head, a, None, y)
        z_k = torch.where(used, z_k, -math.inf)
        lse_all = torch.logaddexp(lse, z_k.logsumexp(-1))
        log_rest, log_k = lse - lse_all, z_k - lse_all[:, None]
        rest, p_k = log_rest.exp(), log_k.exp()
        h = rest * (h_rest - log_rest.clamp(min=FLOOR)) - (p_k * log_k.clamp(min=FLOOR)).sum(-1)
        extra = (log_k, log_rest)
    logp = torch.where(known, z_y.squeeze(-1) - lse_all, 0.0)
    grads, loss, aux = token_loss(w, (logp, *((h,) if entropy else ()), *extra), *args)
    tokens = {"loss": loss, "logp": logp, "entropy": h, **aux}
    g = torch.where(known, grads[0], 0.0)
    if unit or not learn:
        return g, tokens
    g_h, total = grads[1] if entropy else torch.zeros_like(g), g
    g_rest = torch.zeros_like(g)
    if ids is not None:
        g_k, g_rest = torch.where(used, grads[-2], 0.0), torch.where(rest > 0, grads[-1], 0.0)
        total = g + g_k.sum(-1) + g_rest
    # with r = p / rest nothing can overflow: dz = r (c0 + c1 log r) + g 1[y] outside K
    c0 = g_rest - rest * (total + g_h * (h + log_rest.clamp(min=FLOOR)))
    _rows(head, a, da, y, lse, (c0, -rest * g_h, g))
    if ids is not None:
        d_k = g_k + g[:, None] * (ids == y[:, None])
        d_k = d_k - p_k * (total[:, None] + g_h[:, None] * (log_k.clamp(min=FLOOR) + h[:, None]))
        d_k = (d_k * slope_k).to(da.dtype)
        d_one = torch.where(some, d_k.gather(-1, one), da.gather(1, slot))
        da.scatter_(1, slot, torch.where(used, d_k, d_one))
    return torch.ones_like(g), tokens


def _pick(head: _Head, a: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return _bend(a.gather(1, ids), None if head.bias is None else head.bias[ids], head)


def _bend(a: Tensor, bias: Tensor | None, head: _Head) -> tuple[Tensor, Tensor]:
    """z and dz/da0 of raw logits. -inf means "no such token" and stays."""
    x = a.to(torch.promote_types(a.dtype, torch.float32))
    x = x if bias is None else x + bias
    scale = head.logit_scale / head.temperature
    if head.softcap is None:
        return x * scale, torch.full_like(x[:, :1], scale)
    bent = torch.tanh(x * (head.logit_scale / head.softcap))
    z = torch.where(x == -math.inf, -math.inf, bent * (head.softcap / head.temperature))
    return z, (1 - bent * bent) * scale


def _rows(
    head: _Head,
    a: Tensor,
    da: Tensor | None,
    y: Tensor,
    lse: Tensor | None = None,
    coef: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(lse, entropy) of every row of z(a) unless lse is given, and into da, which may be a, if it is given,

        (r (c0 + c1 log r) + gy 1[y]) dz/da0,   r = exp(z - lse),   (c0, c1, gy) = (-1, 0, 1) unless given.
    """
    if head.launch is not None:
        return _rows_triton(head, head.launch, a, da, y, lse, coef)
    z, slope = _bend(a, head.bias, head)
    lse = z.logsumexp(-1) if lse is None else lse
    log_r = (z - lse.clamp(min=FLOOR)[:, None]).clamp(min=FLOOR)
    r = log_r.exp()
    h = -(r * log_r).sum(-1)
    if da is not None:
        c0, c1, gy = coef or (-torch.ones_like(lse), torch.zeros_like(lse), torch.ones_like(lse))
        dz = r * (c0[:, None] + c1[:, None] * log_r)
        dz.scatter_add_(1, y.clamp(min=0)[:, None], torch.where(y >= 0, gy, 0.0)[:, None])
        da.copy_(dz * slope)
    return lse, h


def _rows_triton(head: _Head, launch, a, da, y, lse, coef) -> tuple[Tensor, Tensor]:
    lanes, warps, stages = launch
    stats, given = lse is None, coef is not None
    lse = torch.empty(a.shape[0], device=a.device) if lse is None else lse
    h = torch.empty_like(lse)
    if a.shape[0]:
        slope, cap = head.logit_scale / head.temperature, head.softcap
        k = (slope if cap is None else cap / head.temperature) * math.log2(math.e)
        pre = 1.0 if cap is None else head.logit_scale / cap
        bias = lse if head.bias is None else head.bias
        flags = {"BIAS": head.bias is not None, "CAP": cap is not None, "STATS": stats, "GIVEN": given}
        _rows_kernel[(a.shape[0],)](
            a, a if da is None else da, y, bias, lse, h, *(coef or (lse, lse, lse)), pre, k, slope,
            WRITE=da is not None, VOCAB=a.shape[1], LANES=lanes, STAGES=stages, num_warps=warps, **flags,
        )  # fmt: skip
    return lse.masked_fill(lse < FLOOR / 10, -math.inf), h


def _read(a_ptr, bias_ptr, col, pre, VOCAB: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr):
    """v with z = v · k / log2(e): raw logits, biased, or the tanh of a soft cap."""
    inside = col < VOCAB
    v = (tl.load(a_ptr + col) if WHOLE else tl.load(a_ptr + col, inside, float("-inf"))).to(tl.float32)
    if BIAS:
        v += tl.load(bias_ptr + col, inside, 0.0).to(tl.float32)
    if CAP:
        bent = 1 - 2 / (tl.exp2(v * pre * 2.8853900817779268) + 1)
        v = tl.where(v == float("-inf"), v, bent)
    return v


def _absorb(v, top, mass, tilt, k):
    """Adds [LANES, 8] values to the running maximum, Σ 2^x and Σ 2^x x of each lane, x = (v - top) k."""
    v = tl.maximum(v, -1e30, propagate_nan=tl.PropagateNan.ALL)
    new = tl.maximum(top, tl.max(v, 1))
    x = v * k - (new * k)[:, None]
    e = tl.exp2(x)
    fall = (top - new) * k
    shrink = tl.exp2(fall)
    return new, shrink * mass + tl.sum(e, 1), shrink * (tilt + mass * fall) + tl.sum(e * x, 1)


def _gradient(v, k, log_mass, c0, c1, slope, GIVEN: tl.constexpr, CAP: tl.constexpr):
    """r (c0 + c1 log r) dz/da0, or -r dz/da0; for the latter log_mass has log2(slope) taken off."""
    x = v * k - log_mass
    d = -tl.exp2(x)
    if GIVEN:
        d = tl.exp2(x) * (c0 + c1 * tl.maximum(x, -1e30, propagate_nan=tl.PropagateNan.ALL)) * slope
    if CAP:
        d *= 1 - tl.minimum(v * v, 1.0)  # -inf has no gradient
    return d


def _rows_kernel(
    a_ptr, da_ptr, y_ptr, bias_ptr, lse_ptr, h_ptr, c0_ptr, c1_ptr, gy_ptr, pre, k, slope,
    STATS: tl.constexpr, WRITE: tl.constexpr, GIVEN: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    VOCAB: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`_rows` for one row, in units of log 2. Each lane has its own running maximum, so no step waits for the others."""
    row = tl.program_id(0).to(tl.int64)
    a_ptr += row * VOCAB
    da_ptr += row * VOCAB
    STEP: tl.constexpr = LANES * 8
    WHOLE: tl.constexpr = VOCAB // STEP
    cols = tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    y = tl.load(y_ptr + row)
    at_y = _read(a_ptr, bias_ptr, tl.maximum(y, 0), pre, VOCAB, True, BIAS, CAP)
    if STATS:
        top = tl.full([LANES], -1e30, tl.float32)  # finite, so that differences are
        mass = tl.zeros([LANES], tl.float32)
        tilt = tl.zeros([LANES], tl.float32)
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
            log_mass -= tl.log2(slope)
        if VOCAB % STEP:  # from the end, which is still in the cache
            v = _read(a_ptr, bias_ptr, WHOLE * STEP + cols, pre, VOCAB, False, BIAS, CAP)
            d = _gradient(v, k, log_mass, c0, c1, slope, GIVEN, CAP)
            tl.store(da_ptr + WHOLE * STEP + cols, d.to(da_ptr.dtype.element_ty), WHOLE * STEP + cols < VOCAB)
        for i in tl.range(0, WHOLE, num_stages=STAGES):
            col = (WHOLE - 1 - i) * STEP + cols
            v = _read(a_ptr, bias_ptr, col, pre, VOCAB, True, BIAS, CAP)
            d = _gradient(v, k, log_mass, c0, c1, slope, GIVEN, CAP)
            tl.store(da_ptr + col, d.to(da_ptr.dtype.element_ty))
        tl.debug_barrier()  # the row is written; now its target, by one thread
        d = _gradient(at_y, k, log_mass, c0, c1, slope, GIVEN, CAP)
        d += gy * slope * (1 - tl.minimum(at_y * at_y, 1.0) if CAP else 1.0)
        tl.store(da_ptr + y, d.to(da_ptr.dtype.element_ty), y >= 0)


if triton:
    _read, _absorb, _gradient, _rows_kernel = map(triton.jit, (_read, _absorb, _gradient, _rows_kernel))


def _mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b, where out may be float32 for bf16 factors: CUDA rounds nothing then, CPU multiplies in float32."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _accumulate(total: Tensor, a: Tensor, b: Tensor, *, beta: float) -> None:
    """total = beta · total + a b, in the dtype of total."""
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif a.is_cuda:
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def _gather_head(weight: Tensor) -> Tensor:
    """The whole head. Backward sums its gradient over the ranks, each of which has its own tokens, and shards it."""
    from torch.distributed.tensor import Partial

    mesh = weight.device_mesh  # type: ignore[attr-defined]
    return weight.full_tensor(grad_placements=[Partial()] * mesh.ndim)  # type: ignore[attr-defined]


def _check(hidden, weight, target, token_weight, args, topk_ids, positive) -> None:
    n = hidden.shape[0]
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or hidden.dtype != weight.dtype:
        raise ValueError(
            "linear_loss: hidden must be [T, D] and weight [V, D] of one dtype, "
            f"got {tuple(hidden.shape)} {hidden.dtype} and {tuple(weight.shape)} {weight.dtype}"
        )
    if target.shape != (n,) or token_weight.shape != (n,) or any(x.shape[:1] != (n,) for x in args):
        shapes = [tuple(x.shape) for x in (target, token_weight, *args)]
        raise ValueError(f"linear_loss: target, token_weight must be [{n}] and args [{n}, ...], got {shapes}")
    if topk_ids is not None and (topk_ids.dim() != 2 or topk_ids.shape[0] != n or topk_ids.shape[1] < 1):
        raise ValueError(f"linear_loss: topk_ids must be [{n}, K] with K >= 1, got {tuple(topk_ids.shape)}")
    if any(x is not None and x <= 0 for x in positive):
        raise ValueError(f"linear_loss: temperature, softcap and chunk must be > 0, got {positive}")
