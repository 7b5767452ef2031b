"""The work of `linear_loss` on whole rows of logits as one Triton kernel: their statistics and gradient.

A row is read for its statistics, then again, and overwritten: three times through memory, at a copy's rate.
"""

# pyright: reportInvalidTypeForm=false, reportIndexIssue=false
from __future__ import annotations

import importlib
import importlib.util
import math
from typing import Any

import torch
from torch import Tensor

# Any, and None where it is not installed: torch without CUDA comes without it
triton: Any = importlib.import_module("triton") if importlib.util.find_spec("triton") else None
tl: Any = importlib.import_module("triton.language") if triton else None
Seen = tuple[Tensor, Tensor, Tensor, Any, Any]  # None for what no ids, or no entropy, asks for
Grads = tuple[Tensor, Any, Any, Any]


def rows_triton(
    a: Tensor,
    da: Tensor | None,
    y: Tensor,
    ids: Tensor | None,
    bias: Tensor | None,
    scales: tuple[float, float | None, float],
    seen: Seen | None = None,
    grads: Grads | None = None,
    *,
    lanes: int | None = None,
    warps: int | None = None,
    stages: int = 1,
) -> Seen:
    """Statistics of the rows of log softmax z, from raw logits a; and, unless da is None, a gradient into da.

    z    = softcap · tanh(logit_scale (a + bias) / softcap) / temperature,  without softcap the linear form
    seen = lse of z, logp[y], entropy H, logp[ids], log rest: the mass of all v not in ids
    da   = (g 1[v = y] + g_k 1[v = k] + p (g_rest / rest 1[v not in ids] - sum(g) - g_H (logp + H))) dz/da
           with grads = (g, g_H, g_k, g_rest); without them g is 1

    Args:
      a: [t, V] on CUDA, contiguous, bf16, fp16 or float32; -inf takes no part; what stands at ids is lost.
      da: the same shape; may be a. y: [t] int64, -1 for no target. ids: [t, K] int64, distinct, -1 in unused
        slots, or None. scales: (logit_scale, softcap or None, temperature).
      seen: if known, the first reading is left out. grads: float32, [t] and g_k [t, K]; g_H may be None, and
        is g_k and g_rest where ids is; they want seen.
      lanes: of 8 neighbouring columns each, a step. warps: 32 threads each. None: what reads, or writes,
        fastest. stages: reads in flight. `functools.partial` binds them.
    Returns: seen, [t] and logp[ids] [t, K], float32, nats.
    Raises ValueError if triton is not installed, or a and da are not contiguous.
    """
    if triton is None or not a.is_contiguous() or not (da is None or da.is_contiguous()):
        raise ValueError(f"rows_triton: want contiguous logits and triton, got {a.stride()} and {triton}")
    logit_scale, softcap, temperature = scales
    scale = logit_scale / temperature
    k = (scale if softcap is None else softcap / temperature) * math.log2(math.e)
    pre = 1.0 if softcap is None else logit_scale / softcap
    (n, vocab), top, stats = a.shape, 0 if ids is None else ids.shape[1], seen is None
    if seen is None:
        lse, logp, entropy, log_rest = torch.empty(4, n, device=a.device)
        seen = (lse, logp, entropy, None, None)
        if ids is not None:
            seen = (lse, logp, entropy, lse.new_empty(n, top), log_rest)
    given = grads or (None, None, None, None)
    rest = (x if x is None else x.contiguous() for x in (ids, bias, *seen, *given))
    if n:
        _rows_kernel[(n,)](
            a, a if da is None else da, y, *(y if x is None else x for x in rest), pre, k, scale,
            STATS=stats, WRITE=da is not None, GIVEN=grads is not None, TILT=given[1] is not None,
            BIAS=bias is not None, CAP=softcap is not None, VOCAB=vocab, TOP=top,
            SLOTS=triton.next_power_of_2(max(top, 1)), LANES=lanes or (256 if da is None else 2048),
            STAGES=stages, num_warps=warps or (8 if da is None else 32),
        )  # fmt: skip
    return seen


def scale_triton(x: Tensor, factor: Tensor) -> None:
    """x *= factor, of one element, on CUDA; x, contiguous, is left alone, and unread, where that is 1.

    A device's scalar times a bf16 tensor is a slow operation of torch, a fifth of the memory's rate, and the
    factor of a loss is nearly always 1, which no host can know without waiting for the device.
    """
    _scale_kernel[(1024,)](x, factor, x.numel(), BLOCK=8192, num_warps=8)
    torch.autograd.graph.increment_version(x)  # as an operation of torch does


def has_triton(device: torch.device) -> bool:
    """Whether rows_triton can run on tensors of this device."""
    return triton is not None and device.type == "cuda"


