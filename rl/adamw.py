"""AdamW in one pass over memory: from gradients in low precision to masters, moments and working weights.

On CUDA a Triton kernel takes all parameters of a unit, or of the model, in one launch; without Triton, and on
a CPU, torch does the same one by one.
"""

# pyright: reportInvalidTypeForm=false, reportIndexIssue=false
from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from models.checksum import has_triton
from models.layout import to_device
from models.replica import Held, own_part, summed

T = TypeVar("T")
BLOCK = 2048  # elements of a program of the kernel
tl: Any = None  # triton.language, once there is a kernel


class Slot(NamedTuple):
    """What a step reads and writes of one parameter, or of a rank's rows of it; contiguous."""

    master: Tensor  # float32, as both moments
    mean: Tensor
    square: Tensor
    working: Tensor
    grads: tuple[Tensor, ...]  # of one dtype


@torch.no_grad()
def step(
    optimizer: torch.optim.AdamW,
    units: Sequence[Sequence[Held]],
    factor: Tensor,
    *,
    written: Callable[[int], None] = lambda i: None,
) -> None:
    """`optimizer.step()` from gradients that are held elsewhere, each multiplied by `factor`; of masters that
    are DTensors this rank's rows. `written` is told when the work on the i-th unit is queued, the largest
    unit's first: what it begins takes longest, and the steps of the others hide it.

    g = factor · Σ grads
    mean   ← β₁ mean + (1 - β₁) g
    square ← β₂ square + (1 - β₂) g²
    master ← (1 - lr · decay) master - lr / (1 - β₁ᵗ) · mean / (√square / √(1 - β₂ᵗ) + ε),   working ← master

    at step t = 1, 2, …, in float32. The optimiser's state is torch's, so that its checkpoints are. All
    parameters have taken as many steps. The host waits for nothing.
    28 bytes a parameter are moved with one bfloat16 gradient and such weights, 2 more for each further one;
    cast, clip, step and cast move 46.
    "Decoupled weight decay regularization", Loshchilov & Hutter 2019.
    """
    (group,) = optimizer.param_groups
    states = [[_state(optimizer, h.master) for h in unit] for unit in units]
    torch._foreach_add_([state["step"] for unit in states for state in unit], 1)
    lr, betas, t = group["lr"], group["betas"], states[0][0]["step"].double().to(factor.device)
    keep = factor.new_full((), 1 - lr * group["weight_decay"], dtype=torch.float64)
    scalars = torch.stack([factor, keep, lr / (1 - betas[0] ** t), (1 - betas[1] ** t).sqrt()]).float()
    update = step_triton if has_triton(factor.device) else step_torch
    sizes = [sum(h.master.numel() for h in unit) for unit in units]  # not of rows: ranks agree
    for i in sorted(range(len(units)), key=lambda i: -sizes[i]):
        slots = [
            Slot(own_part(h.master), own_part(s["exp_avg"]), own_part(s["exp_avg_sq"]), h.working, h.grads)
            for h, s in zip(units[i], states[i], strict=True)
            if h.working.numel()
        ]
        update(slots, scalars, betas, group["eps"])
        written(i)


@torch.no_grad()
def squared_norm(held: Sequence[Held]) -> Tensor:
    """Σ (Σ grads)² over all entries, in float32: a scalar on the device."""
    grads = [h.grads for h in held if h.working.numel()]
    device = held[0].working.device
    partial = norms_triton(grads) if grads and has_triton(device) else norms_torch(grads)
    return torch.cat([*partial, torch.zeros(1, device=device)]).sum()


@torch.no_grad()
def warm(optimizer: torch.optim.Optimizer, working: Tensor, ranks: int) -> None:
    """Compile the kernels of `step` and `squared_norm` for weights as `working` of any alignment, and all
    their gradients: of one micro-batch or sums of several, in one piece or as many as ranks."""
    if not has_triton(working.device):
        return
    (group,), scalars = optimizer.param_groups, working.new_ones(4, dtype=torch.float32)
    for size, n, dtype in product((BLOCK, BLOCK - 1), {1, ranks}, {working.dtype, torch.float32}):
        master, mean, square = (working.new_zeros(size, dtype=torch.float32) for _ in range(3))
        grads = tuple(working.new_zeros(size, dtype=dtype) for _ in range(n))
        norms_triton([grads])
        slot = Slot(master, mean, square, working.new_zeros(size), grads)
        step_triton([slot], scalars, group["betas"], group["eps"])


def step_torch(slots: Sequence[Slot], scalars: Tensor, betas: tuple[float, float], eps: float) -> None:
    """In place. scalars: [4] float32, on the device: factor, 1 - lr · decay, lr / (1 - β₁ᵗ), √(1 - β₂ᵗ)."""
    factor, keep, rate, root = scalars
    for master, mean, square, working, grads in slots:
        g = factor * summed(grads)
        mean.lerp_(g, 1 - betas[0])
        square.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
        master.mul_(keep).sub_(rate * mean / (square.sqrt() / root + eps))
        working.copy_(master)


