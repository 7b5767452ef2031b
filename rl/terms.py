"""The loss of one trained token: Σ_terms coef · weight · term, a function of its log-prob and constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import losses
from rl import forms
from rl.batch import MicroBatch, Taught
from rl.config import Config, Loss
from rl.lessons import TERMS
from rl.survey import Survey
from rl.teaching import MIXED, MIXTURE

Columns = dict[str, Tensor]  # name → [M, ...], a row for each trained token


def separable(cfg: Config) -> bool:
    """Whether the loss of a token depends on that token's logits alone, and on few of their log-probs: not by
    sequence, not over the whole vocabulary, and not from the best tokens of several teachers."""
    loss, fix = cfg.loss, cfg.correction
    by_sequence = (
        (loss.policy != 0 and "row" in forms.taken(forms.POLICY[loss.form]))
        or (fix.weight in ("tis", "mis") and fix.level != "token")
        or fix.reject in ("sequence", "geometric", "k3", "veto", "opsm")
    )
    one = loss.distill_mix == "routed" or (loss.distill_mix == "sum" and len(cfg.teachers) == 1)
    return not by_sequence and (not diverges(cfg) or (loss.distill_top_k > 0 and one))


def diverges(cfg: Config) -> bool:
    """Whether teachers are more than a part of the advantage."""
    return cfg.uses_teachers and cfg.loss.distill_form == "divergence"


def unstreamable(cfg: Config) -> list[str]:
    """Why a step's micro-batches cannot be accumulated before its batch is complete; nothing if they can.

    They can if all that the rest of the batch decides is one factor of the loss, the `scale` of rl/step.py's
    `finish`. Several terms have that in common only while each counts every sample: with a reward missing,
    or a sample that no teacher has, the step must be begun again with the weights then known.
    """
    loss, fix = cfg.loss, cfg.correction
    reasons = {
        f"loss.advantage {loss.advantage} is measured over the batch": loss.policy != 0
        and loss.advantage in ("batch_std", "reinforce_pp_baseline"),
        f"loss.form {loss.form} picks among the tokens of the step": loss.form in forms.SELECTING,
        f"correction.reject {fix.reject} compares the tokens of the step": fix.reject == "m2po",
        "correction.normalise divides by a mean over the step": fix.normalise,
        "each teacher's term is a mean over its own tokens": cfg.uses_teachers
        and loss.distill_mix not in MIXED
        and len(cfg.teachers) > 1,
    }
    return [reason for reason, holds in reasons.items() if holds]


def columns(cfg: Config, micro: MicroBatch, survey: Survey) -> Columns:
    """The constants of `terms`."""
    x = {"mu": micro.logp_mu, "adv": micro.adv}
    x |= {f"on/{t}": micro.mask[t] for t in TERMS} | {f"weight/{t}": micro.weight[t] for t in TERMS}
    if cfg.correction.prox == "loglinear":
        x |= {"version": micro.version, "current": micro.current.expand_as(micro.version)}
    if cfg.uses_reference:
        assert micro.logp_ref is not None
        x["ref"] = micro.logp_ref
    if survey.selected is not None:
        x["selected"] = survey.selected
    if survey.keep is not None:
        x["keep"] = survey.keep
    if survey.mean_weight is not None:
        x["mean_weight"] = survey.mean_weight.expand_as(micro.adv)
    if cfg.uses_teachers and not diverges(cfg):
        for name, taught in micro.teachers.items():
            x[f"taught/{name}"] = spread(micro, taught, taught.mask, False)
            x[f"logp/{name}"] = spread(micro, taught, taught.logp, 0.0)
            x[f"weight/{name}"] = spread(micro, taught, taught.weight, 0.0)
    return x


def best(micro: MicroBatch, top_k: int) -> tuple[Columns, Tensor]:
    """More constants: the teachers' log-probs [M, K] of their best tokens, and the weights. And the tokens'
    ids [M, K], -1 in unused slots. A token may have one teacher. Raises ValueError where one sent no rows."""
    k = max((t.rows.shape[1] for t in micro.teachers.values() if t.rows is not None), default=top_k)
    weight = torch.zeros_like(micro.adv)
    rows, ids = weight.new_full((len(weight), k), -torch.inf), weight.new_full((len(weight), k), -1).long()
    for taught in micro.teachers.values():
        wanted = rows_of(taught)
        slots = torch.where(wanted > -torch.inf, rows_of(taught, ids=True), -1)
        there = spread(micro, taught, taught.mask, False)
        weight = torch.where(there, spread(micro, taught, taught.weight, 0.0), weight)
        rows = torch.where(there[:, None], spread(micro, taught, wanted, 0.0), rows)
        ids = torch.where(there[:, None], spread(micro, taught, slots, -1), ids)
    return {"weight/best": weight, "best": rows}, ids


def rows_of(taught: Taught, *, ids: bool = False) -> Tensor:
    found = taught.ids if ids else taught.rows
    if found is None:
        raise ValueError(
            "objective: a teacher sent log-probs of the tokens alone, and a divergence wants rows"
        )
    return found


def spread(micro: MicroBatch, taught: Taught, values: Tensor, elsewhere: float | bool) -> Tensor:
    """[R, ...] of the tokens that a teacher taught → [M, ...]."""
    m = len(micro.adv)
    to = torch.where(taught.mask, taught.at, m)  # padding goes to one place more
    return values.new_full((m + 1, *values.shape[1:]), elsewhere).index_copy(0, to, values)[:m]


def terms(
    cfg: Config,
    policy: Callable[..., tuple[Tensor, Columns]],
    x: Columns,
    rows: tuple[Tensor, int] | None,
    logp: Tensor,
    log_best: Tensor | None = None,
    log_rest: Tensor | None = None,
) -> tuple[Tensor, Columns]:
    """[M] losses, and what is reported of each token.

    policy: `forms.policy` of the config. x: `columns`, and with log_best those of `best`. rows: the sequence
    of each token and their number, None where `separable`. logp [M] of the token; log_best [M, K] of a
    teacher's best ones, log_rest [M] of the mass of all others.
    """
    loss, fix = cfg.loss, cfg.correction
    mu, on, mask, row = x["mu"], x["on/kl"], x["on/policy"], rows or (None, None)
    total, prox = torch.zeros_like(logp), mu
    if fix.prox == "loglinear":
        prox, _ = losses.loglinear_prox(logp, mu, x["version"], on, current=x["current"])
    log_rho = (prox if fix.prox == "loglinear" else logp.detach()) - mu
    kept = forms.keep(fix, log_rho, logp, mu, x["adv"], on, *row)  # type: ignore[arg-type]
    if "keep" in x:
        kept = kept & x["keep"]
    seen = {"kept": kept}
    if fix.reject != "none":
        seen["correction/rejected"] = (~kept).float()

    if loss.policy:
        adv = x["adv"]
        for name in [n.removeprefix("taught/") for n in x if n.startswith("taught/")]:
            here = kept & x[f"taught/{name}"]
            pull, _ = losses.distill_advantage(logp, x[f"logp/{name}"], here)
            if has_term(loss, name):
                # weighted as this teacher's term, although the policy term has another count
                scale = torch.where(here, x[f"weight/{name}"] / x["weight/policy"], 0.0)
                adv = adv + loss.distill * scale * pull
            seen[f"loss/distill/{name}"] = -pull
        term, aux = policy(logp, prox, adv, mask, *row, x.get("selected"))
        correction = forms.weigh(fix, log_rho, mask, *row)  # type: ignore[arg-type]
        if correction is not None:
            if "mean_weight" in x:
                correction, _ = losses.normalise_weight(correction, mask, mean=x["mean_weight"])
            term = correction * term
            seen["correction/weight"] = correction
        term = torch.where(kept, term, 0.0)
        total = total + loss.policy * x["weight/policy"] * term
        seen["loss/policy"] = term
        clipped = [value for name, value in aux.items() if name.startswith("clipped")]
        if clipped:
            seen["policy/clipped"] = torch.stack(clipped).amax(0)

    if "ref" in x:
        if loss.kl_form == "k3_weighted":
            term, _ = losses.k3_weighted(logp, x["ref"], mu, on)
        else:
            term, _ = forms.KL[loss.kl_form](logp, x["ref"], on)
        total = total + loss.kl * x["weight/kl"] * term
        seen["loss/kl"] = term

    if log_best is not None and log_rest is not None:
        # what is rejected is masked before the divergence: 0 · NaN would reach the gradient
        here = kept & (x["weight/best"] > 0)
        term, _ = losses.partition_divergence(log_best, log_rest, x["best"], here, **kind(loss))
        total = total + loss.distill * x["weight/best"] * term
        seen["loss/distill"] = term
    return total, seen


def kind(cfg: Loss) -> dict[str, Any]:
    return {"kind": cfg.distill_kind, "beta": cfg.distill_beta, "alpha": cfg.distill_alpha}


def has_term(cfg: Loss, name: str) -> bool:
    """Whether this teacher acts by itself, or only through the mixture."""
    return cfg.distill_mix not in MIXED or name == MIXTURE
