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


def rows_triton(
    a: Tensor,
    da: Tensor | None,
    y: Tensor,
    bias: Tensor | None,
    scales: tuple[float, float | None, float],
    lse: Tensor | None = None,
    coef: tuple[Tensor, Tensor, Tensor] | None = None,
    *,
    lanes: int = 2048,
    warps: int = 32,
    stages: int = 1,
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and entropy [t] of the rows of z, from raw logits a; their gradient into da, unless None.

    z  = softcap · tanh(logit_scale (a + bias) / softcap) / temperature,  without softcap the linear form
    da = (r (c0 + c1 log r) + gy 1[v = y]) dz/da,  r = exp(z - lse),  (c0, c1, gy) = coef, or (-1, 0, 1)

    Args:
      a: [t, V] on CUDA, contiguous, bf16, fp16 or float32; -inf takes no part. da: the same shape; may be a.
      y: [t] int64, -1 for no target. scales: (logit_scale, softcap or None, temperature).
      lse: [t], if known: the first reading is then left out and no entropy comes back. coef: three times [t].
      lanes: of 8 neighbouring columns each, a step. warps: 32 threads each. stages: reads in flight.
    Returns: lse, entropy, [t] float32, nats. `functools.partial` binds lanes, warps and stages.
    Raises ValueError if triton is not installed, or a and da are not contiguous.
    """
    if triton is None or not a.is_contiguous() or not (da is None or da.is_contiguous()):
        raise ValueError(f"rows_triton: want contiguous logits and triton, got {a.stride()} and {triton}")
    logit_scale, softcap, temperature = scales
    scale = logit_scale / temperature
    k = (scale if softcap is None else softcap / temperature) * math.log2(math.e)
    pre = 1.0 if softcap is None else logit_scale / softcap
    known, n = lse is not None, a.shape[0]
    lse = torch.empty(n, device=a.device) if lse is None else lse
    entropy = torch.empty_like(lse)
    if n:
        _rows_kernel[(n,)](
            a, a if da is None else da, y, lse if bias is None else bias, lse, entropy,
            *(coef or (lse, lse, lse)), pre, k, scale, STATS=not known, WRITE=da is not None,
            GIVEN=coef is not None, BIAS=bias is not None, CAP=softcap is not None, VOCAB=a.shape[1],
            LANES=lanes, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    return lse, entropy


def has_triton(device: torch.device) -> bool:
    """Whether rows_triton can run on tensors of this device."""
    return triton is not None and device.type == "cuda"


def _read(
    a_ptr, bias_ptr, col, pre,
    VOCAB: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """v, with z = v k / log2(e): the raw logit, its sum with the bias, or the tanh of a soft cap."""
    inside = col < VOCAB
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
    """One row, in units of log 2. A lane keeps its own maximum, so that no step waits for other lanes."""
    row = tl.program_id(0).to(tl.int64)
    a_ptr += row * VOCAB
    da_ptr += row * VOCAB
    STEP: tl.constexpr = LANES * 8
    WHOLE: tl.constexpr = VOCAB // STEP
    cols = tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    y = tl.load(y_ptr + row)
    v_y = _read(a_ptr, bias_ptr, tl.maximum(y, 0), pre, VOCAB, True, BIAS, CAP)
    if STATS:
        top = tl.full([LANES], -1e30, tl.float32)  # a finite -inf: its differences are finite
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
        mass = tl.where(peak == -1e30, 1.0, tl.sum(tl.exp2(fall) * mass, 0))  # any, if there is no token
        log_mass = peak * k + tl.log2(mass)
        tl.store(lse_ptr + row, tl.where(peak == -1e30, float("-inf"), log_mass * 0.6931471805599453))
        tl.store(h_ptr + row, (tl.log2(mass) - tilt / mass) * 0.6931471805599453)
    else:
        log_mass = tl.maximum(tl.load(lse_ptr + row), -1e30) * 1.4426950408889634
    if WRITE:
        c0, c1, gy = -1.0, 0.0, 1.0
        if GIVEN:
            c0, gy = tl.load(c0_ptr + row), tl.load(gy_ptr + row)
            c1 = tl.load(c1_ptr + row) * 0.6931471805599453
        else:
            log_mass -= tl.log2(scale)
        tl.debug_barrier()  # v_y is read, then written over
        if VOCAB % STEP:  # from the end, where the cache may still have it
            col = WHOLE * STEP + cols
            v = _read(a_ptr, bias_ptr, col, pre, VOCAB, False, BIAS, CAP)
            d = _slope(v, log_mass, k, c0, c1, scale, GIVEN, CAP)
            tl.store(da_ptr + col, d.to(da_ptr.dtype.element_ty), col < VOCAB)
        for i in tl.range(0, WHOLE, num_stages=STAGES):
            col = (WHOLE - 1 - i) * STEP + cols
            v = _read(a_ptr, bias_ptr, col, pre, VOCAB, True, BIAS, CAP)
            d = _slope(v, log_mass, k, c0, c1, scale, GIVEN, CAP)
            tl.store(da_ptr + col, d.to(da_ptr.dtype.element_ty))
        tl.debug_barrier()  # the row is written, then its target over it
        d = gy * scale + _slope(v_y, log_mass, k, c0, c1, scale, GIVEN, False)
        if CAP:
            d *= 1 - tl.minimum(v_y * v_y, 1.0)
        tl.store(da_ptr + y, d.to(da_ptr.dtype.element_ty), y >= 0)


if triton:
    _read, _absorb, _slope, _rows_kernel = map(triton.jit, (_read, _absorb, _slope, _rows_kernel))