def norms_torch(grads: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Squares, added up in any parts: each [n] float32."""
    return [summed(g).square().sum()[None] for g in grads]


def step_triton(slots: Sequence[Slot], scalars: Tensor, betas: tuple[float, float], eps: float) -> None:
    """`step_torch`, in one launch for all slots whose dtypes are the same."""
    for some in _alike(slots, lambda s: (s.working.dtype, *_kind(s.grads))):
        rows = [(*_dense(s.grads), s.working, s.master, s.mean, s.square) for s in some]
        _launch(rows, len(some[0].grads), scalars, betas, eps)


def norms_triton(grads: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """`norms_torch`, in one launch for all gradients whose dtypes are the same."""
    out = []
    for some in _alike(grads, _kind):
        device = some[0][0].device
        out.append(torch.empty(len(_chunks(_sizes(some), device)), device=device))
        _launch([_dense(g) for g in some], len(some[0]), out[-1])
    return out


def _state(optimizer: torch.optim.AdamW, master: Tensor) -> dict[str, Any]:
    state = optimizer.state[master]
    if not state:
        state["step"] = torch.zeros((), device=master.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
    return state


def _alike(items: Sequence[T], kind: Callable[[T], Any]) -> list[list[T]]:
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(kind(item), []).append(item)
    return list(groups.values())


def _kind(grads: Sequence[Tensor]) -> tuple[int, torch.dtype]:
    return len(grads), grads[0].dtype


def _dense(grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(g.contiguous() for g in grads)


def _sizes(rows: Sequence[Sequence[Tensor]]) -> tuple[int, ...]:
    return tuple(row[0].numel() for row in rows)


# ── The kernel ────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def _chunks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """[chunks, 2] int32: of which tensor each is, and its number there."""
    counts = np.array([-(-n // BLOCK) for n in sizes])
    of = np.repeat(np.arange(len(sizes)), counts)
    nth = np.arange(len(of)) - np.repeat(counts.cumsum() - counts, counts)
    return torch.from_numpy(np.stack([of, nth], 1).astype(np.int32)).to(device)


def _launch(
    rows: Sequence[Sequence[Tensor]], n_grads: int, beside: Tensor, betas: tuple[float, float] = (0.0, 0.0),
    eps: float = 0.0,
) -> None:  # fmt: skip
    """rows: of each parameter its `n_grads` gradients, and to step it the working weights, the master and
    both moments. beside: the scalars of the step, or where squares go, [chunks]."""
    device, sizes, steps = rows[0][0].device, _sizes(rows), len(rows[0]) > n_grads
    # `rows` keep alive what the addresses are of, until the launch is queued
    table = [(n, *(x.data_ptr() for x in row)) for n, row in zip(sizes, rows, strict=True)]
    aligned = all(number % 16 == 0 for row in table for number in row)
    chunks = _chunks(sizes, device)
    there = to_device(torch.tensor(table, dtype=torch.int64), device)
    with torch.cuda.device(device if device.type == "cuda" else -1):
        _jitted()[(len(chunks),)](
            there, chunks, beside, 1 - betas[0], betas[1], 1 - betas[1], eps, FIELDS=len(table[0]),
            N_GRADS=n_grads, GRAD=_dtype(rows[0][0]), WORKING=_dtype(rows[0][n_grads]) if steps else None,
            WIDTH=BLOCK, ALIGNED=aligned, num_warps=8,
        )  # fmt: skip


def _kernel(
    table_ptr, chunks_ptr, beside_ptr, rise1, beta2, rise2, eps, FIELDS: tl.constexpr, N_GRADS: tl.constexpr,
    GRAD: tl.constexpr, WORKING: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One chunk. ALIGNED: sizes and addresses are multiples of 16, so that lanes load 16 bytes at once."""
    chunk = tl.program_id(0)
    entry = table_ptr + tl.load(chunks_ptr + 2 * chunk) * FIELDS
    start = tl.load(chunks_ptr + 2 * chunk + 1).to(tl.int64) * WIDTH
    size = tl.load(entry)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    place = start + tl.arange(0, WIDTH)
    inside = place < size
    g = tl.zeros([WIDTH], tl.float32)
    for i in tl.static_range(N_GRADS):
        address = tl.load(entry + 1 + i).to(tl.pointer_type(GRAD))
        if ALIGNED:
            address = tl.multiple_of(address, 16)
        g += tl.load(address + place, inside, 0).to(tl.float32)
    if WORKING is None:
        tl.store(beside_ptr + chunk, tl.sum(g * g, 0))
    else:
        factor, keep = tl.load(beside_ptr), tl.load(beside_ptr + 1)
        rate, root = tl.load(beside_ptr + 2), tl.load(beside_ptr + 3)
        working_ptr = tl.load(entry + 1 + N_GRADS).to(tl.pointer_type(WORKING))
        master_ptr = tl.load(entry + 2 + N_GRADS).to(tl.pointer_type(tl.float32))
        mean_ptr = tl.load(entry + 3 + N_GRADS).to(tl.pointer_type(tl.float32))
        square_ptr = tl.load(entry + 4 + N_GRADS).to(tl.pointer_type(tl.float32))
        if ALIGNED:
            master_ptr, mean_ptr = tl.multiple_of(master_ptr, 16), tl.multiple_of(mean_ptr, 16)
            square_ptr, working_ptr = tl.multiple_of(square_ptr, 16), tl.multiple_of(working_ptr, 16)
        g *= factor
        mean, square = tl.load(mean_ptr + place, inside), tl.load(square_ptr + place, inside)
        mean += rise1 * (g - mean)
        square = beta2 * square + rise2 * g * g
        master = keep * tl.load(master_ptr + place, inside) - rate * mean / (tl.sqrt(square) / root + eps)
        tl.store(mean_ptr + place, mean, inside)
        tl.store(square_ptr + place, square, inside)
        tl.store(master_ptr + place, master, inside)
        tl.store(working_ptr + place, master.to(WORKING), inside)


def _dtype(x: Tensor) -> Any:
    """Triton's name of it is torch's."""
    _jitted()
    return getattr(tl, str(x.dtype).removeprefix("torch."))


@functools.cache
def _jitted() -> Any:
    global tl
    tl = importlib.import_module("triton.language")
    return importlib.import_module("triton").jit(_kernel)
