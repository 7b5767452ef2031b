"""Causal attention over packed sequences, many of different length in one row: which kernel, and its call."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from models.layout import Layout, make_layout, padded_attention

__all__ = [
    "Backend",
    "Layout",
    "attention_backend",
    "choose_attention",
    "make_layout",
    "packed_attention",
]

Backend = Literal["fa4", "flash", "varlen", "padded"]
FASTEST_FIRST: tuple[Backend, ...] = ("fa4", "flash", "varlen", "padded")
# torch 2.11 takes fewer key heads as they are
GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def choose_attention(asked: str, device: torch.device | str, dtype: torch.dtype) -> Backend:
    """The kernel to train with on this device, once at the start; "auto" is the fastest that can run.

    fa4: FlashAttention 4, `flash_attn.cute` (Hopper and later). flash: FlashAttention 2, `flash_attn`.
    varlen: torch's own. padded: torch's on sequences padded to the longest, anywhere.
    Raises ValueError where the one asked for cannot run, saying why.
    """
    for backend in FASTEST_FIRST:
        if asked in (backend, "auto"):
            why = _hindrance(backend, torch.device(device), dtype)
            if why is None:
                return backend
            if asked != "auto":
                raise ValueError(f"choose_attention: {asked} {why}; ask for auto")
    raise ValueError(f"choose_attention: want auto or one of {FASTEST_FIRST}, got {asked!r}")


def _hindrance(backend: Backend, device: torch.device, dtype: torch.dtype) -> str | None:
    if backend == "padded":
        return None
    if attention_backend(device, dtype) == "padded":
        return f"wants CUDA and bfloat16 or float16, not {device.type} and {str(dtype)[6:]}"
    if backend == "flash" and not _installed("flash_attn.flash_attn_interface"):
        return "wants the package flash-attn"
    if backend == "fa4":
        if not (_installed("flash_attn.cute") and _installed("cutlass")):
            return "wants the packages flash-attn-4 and nvidia-cutlass-dsl"
        if torch.cuda.get_device_capability(device) < (9, 0):
            return "wants a GPU of compute capability 9.0 or later"
    return None


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def attention_backend(device: torch.device | str, dtype: torch.dtype = torch.float32) -> Backend:
    """What `packed_attention` takes unless told: what torch itself has for the device."""
    half = dtype in (torch.bfloat16, torch.float16)
    return "varlen" if torch.device(device).type == "cuda" and half else "padded"


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, backend: Backend | None = None
) -> Tensor:
    """softmax(q kᵀ / sqrt(H)) v, causal within each sequence of the row.

    q [T, N, H], k and v [T, K, H] -> [T, N, H]. K divides N: query head n reads key head n // (N / K).
    "GQA", Ainslie et al. 2023.
    """
    backend = backend or attention_backend(q.device, q.dtype)
    if backend == "padded":
        return padded_attention(q, k, v, layout)
    if layout.keys is not None:
        k, v = k.index_select(0, layout.keys), v.index_select(0, layout.keys)
    lengths = layout.cu_q, layout.cu_k, layout.max_q, layout.max_k
    if backend == "fa4":
        return _fa4(q, k, v, *lengths)[0]
    if backend == "flash":
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

        return flash_attn_varlen_func(q, k, v, *lengths, causal=True)
    o = varlen_attn(q, k, v, *lengths, window_size=(-1, 0), **GQA)
    assert isinstance(o, Tensor)
    return o


# ── FlashAttention 4 as an operation of torch: a compiled block holds it without a break in the graph ──


@torch.library.custom_op("viva::fa4", mutates_args=())
def _fa4(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int
) -> tuple[Tensor, Tensor]:
    """Attention [T, N, H] and the log of the softmax's denominators [N, T], float32, without a gradient."""
    from flash_attn.cute.interface import _flash_attn_fwd  # type: ignore[import-not-found]

    o, lse, *_ = _flash_attn_fwd(
        q, k, v, causal=True, return_lse=True,
        cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
    )  # fmt: skip
    return o, lse


@torch.library.custom_op("viva::fa4_backward", mutates_args=())
def _fa4_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor,
    max_q: int, max_k: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _fa4_backward_into(grads, do, q, k, v, o, lse, cu_q, cu_k, max_q, max_k)
    return grads


@torch.library.custom_op("viva::fa4_backward_joined", mutates_args=())
def _fa4_backward_joined(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor,
    max_q: int, max_k: int,
) -> Tensor:  # fmt: skip
    """All gradients side by side [T, N + 2 K, H]: where they come from one tensor nothing is copied."""
    joined = q.new_empty(_joined_shape(q, k))
    grads = joined.split(_heads(q, k), dim=1)
    _fa4_backward_into(grads, do, q, k, v, o, lse, cu_q, cu_k, max_q, max_k)
    return joined


def _fa4_backward_into(
    grads: Sequence[Tensor], do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
) -> None:  # fmt: skip
    from flash_attn.cute.interface import _flash_attn_bwd  # type: ignore[import-not-found]

    dq, dk, dv = grads
    _flash_attn_bwd(
        q, k, v, o, do, lse, causal=True, dq=dq, dk=dk, dv=dv,
        cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
    )  # fmt: skip


def _heads(q: Tensor, k: Tensor) -> list[int]:
    return [q.shape[1], k.shape[1], k.shape[1]]


def _joined_shape(q: Tensor, k: Tensor) -> tuple[int, int, int]:
    return q.shape[0], sum(_heads(q, k)), q.shape[2]


@_fa4.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@_fa4_backward.register_fake
def _(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor,
    max_q: int, max_k: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@_fa4_backward_joined.register_fake
def _(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor,
    max_q: int, max_k: int,
) -> Tensor:  # fmt: skip
    return q.new_empty(_joined_shape(q, k))


def _fa4_save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_q, cu_k, ctx.max_q, ctx.max_k = inputs
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)


def _fa4_grad(ctx: Any, do: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, *rest = ctx.saved_tensors
    if q.shape[0] == k.shape[0]:  # of len(q) the compiler would make a constant
        joined = _fa4_backward_joined(do, q, k, *rest, ctx.max_q, ctx.max_k)
        grads = joined.split(_heads(q, k), dim=1)
    else:
        grads = _fa4_backward(do, q, k, *rest, ctx.max_q, ctx.max_k)
    return *grads, None, None, None, None


_fa4.register_autograd(_fa4_grad, setup_context=_fa4_save)