def _scale_kernel(x_ptr, factor_ptr, n, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, at < n).to(tl.float32)
            tl.store(x_ptr + at, (x * factor).to(x_ptr.dtype.element_ty), at < n)


def _read(
    a_ptr, bias_ptr, col, inside, pre, WHOLE: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """v, with z = v k / log2(e): the raw logit, its sum with the bias, or the tanh of a soft cap."""
    v = (tl.load(a_ptr + col) if WHOLE else tl.load(a_ptr + col, inside, float("-inf"))).to(tl.float32)
    if BIAS:
        v += tl.load(bias_ptr + col, inside, 0.0).to(tl.float32)
    if CAP:
        v = tl.where(v == float("-inf"), v, 1 - 2 / (tl.exp2(v * pre * 2.8853900817779268) + 1))
    return v


def _absorb(v, top, mass, tilt, k):
    """Takes [LANES, 8] values into each lane's maximum, sum of 2^x and sum of 2^x x, x = (v - top) k."""
    v = tl.maximum(v, -1e30, propagate_nan=tl.PropagateNan.ALL)
    new = tl.maximum(top, tl.max(v, 1))
    # v k - new k is not 0 in one fused operation: of a lane of -1e30 it would be 1e23, of either sign
    x = v * k - tl.where(new == -1e30, 0.0, new * k)[:, None]
    e, fall = tl.exp2(x), (top - new) * k
    shrink = tl.exp2(fall)
    return new, shrink * mass + tl.sum(e, 1), shrink * (tilt + mass * fall) + tl.sum(e * x, 1)


def _slope(v, log_mass, k, c0, c1, TILT: tl.constexpr, CAP: tl.constexpr):
    """r (c0 + c1 log2 r) dv/da, r = 2^(v k - log_mass)."""
    x = v * k - log_mass
    d = tl.exp2(x) * (c0 + c1 * tl.maximum(x, -1e30, propagate_nan=tl.PropagateNan.ALL) if TILT else c0)
    if CAP:
        d *= 1 - tl.minimum(v * v, 1.0)  # -inf has no gradient
    return d


def _rows_kernel(
    a_ptr, da_ptr, y_ptr, ids_ptr, bias_ptr, lse_ptr, logp_ptr, h_ptr, log_k_ptr, log_rest_ptr,
    g_ptr, g_h_ptr, g_k_ptr, g_rest_ptr, pre, k, scale,
    STATS: tl.constexpr, WRITE: tl.constexpr, GIVEN: tl.constexpr, TILT: tl.constexpr, BIAS: tl.constexpr,
    CAP: tl.constexpr, VOCAB: tl.constexpr, TOP: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One row, in units of log 2. A lane keeps its own maximum, so that no step waits for other lanes."""
    row = tl.program_id(0).to(tl.int64)
    a_ptr += row * VOCAB
    da_ptr += row * VOCAB
    STEP: tl.constexpr = LANES * 8
    WHOLE: tl.constexpr = VOCAB // STEP
    NONE: tl.constexpr = -1e30  # a finite -inf: its differences are finite, and 0 * NONE is 0
    LN2: tl.constexpr = 0.6931471805599453
    cols = tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    last = WHOLE * STEP + cols
    y = tl.load(y_ptr + row)
    if TOP:
        slot = tl.arange(0, SLOTS)
        ids = tl.load(ids_ptr + row * TOP + slot, slot < TOP, -1)
    if STATS:
        v_y = _read(a_ptr, bias_ptr, tl.maximum(y, 0), True, pre, True, BIAS, CAP)
        if TOP:  # they leave the row before its statistics: the rest is a sum, not a difference
            x_k = _read(a_ptr, bias_ptr, ids, ids >= 0, pre, False, BIAS, CAP) * k
            x_k = tl.maximum(x_k, NONE, propagate_nan=tl.PropagateNan.ALL)
            tl.debug_barrier()  # they and v_y are read, then written over
            tl.store(a_ptr + ids, float("-inf"), ids >= 0)
            tl.debug_barrier()
        top = tl.full([LANES], NONE, tl.float32)
        mass = tl.zeros([LANES], tl.float32)
        tilt = tl.zeros([LANES], tl.float32)
        for i in tl.range(0, WHOLE, num_stages=STAGES):
            v = _read(a_ptr, bias_ptr, i * STEP + cols, True, pre, True, BIAS, CAP)
            top, mass, tilt = _absorb(v, top, mass, tilt, k)
        if VOCAB % STEP:
            v = _read(a_ptr, bias_ptr, last, last < VOCAB, pre, False, BIAS, CAP)
            top, mass, tilt = _absorb(v, top, mass, tilt, k)
        peak = tl.max(top, 0)
        fall = (top - peak) * k
        tilt = tl.sum(tl.exp2(fall) * (tilt + mass * fall), 0)
        mass = tl.where(peak == NONE, 1.0, tl.sum(tl.exp2(fall) * mass, 0))  # any, if there is no token
        log_mass = tl.where(peak == NONE, NONE, peak * k + tl.log2(mass))
        h = tl.log2(mass) - tilt / mass
        if TOP:
            peak = tl.maximum(log_mass, tl.max(x_k, 0))
            total = peak + tl.log2(tl.exp2(log_mass - peak) + tl.sum(tl.exp2(x_k - peak), 0))
            log_k, log_rest = x_k - total, log_mass - total
            h = tl.exp2(log_rest) * (h - log_rest) - tl.sum(tl.exp2(log_k) * log_k, 0)
            log_k = tl.where(x_k == NONE, float("-inf"), log_k * LN2)
            tl.store(log_k_ptr + row * TOP + slot, log_k, slot < TOP)
            tl.store(log_rest_ptr + row, tl.where(log_mass == NONE, float("-inf"), log_rest * LN2))
        else:
            total = log_mass
        lse = tl.where(total == NONE, float("-inf"), total * LN2)
        tl.store(lse_ptr + row, lse)
        logp = tl.where(y >= 0, v_y * k * LN2 - lse, 0.0)
        tl.store(logp_ptr + row, logp)
        tl.store(h_ptr + row, h * LN2)
    else:
        total = tl.maximum(tl.load(lse_ptr + row), NONE) / LN2
        logp, log_mass = tl.load(logp_ptr + row), total
    if WRITE:
        g, g_h, c1 = tl.where(y >= 0, 1.0, 0.0), 0.0, 0.0
        c0 = -g * scale
        if GIVEN:
            g, h = tl.where(y >= 0, tl.load(g_ptr + row), 0.0), tl.load(h_ptr + row)
            g_sum, g_rest, log_rest, rest = g, 0.0, 0.0, 1.0
            if TILT:
                g_h = tl.load(g_h_ptr + row)
            if TOP:
                log_k = tl.load(log_k_ptr + row * TOP + slot, slot < TOP, float("-inf"))
                g_k = tl.load(g_k_ptr + row * TOP + slot, ids >= 0, 0.0)
                log_rest = tl.maximum(tl.load(log_rest_ptr + row), NONE)
                log_mass, rest = total + log_rest / LN2, tl.exp(log_rest)
                g_rest = tl.where(log_rest == NONE, 0.0, tl.load(g_rest_ptr + row))
                g_sum += tl.sum(g_k, 0) + g_rest
            # by r = p / rest nothing overflows: dL/dz = r (c0 + c1 log2 r) + g 1[v = target] outside of ids
            c0 = (g_rest - rest * (g_sum + g_h * (h + log_rest))) * scale
            c1 = -g_h * rest * LN2 * scale
        if STATS:
            tl.debug_barrier()  # v_y is read, then written over
        if VOCAB % STEP:  # from the end, where the cache may still have it
            v = _read(a_ptr, bias_ptr, last, last < VOCAB, pre, False, BIAS, CAP)
            d = _slope(v, log_mass, k, c0, c1, TILT, CAP)
            tl.store(da_ptr + last, d.to(da_ptr.dtype.element_ty), last < VOCAB)
        for i in tl.range(0, WHOLE, num_stages=STAGES):
            col = (WHOLE - 1 - i) * STEP + cols
            v = _read(a_ptr, bias_ptr, col, True, pre, True, BIAS, CAP)
            d = _slope(v, log_mass, k, c0, c1, TILT, CAP)
            tl.store(da_ptr + col, d.to(da_ptr.dtype.element_ty))
        tl.debug_barrier()  # the row is written, then its target over it
        v_y = (logp / LN2 + total) / k
        d = g * scale
        if CAP:
            d *= 1 - tl.minimum(v_y * v_y, 1.0)
        d += _slope(v_y, log_mass, k, c0, c1, TILT, CAP)
        tl.store(da_ptr + y, d.to(da_ptr.dtype.element_ty), y >= 0)
        if TOP:
            tl.debug_barrier()  # the target, then the ids, which may have it
            log_k = tl.maximum(log_k, NONE)
            d = g_k + tl.where(ids == y, g, 0.0) - tl.exp(log_k) * (g_sum + g_h * (log_k + h))
            d *= scale
            if CAP:
                v = (log_k / LN2 + total) / k
                d *= 1 - tl.minimum(v * v, 1.0)
            tl.store(da_ptr + ids, d.to(da_ptr.dtype.element_ty), ids >= 0)


if triton:
    _read, _absorb, _slope, _rows_kernel, _scale_kernel = map(
        triton.jit, (_read, _absorb, _slope, _rows_kernel, _scale_kernel)
    )
