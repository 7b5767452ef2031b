"""What must be known of the whole step before its first gradient: log-probs, then one look at all tokens.

Needed by losses and corrections that compare tokens with each other over the step (Clip-Cov, KL-Cov, M2PO,
normalised weights). So they too give the same gradient however the batch is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import losses
from rl import forms
from rl.batch import MicroBatch
from rl.config import Correction, Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Of one micro-batch: M trained tokens. None where the config does not ask for it."""

    selected: Tensor | None = None  # [M] bool, picked by Clip-Cov or KL-Cov
    keep: Tensor | None = None  # [M] bool, kept by M2PO
    mean_weight: Tensor | None = None  # scalar, of the importance weight


def needed(loss: Loss, fix: Correction) -> bool:
    return loss.form in forms.SELECTING or fix.reject == "m2po" or fix.normalise


def make_surveys(
    logps: Sequence[Tensor], micros: Sequence[MicroBatch], loss: Loss, fix: Correction, seed: int
) -> list[Survey]:
    """One survey per micro-batch of this rank, from the log-probs [M] of each; all ranks must call it."""
    mine = {
        "logp": torch.cat(list(logps)),
        "mu": torch.cat([m.logp_mu for m in micros]),
        "version": torch.cat([m.version for m in micros]),
        "adv": torch.cat([m.adv for m in micros]),
        "mask": torch.cat([m.mask["policy"] for m in micros]),
        "row": torch.cat([m.row + sum(before.n_rows for before in micros[:i]) for i, m in enumerate(micros)]),
    }
    sizes, n_rows = [len(m.target) for m in micros], sum(m.n_rows for m in micros)
    everyone, rank = _gather(mine, n_rows)
    every = {name: torch.cat([theirs[name] for theirs in everyone]) for name in mine}
    mask, rows = every["mask"], (every["row"], int(every["row"].max()) + 1 if len(every["row"]) else 1)
    prox = every["mu"]
    if fix.prox == "loglinear":
        current = micros[0].current.to(prox.device)
        prox, _ = losses.loglinear_prox(every["logp"], prox, every["version"], mask, current=current)
    log_rho = (prox if fix.prox == "loglinear" else every["logp"]) - every["mu"]

    start = sum(len(theirs["mask"]) for theirs in everyone[:rank])
    device = micros[0].ids.device

    def own(x: Tensor) -> Sequence[Tensor | None]:
        # Copies: of a view the compiled loss would know how long the whole step is.
        return [part.clone() for part in x[start : start + sum(sizes)].to(device).split(sizes)]

    nothing: Sequence[Tensor | None] = [None] * len(micros)
    selected, keep, mean = nothing, nothing, None
    if loss.form in forms.SELECTING:
        selected = own(forms.select(loss, every["logp"], prox, every["adv"], mask, seed))
    if fix.reject == "m2po":
        limit = {} if fix.keep_high is None else {"limit": fix.keep_high}
        keep = own(losses.m2po_mask(log_rho, mask, **limit)[0] | ~mask)
    if fix.normalise:
        weight = forms.weigh(fix, log_rho, mask, *rows)
        assert weight is not None
        _, aux = losses.normalise_weight(weight, mask)
        mean = (aux["total"] / aux["count"].clamp(min=1)).to(device)
    return [Survey(selected=s, keep=k, mean_weight=mean) for s, k in zip(selected, keep, strict=True)]


def _gather(mine: dict[str, Tensor], n_rows: int) -> tuple[list[dict[str, Tensor]], int]:
    """Everyone's tokens, rows counted through, and this rank's place among them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine], 0
    sent = ({name: x.cpu() for name, x in mine.items()}, n_rows)
    received: list[tuple[dict[str, Tensor], int]] = [sent] * dist.get_world_size()
    dist.all_gather_object(received, sent)
    offset, everyone = 0, []
    for theirs, count in received:
        everyone.append({**theirs, "row": theirs["row"] + offset})
        offset += count
    return everyone, dist.get_rank()
