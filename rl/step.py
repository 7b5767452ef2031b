"""One optimiser step: `state, metrics = train_step(state, micros, ...)`. The old state is consumed: rebind at
once. Or in parts, as micro-batches arrive: begin → accumulate, any number of times → finish."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from losses import linear_logp
from models.attention import Backend, Layout, packed_attention
from models.parallelise import reshard, sync_gradients
from models.replica import own_part, replica_of
from models.transformer import Attend, Transformer
from rl import adamw
from rl.batch import MicroBatch
from rl.config import Trainer
from rl.objective import Objective, Sums, quotients
from rl.survey import Survey


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    model: Transformer
    optimizer: torch.optim.Optimizer
    version: int  # optimiser steps taken
    attention: Backend | None = None  # as `choose_attention` says; None: what torch has


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A step in the making: gradients lie in the model, sums of the metrics here, on the model's device."""

    state: TrainState
    sums: dict[str, Tensor]  # name → [2], float64
    graphs: int  # compiled before the step
    synced: bool = True  # whether all gradients so far are reduced over the ranks


def make_optimizer(model: nn.Module, cfg: Trainer) -> torch.optim.AdamW:
    fused = next(model.parameters()).is_cuda or cfg.offload
    return torch.optim.AdamW(
        model.parameters(),
        lr=cfg.lr,
        betas=cfg.betas,
        weight_decay=cfg.weight_decay,
        fused=fused,
        foreach=not fused,
    )


def learning_rate(cfg: Trainer, version: int) -> float:
    """Linear warm-up over `warmup` steps, then linear decay to final_lr · lr at the last step.

    A function of the version alone, so it goes on after a resume.
    """
    warm = min(1.0, (version + 1) / cfg.warmup) if cfg.warmup else 1.0
    done = min(1.0, version / max(1, cfg.steps - 1))
    return cfg.lr * warm * (1.0 - (1.0 - cfg.final_lr) * done)


def train_step(
    state: TrainState, micros: Sequence[MicroBatch], objective: Objective, cfg: Trainer
) -> tuple[TrainState, dict[str, float]]:
    """Accumulate the gradient of Σ objective over the micro-batches (and ranks), clip it, step. Version +
    1."""
    return finish(gradient(state, micros, objective), cfg)


def gradient(state: TrainState, micros: Sequence[MicroBatch], objective: Objective) -> Pending:
    """That of a whole step, over the micro-batches and ranks."""
    pending = begin(state)
    for i, (micro, survey) in enumerate(zip(micros, _survey(state, micros, objective), strict=True)):
        pending = accumulate(pending, micro, objective, survey, sync=i == len(micros) - 1)
    return pending


def begin(state: TrainState) -> Pending:
    _forget(state)
    return Pending(state=state, sums={}, graphs=compiled_graphs())


def abandon(state: TrainState) -> None:
    """Leave a step that was begun: the model is as before it, without gradients."""
    reshard(state.model)
    _forget(state)


def _forget(state: TrainState) -> None:
    if (replica := replica_of(state.model)) is not None:
        replica.forget()
    else:
        state.optimizer.zero_grad(set_to_none=True)


def accumulate(
    pending: Pending,
    micro: MicroBatch,
    objective: Objective,
    survey: Survey | None = None,
    *,
    sync: bool = True,
) -> Pending:
    """Add a micro-batch's gradient and sums, in any order; all ranks must call it alike. Waits for nothing.

    sync: reduce the gradient over ranks. The last micro-batch of a step must; before it, not to spares the
    ranks' traffic and takes 4 bytes a parameter on each.
    survey: where the objective makes them, from all micro-batches of the step (then nothing can stream).
    """
    if survey is None and objective.survey is not None:
        raise ValueError(
            "accumulate: this loss looks at the whole step before its first gradient; call train_step"
        )
    state, survey = pending.state, survey or Survey()
    sync_gradients(state.model, sync)
    hidden = _hidden(state, micro)
    _mark_trained(hidden, micro, survey)
    loss, sums = objective.loss(hidden, state.model.head, micro, survey)
    loss.backward()
    once = 0.0 if pending.sums else 1.0 / world_size()  # of all micro-batches and ranks: added, not averaged
    sums["loss/total"] = (loss.detach(), torch.full_like(loss, once))
    return replace(pending, sums=_added(pending.sums, sums), synced=sync)


def finish(pending: Pending, cfg: Trainer, *, scale: float = 1.0) -> tuple[TrainState, dict[str, float]]:
    """Clip the gradient, multiplied by `scale`, and step. Version + 1.

    scale: where the weights of all terms lack the same factor, as 1 / tokens that nobody could count before
    the last micro-batch came. The gradient is linear in them, so it comes out the same.
    """
    state = pending.state
    if not pending.synced:
        raise ValueError("finish: the last micro-batch was accumulated with sync=False")
    reshard(state.model)
    lr = learning_rate(cfg, state.version)
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    names, table = _over_ranks(pending.sums)
    norm, step = _clipped(state, cfg.clip_grad, scale)
    arrived = to_host(torch.cat([table, norm.to(table).expand(1, 2)]))
    step()
    *rows, last = arrived().tolist()  # here the host waits: for the norm, not for the step
    sums = {name: (total, count) for name, (total, count) in zip(names, rows, strict=True)}
    total, share = sums["loss/total"]
    metrics = {
        **quotients({**sums, "loss/total": (scale * total, share)}),
        "train/grad_norm": last[0],
        "train/lr": lr,
        "compile/recompiles": float(compiled_graphs() - pending.graphs),
    }
    return replace(state, version=state.version + 1), metrics


