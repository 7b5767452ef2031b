"""One optimiser step: `state, metrics = train_step(state, micros, ...)`. The old state is consumed: rebind
at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from losses import linear_logp
from models.attention import Layout, make_layout, packed_attention
from models.transformer import Attend, Transformer
from rl.batch import MicroBatch
from rl.config import Trainer
from rl.objective import Objective, Sums, finish
from rl.survey import Survey


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    model: Transformer
    optimizer: torch.optim.Optimizer
    version: int  # optimiser steps taken


def make_optimizer(model: nn.Module, cfg: Trainer) -> torch.optim.AdamW:
    cuda = next(model.parameters()).is_cuda
    return torch.optim.AdamW(
        model.parameters(),
        lr=cfg.lr,
        betas=cfg.betas,
        weight_decay=cfg.weight_decay,
        fused=cuda,
        foreach=not cuda,
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
    model, optimizer = state.model, state.optimizer
    optimizer.zero_grad(set_to_none=True)
    added: dict[str, torch.Tensor] = {}
    total = torch.zeros((), dtype=torch.float64)
    surveys = _survey(state, micros, objective)
    for micro, survey in zip(micros, surveys, strict=True):
        hidden = model(micro.ids, micro.layout.positions, attend_packed(micro.layout))
        loss, sums = objective.loss(hidden[micro.select], model.head, micro, survey)
        loss.backward()
        total += loss.detach().double().cpu()
        _add(added, sums)
    added["loss/total"] = torch.stack(
        [total, torch.ones_like(total) / world_size()]
    )  # shares: added, not averaged
    norm = clip_gradients(model, cfg.clip_grad)
    lr = learning_rate(cfg, state.version)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    metrics = finish(_over_ranks(added))
    return replace(state, version=state.version + 1), {**metrics, "train/grad_norm": norm, "train/lr": lr}


@torch.no_grad()
def _survey(state: TrainState, micros: Sequence[MicroBatch], objective: Objective) -> list[Survey]:
    if objective.survey is None:
        return [Survey()] * len(micros)
    logps = []
    for micro in micros:
        hidden = state.model(micro.ids, micro.layout.positions, attend_packed(micro.layout))[micro.select]
        logp, _ = linear_logp(hidden, state.model.head, micro.target, temperature=objective.temperature)
        logps.append(logp)
    return objective.survey(logps, micros, state.version)


def attend_packed(layout: Layout) -> Attend:
    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return packed_attention(q, k, v, layout)

    return attend


@torch.no_grad()
def probe_logps(model: Transformer, ids: Sequence[int]) -> tuple[float, ...]:
    """Log-probs [len(ids) - 1] of each token given those before it, at temperature 1. All ranks must call
    it."""
    tokens = torch.tensor(ids, device=next(model.parameters()).device)
    layout = make_layout([len(ids)], tokens.device)
    hidden = model(tokens, layout.positions, attend_packed(layout))
    logp = model.logits(hidden[:-1]).float().log_softmax(-1)
    if isinstance(model, FSDPModule):
        model.reshard()  # the root stays gathered after a forward; the next step must not meet it
    return tuple(logp.gather(-1, tokens[1:, None]).squeeze(-1).tolist())


def clip_gradients(model: nn.Module, bound: float) -> float:
    """Scale the gradient to global norm <= bound (0: only measure). Returns the norm over all shards
    before that."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), bound or float("inf"))
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _add(added: dict[str, torch.Tensor], sums: Sums) -> None:
    for name, (total, count) in sums.items():
        pair = torch.stack([total.double().cpu(), count.double().cpu()])
        added[name] = added[name] + pair if name in added else pair


def _over_ranks(added: dict[str, torch.Tensor]) -> dict[str, tuple[float, float]]:
    """Every rank's sums, added. All ranks run the same terms, but a term may have had no token on one of
    them."""
    if world_size() > 1:
        names: list[str] = sorted(added)
        everyone: list[list[str]] = [[] for _ in range(world_size())]
        dist.all_gather_object(everyone, names)
        names = sorted(set().union(*everyone))
        table = torch.stack([added.get(n, torch.zeros(2, dtype=torch.float64)) for n in names])
        dist.all_reduce(table)
        return {n: (float(a), float(b)) for n, (a, b) in zip(names, table.tolist(), strict=True)}
    return {n: (float(p[0]), float(p[1])) for n, p in added.items()}
