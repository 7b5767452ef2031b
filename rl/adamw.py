"""AdamW in one pass over memory: from gradients in low precision to masters, moments and working weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic
from torch.distributed.tensor import DTensor

from models.replica import Held, summed

LANES = 128  # elements of a row of what is compiled: a multiple of what a thread loads at once


def adamw_(
    master: Tensor, working: Tensor, grads: Sequence[Tensor], mean: Tensor, square: Tensor,
    factor: Tensor, lr: Tensor, rate: Tensor, root: Tensor,
    *, betas: tuple[float, float], eps: float, decay: float,
) -> None:  # fmt: skip
    """One parameter, in place; all but `working` and `grads` are float32.

    g = factor · Σ grads
    mean   ← β₁ mean + (1 - β₁) g
    square ← β₂ square + (1 - β₂) g²
    master ← (1 - lr · decay) master - rate · mean / (√square / root + ε),   working ← master

    rate = lr / (1 - β₁ᵗ), root = √(1 - β₂ᵗ) at step t = 1, 2, …; they, lr and factor are scalars, on the
    device: nothing is compiled for their values, and the host waits for none.
    28 bytes a parameter are moved with one bfloat16 gradient and such weights, 2 more for each further one;
    cast, clip, step and cast move 46.
    "Decoupled weight decay regularization", Loshchilov & Hutter 2019.
    """
    g = factor * summed(grads)
    mean.lerp_(g, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    master.mul_(1 - lr * decay).sub_(rate * mean / (square.sqrt() / root + eps))
    working.copy_(master)


@torch.no_grad()
def step(
    optimizer: torch.optim.AdamW,
    held: Sequence[Held],
    factor: Tensor,
    *,
    compile: bool,
    written: Callable[[int], None] = lambda i: None,
) -> None:
    """`optimizer.step()` from gradients that are held elsewhere, each multiplied by `factor`; of masters that
    are DTensors this rank's rows. `written` is told when the work on the i-th of `held` is queued.

    The optimiser's state is torch's, so that its checkpoints are. All parameters have taken as many steps.
    """
    (group,) = optimizer.param_groups
    states = [_state(optimizer, h.master) for h in held]
    torch._foreach_add_([state["step"] for state in states], 1)
    lr, t, betas = factor.new_full((), group["lr"]), states[0]["step"].double(), group["betas"]
    rate, root = (group["lr"] / (1 - betas[0] ** t)).float(), (1 - betas[1] ** t).sqrt().float()
    rate, root = rate.to(factor.device), root.to(factor.device)
    update = _compiled(adamw_) if compile else adamw_
    for i, (h, state) in enumerate(zip(held, states, strict=True)):
        if h.working.numel():
            update(
                _rows(h.master), _rows(h.working), [_rows(g) for g in h.grads], _rows(state["exp_avg"]),
                _rows(state["exp_avg_sq"]), factor, lr, rate, root,
                betas=betas, eps=group["eps"], decay=group["weight_decay"],
            )  # fmt: skip
        written(i)


@torch.no_grad()
def squared_norm(held: Sequence[Held], *, compile: bool) -> Tensor:
    """Σ (Σ grads)² over all entries, in float32: a scalar on the device."""
    if all(len(h.grads) == 1 for h in held):
        norms = torch._foreach_norm([g for h in held for g in h.grads], 2.0, dtype=torch.float32)
        return torch.stack(norms).square().sum()
    squares = _compiled(_squares) if compile else _squares
    rows = [squares([_rows(g) for g in h.grads]) for h in held if h.working.numel()]
    return torch.stack(torch._foreach_norm(rows, 1.0)).sum()


def _squares(grads: Sequence[Tensor]) -> Tensor:
    """Of each row: a graph for all sizes would split a sum over everything as the first of them needs it."""
    return summed(grads).square().sum(-1)


def _state(optimizer: torch.optim.AdamW, master: Tensor) -> dict[str, Any]:
    state = optimizer.state[master]
    if not state:
        state["step"] = torch.zeros((), device=master.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
    return state


def _rows(x: Tensor) -> Tensor:
    """[n / 128, 128], or [n] where that does not divide or is one row: two graphs for all sizes."""
    x = x.to_local() if isinstance(x, DTensor) else x
    rows = x.view(-1, LANES) if x.numel() > LANES and x.numel() % LANES == 0 else x.view(-1)
    maybe_mark_dynamic(rows, 0)
    return rows


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)