def _clipped(state: TrainState, bound: float, scale: float) -> tuple[Tensor, Callable[[], None]]:
    """The gradient's norm, a scalar on the device, and what steps."""
    replica = replica_of(state.model)
    if replica is None:
        norm = clip_gradients(state.model, bound, scale=scale)
        return norm, lambda: state.optimizer.step()
    units = replica.gradients()
    squared = adamw.squared_norm([held for unit in units for held in unit])
    norm = scale * replica.over_ranks(squared).sqrt()
    factor = clip_factor(norm, bound, scale)
    optimizer = state.optimizer
    assert isinstance(optimizer, torch.optim.AdamW)

    def step() -> None:
        adamw.step(optimizer, units, factor, written=replica.written)
        replica.stepped()

    return norm, step


def to_host(x: Tensor) -> Callable[[], Tensor]:
    """Begin to copy; what is returned waits for the copy alone, not for work that is queued after it."""
    there = x.to("cpu", non_blocking=True)
    if not x.is_cuda:
        return lambda: there
    done = torch.cuda.Event()
    done.record()

    def arrived() -> Tensor:
        done.synchronize()
        return there

    return arrived


def _hidden(state: TrainState, micro: MicroBatch) -> Tensor:
    """[M, D], of the states that predict the trained tokens."""
    layout = micro.layout
    _vary(layout.cu_q, layout.cu_k, layout.keys)
    attend = attend_packed(layout, state.attention)
    return state.model(micro.ids, layout.positions, attend).index_select(0, micro.select)


def _mark_trained(hidden: Tensor, micro: MicroBatch, survey: Survey) -> None:
    _vary(hidden, micro.target, micro.row, micro.logp_mu, micro.version, micro.adv, micro.logp_ref)
    _vary(*micro.weight.values(), *micro.mask.values(), survey.selected, survey.keep)
    for taught in micro.teachers.values():
        _vary(taught.at, taught.mask, taught.weight, taught.logp, taught.rows, taught.ids)


def _vary(*tensors: Tensor | None) -> None:
    """Tell the compiler that lengths change from one micro-batch to the next: one graph for all. (That of a
    row it finds out, so that where all are the same its graph is of that length.)"""
    for x in tensors:
        if x is not None:
            maybe_mark_dynamic(x, 0)


@torch.no_grad()
def _survey(state: TrainState, micros: Sequence[MicroBatch], objective: Objective) -> list[Survey]:
    if objective.survey is None:
        return [Survey()] * len(micros)
    logps = []
    for micro in micros:
        hidden = _hidden(state, micro)
        logp, _ = linear_logp(hidden, state.model.head, micro.target, temperature=objective.temperature)
        logps.append(logp)
    return objective.survey(logps, micros, state.version)


def attend_packed(layout: Layout, backend: Backend | None = None) -> Attend:
    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_attention(q, k, v, layout, backend)

    return attend


@torch.no_grad()
def clip_gradients(model: nn.Module, bound: float, *, scale: float = 1.0) -> Tensor:
    """Multiply the gradient by `scale`, and then to a global norm <= bound (0: any). Returns the norm, over
    all shards, between the two: a scalar, for which the host need not wait."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    local = [own_part(g) for g in grads]
    norm = scale * total_norm(local)
    mesh = grads[0].device_mesh if isinstance(grads[0], DTensor) else None
    if mesh is not None and mesh.size() > 1:
        squared = norm.square().to(mesh.device_type)
        dist.all_reduce(squared, group=mesh.get_group())
        norm = squared.sqrt()
    if bound or scale != 1.0:
        torch._foreach_mul_(local, clip_factor(norm, bound, scale).to(local[0].device))
    return norm


def total_norm(grads: Sequence[Tensor]) -> Tensor:
    """Of all entries together, in float32."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm([*grads], 2.0, dtype=torch.float32)))


def clip_factor(norm: Tensor, bound: float, scale: float) -> Tensor:
    """What to multiply a gradient with that has this norm once it is multiplied by `scale`."""
    return torch.clamp((bound or float("inf")) / (norm + 1e-6), max=1.0) * scale


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def compiled_graphs() -> int:
    """By this process, of anything."""
    return counters["stats"]["unique_graphs"]


def _added(before: dict[str, Tensor], sums: Sums) -> dict[str, Tensor]:
    pairs = {name: torch.stack([total.double(), count.double()]) for name, (total, count) in sums.items()}
    return {**before, **{name: before[name] + p if name in before else p for name, p in pairs.items()}}


def _over_ranks(added: dict[str, Tensor]) -> tuple[list[str], Tensor]:
    """Every rank's sums, added: names, and [names, 2]. All ranks run the same terms, but a term may have had
    no token on one of them."""
    names = sorted(added)
    if world_size() > 1:
        everyone: list[list[str]] = [[] for _ in range(world_size())]
        dist.all_gather_object(everyone, names)  # by gloo, which waits for no device
        names = sorted(set().union(*everyone))
    nothing = torch.zeros_like(added["loss/total"])
    table = torch.stack([added.get(name, nothing) for name in names])
    if world_size() > 1:
        dist.all_reduce(table)
    return names, table
