"""Every loss and correction, once. A new one is one line here, and is held to the whole contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import losses
from tests.losses.invariance import Inputs

Aux = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """`call(inputs, mask, **rows)` -> (per-token loss, aux). rows: row, n_rows of packed tokens if by_row."""

    name: str
    call: Callable[..., tuple[Tensor, Aux]]
    wrt: str = "logp"
    by_row: bool = False  # asks about whole sequences
    by_batch: bool = False  # asks about all tokens given: exact only if they are those of the step


def loss(
    fn: Callable[..., tuple[Tensor, Aux]], args: str, *, wrt: str = "logp", by_row: bool = False, **kw: Any
) -> Entry:
    """fn(*inputs named in args, with "mask" for the mask, **kw)."""

    def call(inputs: Inputs, mask: Tensor, **rows: Any) -> tuple[Tensor, Aux]:
        return fn(*(mask if a == "mask" else inputs[a] for a in args.split()), **kw, **rows)

    return Entry(name=_name(fn, kw), call=call, wrt=wrt, by_row=by_row)


def corrected(
    fn: Callable[..., tuple[Tensor, Aux]], *, by_row: bool = False, by_batch: bool = False, **kw: Any
) -> Entry:
    """A correction, held to the contract as the factor of the loss that it will be."""

    def call(inputs: Inputs, mask: Tensor, **rows: Any) -> tuple[Tensor, Aux]:
        if fn is losses.off_policy_sequence_mask:
            factor, aux = fn(inputs["logp"], inputs["logp_mu"], inputs["adv"], mask, **kw, **rows)
        else:
            factor, aux = fn(inputs["logp"] - inputs["logp_mu"], mask, **kw, **rows)
        term, _ = losses.reinforce_loss(inputs["logp"], inputs["logp_mu"], inputs["adv"], mask)
        return (torch.where(factor, term, 0.0) if factor.dtype == torch.bool else factor * term), aux

    return Entry(name=_name(fn, kw), call=call, by_row=by_row, by_batch=by_batch)


def normalised(
    log_rho: Tensor, mask: Tensor, *, mean: float | None = None, level: Any = "token", **rows: Any
) -> tuple[Tensor, Aux]:
    weight, aux = losses.tis_weight(log_rho, mask)
    return losses.normalise_weight(weight, mask, mean=mean, level=level, **rows)[0], aux


def by_version(
    logp: Tensor, logp_mu: Tensor, adv: Tensor, mask: Tensor, version: Tensor
) -> tuple[Tensor, Aux]:
    prox, aux = losses.loglinear_prox(logp, logp_mu, version, mask, current=4)
    return losses.grpo_loss(logp, prox, adv, mask)[0], aux


def _name(fn: Callable[..., Any], kw: dict[str, Any]) -> str:
    return "-".join([fn.__name__, *(f"{k}={v}" for k, v in kw.items())])


PG, COV = "logp logp_mu adv mask", "logp logp_mu adv mask selected"
POLICY = [
    loss(losses.reinforce_loss, PG),
    loss(losses.grpo_loss, PG),
    loss(losses.grpo_loss, PG, eps_low=0.1, eps_high=0.1, dual_clip=1.3),
    loss(losses.gspo_loss, PG, by_row=True, eps_low=0.05, eps_high=0.1),
    loss(losses.gspo_token_loss, PG, by_row=True, eps_low=0.05, eps_high=0.1),
    loss(losses.gmpo_loss, PG, by_row=True, eps_low=0.2, eps_high=0.3),
    loss(losses.cispo_loss, PG, cap=1.3, floor=0.7),
    loss(losses.aipo_loss, PG, cap=1.3),
    loss(losses.sapo_loss, PG),
    loss(losses.dppo_loss, PG, limit_low=0.05, limit_high=0.05),
    loss(losses.dppo_loss, PG, divergence="kl", limit_low=0.01, limit_high=0.01),
    loss(losses.topr_loss, PG, by_row=True),
    loss(losses.dro_loss, PG, beta=0.5),
    loss(losses.vespo_loss, PG, by_row=True),
    loss(losses.clip_cov_loss, COV),
    loss(losses.kl_cov_loss, COV),
]
KL = [
    loss(losses.k1, "logp logp_ref mask"),
    loss(losses.k2, "logp logp_ref mask"),
    loss(losses.k3, "logp logp_ref mask"),
    loss(losses.k3, "logp logp_ref mask", clamp=0.3),
    loss(losses.k1_st, "logp logp_ref mask"),
    loss(losses.k3_st, "logp logp_ref mask"),
    loss(losses.k3_weighted, "logp logp_ref logp_mu mask"),
    loss(losses.full_kl, "logits logits_ref mask", wrt="logits"),
]
CORRECTION = [
    corrected(losses.importance_weight),
    corrected(losses.importance_weight, by_row=True, level="sequence"),
    corrected(losses.tis_weight, cap=1.2, floor=0.8),
    corrected(losses.tis_weight, by_row=True, level="geometric"),
    corrected(losses.mis_weight, high=1.2),
    corrected(losses.mis_weight, by_row=True, level="sequence", high=1.5),
    corrected(losses.icepop_weight),
    corrected(normalised, by_batch=True),
    corrected(normalised, mean=1.2),
    corrected(normalised, by_row=True, mean=1.2, level="sequence"),
    corrected(losses.ratio_mask, level="token", low=0.8, high=1.3),
    corrected(losses.ratio_mask, by_row=True, level="sequence", low=0.5, high=2.0),
    corrected(losses.ratio_mask, by_row=True, level="geometric", low=0.9, high=1.1),
    corrected(losses.divergence_mask, level="token", limit=0.05),
    corrected(losses.divergence_mask, by_row=True, estimator="k1", level="sequence_sum", limit=0.2),
    corrected(losses.divergence_mask, by_row=True, estimator="k2", level="sequence_mean", limit=0.1),
    corrected(losses.divergence_mask, by_row=True, level="sequence_max", limit=0.3),
    corrected(losses.veto_mask, by_row=True, floor=0.6),
    corrected(losses.off_policy_sequence_mask, by_row=True, limit=0.05),
    corrected(losses.m2po_mask, by_batch=True),
    loss(by_version, "logp logp_mu adv mask version"),
]
LOSSES = POLICY + KL + CORRECTION
